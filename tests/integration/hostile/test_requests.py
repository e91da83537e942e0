"""A real server under seeded bad requests: nobody else is harmed. ``benchmarks/soak/hostile.py`` does the same for minutes.

A case that fails is named ``SEED:INDEX …``; ``python benchmarks/soak/hostile.py --seed SEED --case INDEX`` sends it alone.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bad_requests import GOOD, KINDS, BadRequests, Raw, dump
from clients import CONTROLS, Attack, post, text_of
from hostile import FLAGS, KILL_FLAGS, Figures, document_of, report_lives
from kills import Kills, run_kills
from processes import Server, Usage, usage_of
from raw_http import MUST_ANSWER, RAW_CASES, run_raw

from trencadis_server.app import make_app

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the engine in Linux's /proc"),
]

SEED = 22
MOST_HELD_S = 2.0
"""Of the event loop's own CPU time at once: so generous that no neighbour on the machine matters; goals are the benchmark's."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--server.body_timeout_s", "6", "--server.max_engine_restarts", "0")
    try:
        yield server.wait()
    finally:
        left = server.close(seconds=120)
    assert not left


@pytest.fixture(scope="module")
def bad(server: Server) -> BadRequests:
    return BadRequests(SEED, document_of(server))


async def texts(server: Server) -> list[str]:
    """Return what well-behaved clients get."""
    answers = [
        (path, await post(server.port, path, {"model": "demo", **body}, patience_s=120)) for path, body in CONTROLS
    ]
    return [text_of(path, answer) for path, answer in answers]


def assert_unharmed(server: Server, engine: int | None) -> None:
    assert server.engine_pid() == engine
    assert not server.wait_for_rest(120)
    assert not [line for line in server.lines if "Traceback" in line]
    held_s = server.metric("trencadis_event_loop_held_seconds")
    assert held_s is not None
    assert held_s < MOST_HELD_S


@pytest.mark.parametrize("num_cases", [40, pytest.param(200, marks=pytest.mark.nightly)])
def test_bad_requests_are_refused_and_harm_nobody(server: Server, bad: BadRequests, num_cases: int) -> None:
    attack = Attack(bad, server.port, server.admin_port, at_once=4, raw_share=0.0)
    undisturbed, engine = asyncio.run(texts(server)), server.engine_pid()

    async def attacked() -> list[list[str]]:
        found = []
        running = asyncio.ensure_future(attack.run(num_cases=num_cases))
        while not running.done():
            found.append(await texts(server))
        await running
        return found

    for disturbed in asyncio.run(attacked()):
        assert disturbed == undisturbed
    assert len(attack.attempts) == num_cases
    assert not [(one.name, one.answer.outcome, one.answer.body[:300]) for one in attack.faults()]
    assert not [one.name for one in attack.unanswered() if one.answer.outcome != "left"]
    statuses = {one.answer.status for one in attack.attempts}
    assert {200, 400, 404} <= statuses
    assert_unharmed(server, engine)


def test_bytes_that_no_client_would_send_are_refused_and_harm_nobody(server: Server) -> None:
    before, undisturbed, engine = usage_of(server.pid), asyncio.run(texts(server)), server.engine_pid()

    async def attacked() -> list[tuple[str, str]]:
        attacks = [run_raw(server.port, name, random.Random(name)) for name in RAW_CASES]
        disturbed, *results = await asyncio.gather(texts(server), *attacks)
        assert disturbed == undisturbed
        return [(name, result.outcome) for name, result in zip(RAW_CASES, results, strict=True)]

    outcomes = asyncio.run(attacked())
    assert not [(name, outcome) for name, outcome in outcomes if outcome.startswith("5") or outcome == "open"]
    assert {name for name, outcome in outcomes if outcome == "200"} >= MUST_ANSWER
    assert_unharmed(server, engine)
    after = usage_of(server.pid)
    assert before is not None
    assert after is not None
    assert after.rss_mib - before.rss_mib < 64
    assert after.num_descriptors <= before.num_descriptors + 4


def document() -> Any:
    from support.server.server_doubles import OneEngine, make_context

    return make_app(make_context(OneEngine(None))).openapi()


