from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest

from support.eventually import eventually
from trencadis.activity import ACTIVITY, ActivityView, EnginePhase
from trencadis.client.engine_client import StepOutputs
from trencadis.clock import SimulatedClock
from trencadis.records import (
    Embedding,
    FinishedSequence,
    FinishReason,
    Request,
    SamplingParams,
    TokenDeltas,
    TokenLogprobs,
)
from trencadis_remote.process.messages import AddMessage, CloseMessage, MetricsMessage
from trencadis_remote.process.wire import encode
from trencadis_remote.process.worker import LOAD_S, EngineWorker
from trencadis_testing.engines import make_engine

PROMPT = (5, 6, 7)
EMPTY = np.empty(0, np.int32)


def request(name: str, num_tokens: int = 5, prompt: tuple[int, ...] = PROMPT) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=num_tokens))


def test_an_impossible_request_is_refused_and_the_host_goes_on(open_line: Callable[..., Any]) -> None:
    line = open_line()
    # What a client of ours never sends: parameters that cannot be, and fields of another type.
    for params in ({"top_p": 9.0}, {"top_p": "high"}, []):
        table = {"request_id": "bad", "prompt_token_ids": [5], "params": params}
        data = msgspec.Raw(msgspec.msgpack.encode(table))
        line.transport.send(AddMessage(handle=7, request_id="bad", request=data))
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
    line = open_line(room=1)
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


class Scripted:
    """Gives a request a slot, and its only step the outputs, that a test wants."""

    model = make_engine().model
    max_model_len, plan_hash, hashing = 1024, "x", None

    def __init__(self, slots: tuple[int, ...], deltas: TokenDeltas) -> None:
        self.slots, self.steps = list(slots), [deltas]

    @property
    def has_work(self) -> bool:
        return bool(self.steps) and not self.slots

    def add(self, _: Request) -> int:
        return self.slots.pop(0)

    def step(self) -> TokenDeltas:
        return self.steps.pop()

    def close(self) -> None:
        """Nothing to close."""


def outputs_of(open_line: Callable[..., Any], slots: tuple[int, ...], deltas: TokenDeltas) -> list[StepOutputs]:
    """What the client of an engine is given for a step; its requests are named a, b, c ..."""
    line = open_line(engine=Scripted(slots, deltas))
    for name, _ in zip("abcdef", slots, strict=False):
        line.client.add(request(name))
    eventually(lambda: line.worker.turn() and not line.engine.steps)
    outputs = []
    while not outputs or outputs[-1].slots or outputs[-1].prompt_logprobs:
        outputs.append(line.client.step(timeout_s=0.2))
    return outputs[:-1]


ENTRY = TokenLogprobs(
    index=1, position=9, token_id=5, logprob=-0.5, rank=2, top_token_ids=(7, 5), top_logprobs=(-0.1, -0.5)
)


def test_a_step_arrives_with_handles_for_slots_also_of_a_slot_that_was_given_to_another(
    open_line: Callable[..., Any],
) -> None:
    finished = FinishedSequence(
        request_id="a", slot=4, token_ids=np.array([5, 6], np.int32), finish_reason=FinishReason.ERROR, num_prompt_tokens=3,
        error="x \ud800",
    )  # fmt: skip
    embedding = Embedding(request_id="e", vector=np.array([0.25, -1], np.float32), num_tokens=4)
    deltas = TokenDeltas(
        slots=np.array([2, 4], np.int32),
        num_tokens=np.array([2, 1], np.int32),
        token_ids=np.array([5, 6, 7], np.int32),
        finished=(finished,),
        logprobs=(ENTRY,),
        prompt_logprobs=(msgspec.structs.replace(ENTRY, index=2),),
        embeddings=(embedding,),
    )
    first, second = outputs_of(open_line, (4, 2, 4), deltas)
    assert first == StepOutputs(prompt_logprobs=(ENTRY,), slots=[], num_tokens=[], token_ids=[])
    assert second.slots == [1, 2]
    assert (second.num_tokens, second.token_ids) == ([2, 1], [5, 6, 7])
    assert second.finished == (attrs.evolve(finished, slot=0, error="x \\ud800"),)
    assert (second.logprobs, second.prompt_logprobs, second.embeddings) == ((ENTRY,), (), (embedding,))


def test_log_probabilities_of_a_long_prompt_are_many_messages_none_of_them_long(open_line: Callable[..., Any]) -> None:
    entry = msgspec.structs.replace(ENTRY, index=3, top_token_ids=(7,) * 50, top_logprobs=(-0.1,) * 50)
    entries = tuple(msgspec.structs.replace(entry, position=position) for position in range(1, 1000))
    deltas = TokenDeltas(slots=EMPTY, num_tokens=EMPTY, token_ids=EMPTY, prompt_logprobs=entries)
    outputs = outputs_of(open_line, (3,), deltas)
    assert max(len(encode(one)) for one in outputs) < 2**17
    arrived = [one for some in outputs for one in some.prompt_logprobs]
    assert [(one.index, one.position) for one in arrived] == [(0, position) for position in range(1, 1000)]
