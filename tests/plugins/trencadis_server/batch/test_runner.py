from __future__ import annotations

import asyncio
import json

import pytest
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from support.server.server_doubles import app_with
from trencadis.errors import EngineEndedError
from trencadis_server.batch.files import Done
from trencadis_server.batch.lines import line_id
from trencadis_server.batch.runner import BatchRunner, Summary, post
from trencadis_server.errors import ApiError, EngineUnavailableError, TooBusyError


def lines_of(*bodies, url="/v1/completions"):
    return [
        json.dumps({"custom_id": f"c{number}", "method": "POST", "url": url, "body": body}).encode()
        for number, body in enumerate(bodies, start=1)
    ]


class World:
    """An application whose only endpoint does what the body says, and what was written."""

    def __init__(self) -> None:
        self.router = APIRouter()
        self.router.add_api_route("/v1/completions", self.endpoint, methods=["POST"])
        self.faults: list[Exception] = []
        self.num_inside = self.most_inside = self.num_taken = self.furthest_ahead = 0
        self.num_answered = 0
        self.slept: list[float] = []
        self.written: list[dict] = []
        self.progress: list[int] = []

    async def endpoint(self, request: Request) -> dict[str, object]:
        body = await request.json()
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        try:
            await asyncio.sleep(0)
            if self.faults:
                raise self.faults.pop(0)
            if "status" in body:
                raise ApiError(body["status"], "as you wish")
            self.num_answered += 1
            return {"echo": body}
        finally:
            self.num_inside -= 1

    def run(self, lines, *, done=Done(), num_workers=4) -> Summary:  # noqa: B008 - frozen
        def feed():
            for number, text in enumerate(lines, start=1):
                self.num_taken += 1
                self.furthest_ahead = max(self.furthest_ahead, self.num_taken - len(self.progress))
                yield number, text

        async def sleep(seconds):
            self.slept.append(seconds)

        def write(line):
            from trencadis_server.batch.lines import encode

            self.written.append(json.loads(encode(line)))

        async def main():
            runner = BatchRunner(
                app_with(self.router),
                feed(),
                done=done,
                write=write,
                num_workers=num_workers,
                advance=lambda done, total=None: self.progress.append(done),
                sleep=sleep,
            )
            return await asyncio.wait_for(runner.run(), 20)

        return asyncio.run(main())

    def by_name(self):
        return {line["custom_id"]: line for line in self.written}


@pytest.fixture
def world():
    return World()


def test_every_line_gets_its_own_answer(world):
    summary = world.run(lines_of(*({"n": number} for number in range(20))))
    assert summary == Summary(num_ok=20)
    answers = {name: line["response"]["body"]["echo"]["n"] for name, line in world.by_name().items()}
    assert answers == {f"c{number + 1}": number for number in range(20)}
    assert all(line["response"]["request_id"].startswith("req_") for line in world.written)
    assert world.progress == list(range(1, 21))


def test_many_lines_run_at_once_but_the_input_is_not_read_far_ahead(world):
    world.run(lines_of(*({"n": number} for number in range(50))), num_workers=3)
    assert world.most_inside == 3
    assert world.furthest_ahead == 3


def test_bad_lines_fail_alone(world):
    lines = [*lines_of({}), b"broken", *lines_of({"status": 400}), b'{"custom_id": "x"}']
    lines[2] = lines[2].replace(b'"c1"', b'"c3"')
    summary = world.run(lines)
    assert summary == Summary(num_ok=1, num_failed=3)
    found = world.by_name()
    assert found["c1"]["response"]["status_code"] == 200
    assert found["c3"]["response"]["status_code"] == 400
    assert found["c3"]["response"]["body"]["error"]["message"] == "as you wish"
    assert found[None]["error"]["message"].startswith("line 2: ")
    assert found["x"]["error"]["message"].startswith("line 4: ")


def test_a_name_that_was_used_before_is_refused_naming_both_lines(world):
    (line,) = lines_of({"n": 1})
    assert world.run([line, line, line]) == Summary(num_ok=1, num_failed=2)
    errors = [one["error"] for one in world.written if one["error"]]
    assert {error["code"] for error in errors} == {"duplicate_custom_id"}
    assert {error["message"].split(":")[0] for error in errors} == {"line 2", "line 3"}
    assert all("line 1" in error["message"] for error in errors)


def test_what_an_earlier_run_answered_is_not_asked_again_wherever_it_stands(world):
    lines = lines_of({"n": 1}, {"n": 2})
    summary = world.run(lines[::-1], done=Done(custom_ids=frozenset({"c1"})))
    assert summary == Summary(num_ok=1, num_skipped=1)
    assert world.num_answered == 1
    assert list(world.by_name()) == ["c2"]


def test_a_bad_line_is_not_reported_twice(world):
    lines = [b"broken", *lines_of({"n": 1})]
    summary = world.run(lines, done=Done(ids=frozenset({line_id(b"broken", 1)})))
    assert summary == Summary(num_ok=1, num_skipped=1)


def test_a_repeated_name_is_found_out_also_when_its_first_line_is_done(world):
    (line,) = lines_of({"n": 1})
    done = Done(ids=frozenset({line_id(line, 1)}), custom_ids=frozenset({"c1"}))
    assert world.run([line, line], done=done) == Summary(num_failed=1, num_skipped=1)


def test_a_busy_server_is_asked_again_when_it_says(world):
    world.faults = [
        TooBusyError("full.", retry_after_s=3.0),
        EngineUnavailableError("loading", state="restarting", retry_after_s=7.0),
    ]
    assert world.run(lines_of({"n": 1}), num_workers=1) == Summary(num_ok=1)
    assert world.slept == [3.0, 7.0]


def test_a_failure_without_a_time_to_come_back_is_that_lines_alone(world):
    world.faults = [ApiError(503, "the step failed", code="engine_error")]
    assert world.run(lines_of({"n": 1}, {"n": 2}), num_workers=1) == Summary(num_ok=1, num_failed=1)
    assert world.slept == []


def test_an_engine_that_has_ended_for_good_ends_the_run_and_writes_no_failures(world):
    world.faults = [EngineUnavailableError("killed too often", state="failed") for _ in range(50)]
    with pytest.raises(EngineEndedError, match=r"killed too often.*Run the same command again"):
        world.run(lines_of(*({"n": number} for number in range(20))))
    assert world.written == []


def call(app, path, body):
    return asyncio.run(asyncio.wait_for(post(app, path, body), 10))


def test_the_answer_is_what_a_client_over_http_gets():
    router = APIRouter()

    @router.post("/v1/echo")
    async def echo(request: Request) -> dict[str, object]:
        return {"got": await request.json(), "type": request.headers["content-type"]}

    answer = call(app_with(router), "/v1/echo", b'{"a": 1}')
    assert answer.status == 200
    assert answer.body == b'{"got":{"a":1},"type":"application/json"}'
    assert answer.headers["x-request-id"].startswith("req_")


def test_an_answer_in_parts_is_put_together():
    router = APIRouter()

    @router.post("/v1/parts")
    async def parts() -> StreamingResponse:
        async def body():
            yield b"a"
            yield b"b"

        return StreamingResponse(body())

    assert call(app_with(router), "/v1/parts", b"{}").body == b"ab"
