"""Replicas with fake engines in this thread, which end when the test says so."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.core.remote_parts import StepCounter
from support.core.replicas import PROMPT, TEXT, Fleet
from support.core.replicas import request_of as request
from trencadis.client.frontend import Frontend
from trencadis.errors import ContinuationError, EngineEndedError, InvalidRequestError
from trencadis.interfaces import ReplicaViews, RoutingRequest
from trencadis.records import EmbeddingRequest, FinishReason, Request, RequestTerms, SamplingParams
from trencadis.text import Tokenizer
from trencadis_remote.replicas.guarded_router import LeastLive


class Deepest(LeastLive):
    """The replica with most of the prompt."""

    needs_prefixes = True

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def peek(self, request: RoutingRequest, replicas: ReplicaViews) -> int:
        if replicas.hit_blocks.any():
            return int(np.where(replicas.is_healthy, replicas.hit_blocks, -1).argmax())
        return super().peek(request, replicas)

    def on_finished(self, request: RoutingRequest, replica: int) -> None:
        self.told.append(("finished", replica))

    def on_replica_added(self, replica: int) -> None:
        self.told.append(("added", replica))

    def on_replica_removed(self, replica: int) -> None:
        self.told.append(("removed", replica))


def test_requests_are_spread_and_come_back_under_their_own_slots(fleet: Callable[..., Fleet]) -> None:
    one = fleet(3)
    slots = {name: one.client.add(request(name)) for name in "abcdef"}
    assert sorted(slots.values()) == list(range(6))
    assert [one.where(name) for name in "abcdef"] == [0, 1, 2, 0, 1, 2]
    one.until(lambda: len(one.finished) == 6)
    assert {name: one.tokens[slot] for name, slot in slots.items()} == dict.fromkeys("abcdef", TEXT)
    assert {name: end.slot for name, end in one.finished.items()} == slots
    assert not one.client.has_work
    assert one.client.add(request("g")) == 0  # slots are used again


@pytest.mark.parametrize("num_turns", [0, 1, 2, 7, 20])
def test_requests_of_a_replica_that_ends_go_on_elsewhere_after_the_tokens_that_came(
    fleet: Callable[..., Fleet], num_turns: int
) -> None:
    one = fleet(2)
    slots = {name: one.client.add(request(name)) for name in "abcd"}
    for _ in range(num_turns):
        one.turn()
    one.lines[0].worker.turn()  # type: ignore[union-attr]  # it has sent this, and is received after its end
    one.kill(0)
    one.until(lambda: len(one.finished) == 4)
    assert {name: one.tokens[slot] for name, slot in slots.items()} == dict.fromkeys("abcd", TEXT)
    assert {tuple(end.token_ids.tolist()) for end in one.finished.values()} == {tuple(TEXT)}
    assert one.starter.begun == [(0, 0.0)]
    row = one.ask("replicas")["replicas"][0]
    assert (row["state"], row["num_moved"], row["num_live"]) == ("down", 2, 0)
    assert "ended in a test" in row["reason"]


def test_a_request_that_the_other_replica_does_not_take_is_refused_and_forgotten(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = fleet(2)
    one.client.add(request("a"))
    other = one.lines[1]
    assert other is not None

    def refuse(_: Request) -> int:
        raise InvalidRequestError("it is too long there")

    monkeypatch.setattr(other.client, "add", refuse)
    one.kill(0)
    one.until(lambda: "a" in one.refused)
    assert not one.client.has_work
    monkeypatch.undo()
    assert one.client.add(request("a")) == 0
    assert one.client.replicas.seats[1].work.keys() == {"a"}


def test_a_replica_that_is_started_again_takes_requests(fleet: Callable[..., Fleet]) -> None:
    router = Deepest()
    one = fleet(2, router)
    one.kill(1)
    one.take()
    one.client.add(request("a"))
    assert one.where("a") == 0
    one.revive(1)
    one.client.add(request("b", prompt=(9, 9)))
    assert one.where("b") == 1
    one.until(lambda: len(one.finished) == 2)
    assert router.told[:4] == [("added", 0), ("added", 1), ("removed", 1), ("added", 1)]
    assert sorted(router.told[4:]) == [("finished", 0), ("finished", 1)]
    assert one.ask("replicas")["replicas"][1]["num_restarts"] == 1


def test_restarts_of_each_replica_are_limited(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)
    for _ in range(2):
        one.kill(1)
        one.take()
        one.clock.advance(10.0)
        one.revive(1)
    one.kill(0)
    one.take()
    assert one.starter.begun == [(1, 0.0), (1, 50.0), (0, 0.0)]  # one within 60 s


def test_replicas_that_end_at_once_hand_requests_on_until_one_lives(fleet: Callable[..., Fleet]) -> None:
    one = fleet(4)
    slots = [one.client.add(request(name)) for name in "abcdefgh"]
    one.turn()
    for replica in (0, 1, 3):
        one.kill(replica)
    one.until(lambda: len(one.finished) == 8)
    assert [one.tokens[slot] for slot in slots] == [TEXT] * 8


def test_when_none_is_left_what_came_is_shown_and_then_all_is_over(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)
    one.client.add(request("a", num_tokens=1))
    one.client.add(request("b"))
    line = one.lines[0]
    assert line is not None
    one.kill(1)
    one.take()
    while not line.engine.totals.num_finished:
        line.worker.turn()
    assert select.select([line.client.socket_file], [], [], 60)[0]
    one.kill(0)
    with contextlib.suppress(EngineEndedError):
        one.take()
    assert "a" in one.finished
    for _ in range(2):
        with pytest.raises(EngineEndedError, match=r"no replica is left; the last one: .* ended in a test"):
            one.client.step()
    for use in (
        lambda: one.client.add(request("c")),
        lambda: one.client.embed(EmbeddingRequest(request_id="t", token_ids=(1,))),
        lambda: one.client.request_metrics(print),
        lambda: one.client.control("totals", {}, print),
        one.client.receive_last,
    ):
        with pytest.raises(EngineEndedError, match="no replica is left"):
            use()
    one.client.abort("b")


def test_a_request_that_was_to_end_ends_though_its_replica_does_not_say_it(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)
    slots = [one.client.add(request(name)) for name in "abcd"]
    one.until(lambda: slots[0] in one.tokens)
    one.client.stop("a")
    one.client.abort("c")
    one.client.abort("c")
    one.kill(0)
    one.until(lambda: len(one.finished) == 4)
    assert [one.finished[name].finish_reason for name in "abcd"] == [
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.LENGTH,
    ]
    assert one.finished["a"].token_ids.tolist() == one.tokens[slots[0]] == TEXT[: len(one.tokens[slots[0]])]
    one.client.abort("a")
    one.client.stop("nobody")


def test_one_that_cannot_go_on_elsewhere_is_refused_with_the_reason_and_others_go_on(
    fleet: Callable[..., Fleet],
) -> None:
    one = fleet(2, is_portable=lambda params: not params.mirostat_mode)
    one.client.add(request("a", mirostat_mode=2))
    one.client.add(request("b", mirostat_mode=2))
    one.client.add(request("c"))
    one.until(lambda: all(one.client.replicas.work[name].tokens for name in "abc"))
    for name in "de":
        one.client.add(request(name, mirostat_mode=2))
    assert one.where("e") == 0  # and has no token
    one.kill(0)
    one.until(lambda: len(one.finished) == 4)
    assert list(one.refused) == ["a"]
    assert isinstance(one.refused["a"], ContinuationError)
    assert "mirostat_mode" in str(one.refused["a"])
    assert not one.client.has_work


def test_a_frontend_gives_whole_texts_and_the_reason_of_one_that_cannot_go_on(
    fleet: Callable[..., Fleet], tokenizer: Tokenizer
) -> None:
    one = fleet(2, is_portable=lambda params: not params.mirostat_mode)
    frontend = Frontend(one.client, tokenizer)
    clients = [
        frontend.submit(PROMPT, SamplingParams(max_tokens=40, **more), request_id=str(i), streams=i % 2 == 0)
        for i, more in enumerate([{}, {"n": 2}, {"logprobs": 1, "prompt_logprobs": 1}, {"mirostat_mode": 2}])
    ]
    moved = one.where("3")
    while not all(client.is_finished for client in clients):
        for line in one.lines:
            if line is not None:
                line.worker.turn()
        frontend.step(timeout_s=0.001)
        if one.lines[moved] is not None and one.client.replicas.work["3"].tokens:
            one.kill(moved)
    outputs = [client.output() for client in clients]
    texts = [choice.token_ids for output in outputs[:3] for choice in output.outputs]
    assert texts == [tuple(TEXT)] * 4
    entries = outputs[2].outputs[0].logprobs
    assert entries is not None
    assert [entry.token_id for entry in entries] == TEXT
    assert [len(output.prompt_logprobs or ()) for output in outputs[:3]] == [0, 0, len(PROMPT) - 1]
    assert isinstance(clients[3].refusal, ContinuationError)


def test_texts_to_embed_go_to_another_replica(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)
    for number in range(4):
        one.client.embed(EmbeddingRequest(request_id=f"t/{number}", token_ids=(1, 2, number)))
    with pytest.raises(InvalidRequestError, match="live already"):
        one.client.add(request("t/0"))
    one.client.abort("t/3")
    one.kill(0)
    one.until(lambda: not one.client.has_work)
    assert set(one.embedded) - {"t/3"} == {
        "t/0",
        "t/1",
        "t/2",
    }  # the other may have been embedded before it was dropped


def test_ids_are_unique_over_all_replicas(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)
    one.client.add(request("a"))
    with pytest.raises(InvalidRequestError, match="live already"):
        one.client.add(request("a"))
    with pytest.raises(InvalidRequestError):
        one.client.add(request("b", prompt=(99999,)))
    assert one.client.add(request("c")) == 1  # what was refused holds no slot
    assert one.where("c") == 1  # and is no load


def test_prefixes_are_found_where_they_are_computed_and_where_they_are_kept(fleet: Callable[..., Fleet]) -> None:
    one = fleet(3, Deepest(), num_blocks=24)
    long, other = tuple(range(1, 33)), tuple(range(50, 80))  # eight full blocks, the last of which is to be computed
    one.client.add(request("a", prompt=other, num_tokens=2))
    one.client.add(request("b", prompt=long, num_tokens=2))
    one.client.add(request("c", prompt=(*long[:20], 99, 98), num_tokens=2))
    assert [one.where(name) for name in "abc"] == [0, 1, 1]  # nothing of it is computed yet
    one.until(lambda: len(one.finished) == 3)
    one.until(lambda: one.ask("route", prompt_token_ids=long)["hit_blocks"] == [0, 7, 0])
    answer = one.ask("route", prompt_token_ids=long)
    assert (answer["replica"], answer["num_blocks"]) == (1, 7)
    assert one.ask("route", prompt_token_ids=long, cache_salt="mine")["hit_blocks"] == [0, 0, 0]
    line = one.lines[1]
    assert line is not None
    for number in range(8):  # other prompts take the blocks of replica 1
        start = 200 + 30 * number
        line.engine.add(request(f"x{number}", prompt=tuple(range(start, start + 30)), num_tokens=2))
    while line.engine.has_work:
        line.engine.step()
    line.worker._send_load()
    one.until(lambda: one.ask("route", prompt_token_ids=long)["hit_blocks"] == [0, 0, 0])
    one.kill(0)
    one.take()
    assert one.ask("route", prompt_token_ids=other)["hit_blocks"] == [0, 0, 0]


def test_hashes_are_those_of_the_engines_with_the_salt(fleet: Callable[..., Fleet]) -> None:
    one = fleet(1, Deepest())
    routing = one.client._routing
    terms = RequestTerms(tenant="key/user", cache_salt="salt")
    made = Request.on_terms(terms, request_id="a", prompt_token_ids=range(1, 10), params=SamplingParams())
    facts = routing.facts(made)
    expected: list[bytes] = []
    hasher = one.lines[0].engine._state.hasher  # type: ignore[union-attr]
    hasher.extend(expected, np.arange(1, 10, dtype=np.int32), num_blocks=2, salt="salt")
    assert facts.block_hashes == tuple(one[:8] for one in expected)
    assert (facts.tenant, facts.user) == ("key", "key/user")


# ------------------------------------------------------------------------------------------- control and metrics


def test_a_drained_replica_ends_what_it_has_and_is_started_again(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)
    for name in "ab":
        one.client.add(request(name))
    one.turn()
    assert [row["state"] for row in one.ask("restart_replica", replica=0)["replicas"]] == ["draining", "ready"]
    for name in "cd":
        one.client.add(request(name))
        assert one.where(name) == 1
    assert one.starter.begun == []
    while "a" not in one.finished:
        assert one.starter.begun == []
        one.turn()
    assert one.starter.begun == [(0, 0.0)]  # with the last end, and not with a later message
    one.until(lambda: len(one.finished) == 4)
    one.lines[0] = None
    with pytest.raises(InvalidRequestError, match="is the only one that serves"):
        one.ask("restart_replica", replica=1)
    with pytest.raises(InvalidRequestError, match="is down"):
        one.ask("restart_replica", replica=0)
    one.revive(0)
    one.client.add(request("e"))
    assert one.where("e") == 0


@pytest.mark.representatives(2)
@pytest.mark.parametrize("replica", [2, -1, "0", True, None])
def test_a_replica_that_is_none_is_named(fleet: Callable[..., Fleet], replica: Any) -> None:
    with pytest.raises(InvalidRequestError, match="there are 0 to 1"):
        fleet(2).ask("restart_replica", replica=replica)


def test_changes_are_made_on_all_and_again_on_one_that_is_started_again(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)
    asked: list[tuple[int, str, Any]] = []

    def listen(replica: int) -> None:
        engine = one.lines[replica].engine  # type: ignore[union-attr]
        engine.answer = lambda name, arguments: asked.append((replica, name, dict(arguments))) or {"num_live": 1}

    for replica in range(2):
        listen(replica)
    table = {"table": {"name": "fcfs"}, "source": "test"}
    one.ask("set_scheduling", **table)
    assert one.ask("set_role", role="prefill") == {"num_live": 2}
    one.ask("set_role", role="both")
    asked.clear()
    one.kill(1)
    one.take()
    line = one.lines[1] = one.open()
    listen(1)
    one.starter.ready(1, line.client)
    one.take()
    one.until(lambda: len(asked) == 2)
    assert asked == [(1, "set_scheduling", table), (1, "set_role", {"role": "both"})]


def test_metrics_say_which_replica_and_come_though_one_ends_meanwhile(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2, observers=[("steps", StepCounter())])
    pages: list[str] = []
    one.client.request_metrics(pages.append)
    one.until(lambda: bool(pages))
    one.client.request_metrics(pages.append)
    one.kill(0)
    one.until(lambda: len(pages) == 2)
    assert 'trencadis_replica_up{replica="0"} 1.0' in pages[0]
    assert 'trencadis_replica_up{replica="0"} 0.0' in pages[1]
    assert 'trencadis_replica_up{replica="1"} 1.0' in pages[1]
    assert ['num_steps{replica="0"}' in page for page in pages] == [True, False]  # it has none any more
    assert ['num_steps{replica="1"}' in page for page in pages] == [True, True]
    assert "trencadis_quarantined_routers 0.0" in pages[1]


def test_stalled_replicas_get_nothing_new_and_all_are_stalled_only_if_each_is(fleet: Callable[..., Fleet]) -> None:
    one = fleet(2)
    first, second = (line.peer for line in one.lines if line is not None)
    first.stalled = "stalled: step 3"
    assert one.client.stalled == ""
    for name in "ab":
        one.client.add(request(name))
        assert one.where(name) == 1
    second.stalled = "stalled: step 4"
    assert one.client.stalled == "replica 0: stalled: step 3; replica 1: stalled: step 4"
    one.clock.advance(1.0)
    one.client.add(request("c"))  # somewhere, as nothing better is left
    first.stalled = second.stalled = ""
    one.until(lambda: len(one.finished) == 3)
