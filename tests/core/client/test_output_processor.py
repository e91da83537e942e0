from __future__ import annotations

import numpy as np
import pytest

from trencadis.client.client_request import ClientRequest
from trencadis.client.completion import Completion
from trencadis.client.engine_client import StepOutputs
from trencadis.client.output_processor import OutputProcessor
from trencadis.records import FinishedSequence, FinishReason, Request, SamplingParams, TokenLogprobs
from trencadis.text import Tokenizer


class House:
    """A processor and the sequences that it asked the engine to stop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.stopped: list[str] = []
        self.processor = OutputProcessor(self.stop)

    def stop(self, request_id: str) -> FinishedSequence | None:
        self.stopped.append(request_id)
        return end(request_id, 0, [5, 6, 7, 8, 9], FinishReason.STOP)

    def add(self, name: str, slot: int, *, streams: bool = False, **params: object) -> ClientRequest:
        request = Request(request_id=name, prompt_token_ids=(5,), params=SamplingParams(**params))
        client = ClientRequest(request, prompt=None, tokenizer=self.tokenizer, streams=streams)
        self.processor.add(client, client.completions[0], slot=slot)
        return client


@pytest.fixture
def house(tokenizer: Tokenizer) -> House:
    return House(tokenizer)


def end(
    name: str, slot: int, ids: list[int], reason: FinishReason = FinishReason.LENGTH, stop: int | None = None
) -> FinishedSequence:
    return FinishedSequence(
        request_id=name,
        slot=slot,
        token_ids=np.array(ids, np.int32),
        finish_reason=reason,
        num_prompt_tokens=1,
        stop_token_id=stop,
    )


def deltas(tokens: dict[int, list[int]], *finished: FinishedSequence, **more: object) -> StepOutputs:
    return StepOutputs(
        slots=list(tokens),
        num_tokens=[len(ids) for ids in tokens.values()],
        token_ids=[token for ids in tokens.values() for token in ids],
        finished=finished,
        **more,
    )


def test_who_does_not_stream_is_heard_of_once_at_the_end(house: House) -> None:
    client = house.add("a", 0)
    assert house.processor.process(deltas({0: [10]})) == []
    assert client.output().outputs[0].token_ids == ()
    assert house.processor.process(deltas({0: [11]}, end("a", 0, [10, 11]))) == [client]
    assert client.output().outputs[0].token_ids == (10, 11)
    assert client.num_changes == 1
    assert len(house.processor) == 0


def test_a_step_costs_nothing_for_sequences_that_nobody_watches(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    for slot in range(300):
        house.add(str(slot), slot)
    house.add("watched", 300, streams=True)
    calls: list[str] = []
    monkeypatch.setattr(Completion, "append", lambda one, *_, **__: calls.append(one.request_id))
    house.processor.process(deltas({slot: [5] for slot in range(301)}))
    assert calls == ["watched"]


def test_a_sequence_that_ended_by_itself_is_not_stopped_again(house: House) -> None:
    word = list(house.tokenizer.encode("stop"))
    client = house.add("a", 0, stop=["stop"])
    assert house.processor.process(deltas({0: word}, end("a", 0, word))) == [client]
    assert house.stopped == []
    assert client.output().outputs[0].finish_reason is FinishReason.STOP


def test_the_end_is_matched_by_name_because_the_slot_may_be_anothers(house: House) -> None:
    old = house.add("old", 4, streams=True)
    new = house.add("new", 4, streams=True)
    changed = house.processor.process(deltas({4: [10]}, end("old", 4, [9], FinishReason.ERROR)))
    assert set(changed) == {old, new}
    assert old.output().finished
    assert new.output().outputs[0].token_ids == (10,)
    house.processor.process(deltas({4: [11]}))
    assert new.output().outputs[0].token_ids == (10, 11)


def test_logprobs_find_their_sequence_by_position_in_the_step_and_prompt_logprobs_by_slot(house: House) -> None:
    first, second = house.add("a", 7, logprobs=0), house.add("b", 5, logprobs=0, prompt_logprobs=0)
    entries = tuple(
        TokenLogprobs(index=index, position=1, token_id=token, logprob=-1.0, rank=1)
        for index, token in enumerate((10, 11))
    )
    prompt = (TokenLogprobs(index=5, position=1, token_id=12, logprob=-1.0, rank=1),)
    house.processor.process(
        deltas({7: [10], 5: [11]}, end("a", 7, [10]), end("b", 5, [11]), logprobs=entries, prompt_logprobs=prompt)
    )
    assert [entry.token_id for entry in first.output().outputs[0].logprobs or ()] == [10]
    assert [entry.token_id for entry in second.output().outputs[0].logprobs or ()] == [11]
    assert [entry.token_id for entry in second.output().prompt_logprobs or ()] == [12]


def test_late_news_of_a_slot_whose_sequence_has_gone_is_nobodys(house: House) -> None:
    client = house.add("a", 0, streams=True, logprobs=0)
    house.processor.process(deltas({0: [10]}, end("a", 0, [10])))
    before = client.output()
    late = (TokenLogprobs(index=0, position=2, token_id=11, logprob=-1.0, rank=1),)
    assert house.processor.process(deltas({0: [11]}, logprobs=late)) == []
    assert client.output() == before


def test_the_end_of_a_sequence_that_nobody_knows_is_nobodys(house: House) -> None:
    assert house.processor.process(deltas({}, end("stranger", 0, [5]))) == []