def test_a_case_depends_on_seed_and_index_alone() -> None:
    found = document()
    one, other = BadRequests(5, found), BadRequests(5, found)
    assert [one.case(index) for index in range(8)] == [other.case(index) for index in reversed(range(8))][::-1]
    assert one.case(7) != BadRequests(6, found).case(7)


def test_the_series_tries_every_kind_and_every_field_of_the_document() -> None:
    found = document()
    series = BadRequests(1, found, kinds=("wrong_type", "edge", "combination"))
    tried: dict[str, set[str]] = {path: set() for path in series.bodies}
    for index in itertools.count():
        case = series.case(index)
        tried[case.path] |= set(case.name.split()[-1].split("+"))
        missing = {path: fields.keys() - tried[path] for path, fields in series.bodies.items()}
        if not any(missing.values()):
            break
        assert index < 3000, missing
    everything = BadRequests(1, found)
    kinds = (everything.case(index).name.split()[1] for index in range(400))
    seen: set[str] = set()
    assert any(seen.add(kind) or seen == KINDS.keys() for kind in kinds), KINDS.keys() - seen


def test_numbers_without_end_and_half_surrogates_are_written_as_they_are() -> None:
    value = {"a": [Raw("1e999"), "\ud800"], "b": GOOD["/tokenize"]}
    assert dump(value).startswith(b'{"a":[1e999,"\\ud800"],"b":')


@pytest.mark.parametrize(("header", "num_faults"), [("Retry-After: 5\r\n", 0), ("", 1)])
def test_a_raw_503_is_excused_while_an_engine_is_absent_if_it_says_when_to_try_again(
    header: str, num_faults: int
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(f"HTTP/1.1 503 Service Unavailable\r\n{header}content-length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    async def attacked() -> Attack:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as listener:
            attack = Attack(BadRequests(SEED, {"paths": {}}), listener.sockets[0].getsockname()[1], raw_share=1)
            index = next(
                one
                for one in range(10_000)
                if (rng := random.Random(f"{SEED}:{one}:how")).random() < 1 and rng.choice(RAW_CASES) == "half closed"
            )
            await attack.attempt(index)
            return attack

    attack = asyncio.run(attacked())
    (attempt,) = attack.attempts
    assert attempt.answer.outcome == "raw 503 missed"
    attack.is_excused = Kills(absences_s=[(attempt.begin_s, attempt.end_s)]).excuses
    assert len(attack.faults()) == num_faults
    attack.is_excused = Kills(absences_s=[(attempt.end_s + 1, attempt.end_s + 2)]).excuses
    assert len(attack.faults()) == 1


@pytest.mark.parametrize(
    ("own_mib", "kv_mib", "last_s", "missed"),
    [
        (100.0, 0.0, 40.0, ["largest growth of one of these"]),
        (0.0, 1000.0, 40.0, []),  # the KV cache becomes resident
        (100.0, 0.0, 30.0, []),  # ended early
    ],
)
def test_growth_is_judged_in_lives_of_a_third_of_a_run(
    own_mib: float, kv_mib: float, last_s: float, missed: list[str]
) -> None:
    def usage(pid: int, own_mib: float, kv_mib: float) -> Usage:
        return Usage(rss_mib=own_mib + kv_mib, kv_mib=kv_mib, num_descriptors=20, num_threads=8, pid=pid)

    first, later = usage(1, 500.0, 0.0), usage(1, 500.0 + own_mib, kv_mib)
    figures = Figures()
    report_lives([(0.0, first), (10.0, first), (last_s, later), (90.0, None), (100.0, usage(2, 500.0, 0.0))], figures)
    assert figures.missed == missed


@pytest.mark.nightly  # one at a time: tests/integration/server/test_engine_death.py; everything mixed, for half an hour: test_soak.py
@pytest.mark.parametrize("count", [2, 12])
def test_kills_stops_and_cancels_leave_nothing_and_everybody_is_told(count: int) -> None:
    server = Server(*FLAGS, *KILL_FLAGS)
    try:
        done = run_kills(server.wait(), count, SEED)
        held = server.wait_for_rest(120)
    finally:
        left = server.close(seconds=120)
    assert sum(done.events.values()) == count
    assert done.wrong == held == left == []
    assert not {"cut off", "no connection", "never answered"} & done.answers.keys()
    assert done.silence_s < 60
