from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from support.eventually import eventually
from trencadis.activity import ACTIVITY, ActivityView, EnginePhase
from trencadis.client.process.messages import AddMessage, CloseMessage, MetricsMessage
from trencadis.client.process.worker import LOAD_S, EngineWorker
from trencadis.clock import SimulatedClock
from trencadis.records import FinishReason, Request, SamplingParams
from trencadis_testing.fakes import fake_text

PROMPT = (5, 6, 7)
EMPTY = np.empty(0, np.int32)


def request(name: str, num_tokens: int = 5, prompt: tuple[int, ...] = PROMPT) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=num_tokens))


def test_tokens_come_under_the_transfer_id_of_their_request(open_line: Callable[..., Any]) -> None:
    line = open_line()
    handles = {line.client.add(request(name, prompt=(5, n))): (5, n) for n, name in enumerate("abc")}
    got: dict[int, list[int]] = {handle: [] for handle in handles}
    for deltas in line.settle():
        start = 0
        for handle, count in zip(deltas.slots, deltas.num_tokens, strict=True):
            got[handle] += deltas.token_ids[start : start + count]
            start += count
    assert got == {handle: fake_text(prompt, 5, vocab_size=4096, eos=-1) for handle, prompt in handles.items()}


def test_more_requests_than_the_table_of_slots_has_at_first(open_line: Callable[..., Any]) -> None:
    line = open_line()
    for number in range(300):
        line.client.add(request(str(number), 1))
    ended = {finished.request_id for deltas in line.settle() for finished in deltas.finished}
    assert ended == {str(number) for number in range(300)}


def test_an_impossible_request_is_refused_and_the_host_goes_on(open_line: Callable[..., Any]) -> None:
    line = open_line()
    # What a client of ours never sends: parameters that cannot be.
    line.transport.send(
        AddMessage(
            handle=7,
            request_id="bad",
            prompt_token_ids=b"\5\0\0\0",
            params={"top_p": 9.0},
            terms={},
        )
    )
    line.client.add(request("good"))
    assert [end.finish_reason for deltas in line.settle() for end in deltas.finished] == [FinishReason.LENGTH]
    assert line.worker.num_live == 0


def test_a_host_at_rest_beats_and_says_nothing(open_line: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    line = open_line()
    monkeypatch.setattr(line.worker, "_beat_s", 0.001)
    seen: list[tuple[int, EnginePhase]] = []
    view = ActivityView()
    ACTIVITY.share(view.file)
    view.close_file()
    wait = line.far.wait

    def look(timeout_s: float | None = None, **more: Any) -> Any:
        reading = view.read()
        seen.append((reading.beat, reading.phase))
        if len(seen) == 3:
            line.client.close()
        return wait(timeout_s, **more)

    monkeypatch.setattr(line.far, "wait", look)
    monkeypatch.setattr(line.transport, "_await_end", lambda: None)
    line.worker.run()
    assert {phase for _, phase in seen} == {EnginePhase.IDLE}
    beats = [beat for beat, _ in seen]
    assert sorted(set(beats)) == beats, "each is new"


def test_a_host_whose_client_takes_nothing_makes_no_progress_and_is_not_to_blame(
    open_line: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = open_line(high_water_mark=1)
    monkeypatch.setattr(line.worker, "_beat_s", 0.001)
    view = ActivityView()
    ACTIVITY.share(view.file)
    view.close_file()

    def send() -> None:
        for _ in range(50):
            line.worker._send(MetricsMessage(text="x" * 100_000))

    sender = threading.Thread(target=send)
    sender.start()
    try:
        eventually(lambda: view.read().phase is EnginePhase.SENDING)
        before = view.read().beat
        eventually(lambda: view.read().beat >= before + 3)
        assert sender.is_alive()
    finally:
        num_taken = 0
        while num_taken < 50:
            num_taken += len(line.transport.wait(10))
        sender.join()


def test_the_load_is_sent_often_enough_while_busy_and_once_when_that_ends(open_line: Callable[..., Any]) -> None:
    line, clock, loads = open_line(), SimulatedClock(), []
    worker = EngineWorker(line.engine, line.far, load_clock=clock)
    line.client.on_load = loads.append
    for number in range(2):
        line.client.add(request(str(number), 40, prompt=(number, *range(10))))
    for _ in range(12):
        while line.engine.num_running < 2 and not loads:  # the requests are on their way
            worker.turn()
        worker.turn()
        clock.advance(LOAD_S / 4)
    eventually(lambda: line.client.receive() and len(loads) >= 3)
    assert len(loads) <= 5  # every fourth turn at most
    assert (loads[-1].num_running, loads[-1].num_waiting) == (2, 0)
    assert 0 < loads[-1].kv_usage < 1
    thread = threading.Thread(target=worker.run)
    thread.start()
    eventually(lambda: line.client.receive() and loads[-1].num_running == 0)
    added, removed = ({one for load in loads for one in getattr(load, kind)} for kind in ("added", "removed"))
    assert added - removed == {one[:8] for one in line.engine.inspect().blocks.hashes.values()}
    line.transport.send(CloseMessage())
    thread.join()


def test_without_a_clock_no_load_is_sent(open_line: Callable[..., Any]) -> None:
    line, loads = open_line(), []
    line.client.on_load = loads.append
    line.client.add(request("a"))
    line.settle()
    assert loads == []
