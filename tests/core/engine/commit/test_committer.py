"""Ends inside a run of accepted drafts: what is behind the end was never said, and is not counted."""

from __future__ import annotations

from typing import Any

import pytest

from support.core.invariants import broken_invariants
from trencadis.records import FinishReason, Request, SamplingParams
from trencadis_testing.doubles import ScriptedSpeculator
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPT = tuple(range(1, 11))


def request(name: str = "r", **params: object) -> Request:
    return Request(request_id=name, prompt_token_ids=PROMPT, params=SamplingParams(**{"max_tokens": 12, **params}))


def right(tokens: Any) -> list[int]:
    return fake_text(tokens.tolist(), 7, eos=-1)


def engine_of(**options: Any) -> Any:
    backend = options.pop("backend", None) or FakeBackend(eos=-1)
    return make_engine(backend=backend, speculator=ScriptedSpeculator(right, max_draft_tokens=7), **options)


@pytest.mark.parametrize("place", range(2, 11))
def test_a_stop_token_inside_an_accepted_run_ends_the_text_there(place: int) -> None:
    text = fake_text(PROMPT, 30, eos=-1)
    stop = text[place]
    place = text.index(stop)
    engine = engine_of()
    engine.add(request("r", max_tokens=30, stop_token_ids=(stop,)))
    end = drain(engine)["r"]
    assert end.token_ids.tolist() == text[: place + 1]
    assert (end.finish_reason, end.stop_token_id) == (FinishReason.STOP, stop)
    assert engine.totals.num_emitted_tokens == place + 1
    assert engine.totals.num_accepted_tokens <= place
    assert broken_invariants(engine) == []


def test_accepted_drafts_are_counted_if_they_were_emitted() -> None:
    """One token from the prompt; then seven drafts stand, of which the third ends the text."""
    text = fake_text(PROMPT, 12, eos=-1)
    engine = engine_of()
    engine.add(request("r", stop_token_ids=(text[3],)))
    assert drain(engine)["r"].token_ids.tolist() == text[:4]
    assert (engine.totals.num_draft_tokens, engine.totals.num_accepted_tokens) == (7, 3)
    assert engine.totals.num_drafted_by_position == (1,) * 7
    assert engine.totals.num_accepted_by_position == (1, 1, 1, 0, 0, 0, 0)


def test_the_token_behind_accepted_drafts_is_none_of_them() -> None:
    engine = engine_of()
    engine.add(request("r", max_tokens=9))
    drain(engine)
    assert (engine.totals.num_draft_tokens, engine.totals.num_accepted_tokens) == (7, 7)
    assert engine.totals.num_emitted_tokens == 9


@pytest.mark.parametrize("length", range(1, 18))
def test_the_longest_output_is_never_passed(length: int) -> None:
    engine = engine_of()
    engine.add(request("r", max_tokens=length))
    end = drain(engine)["r"]
    assert end.token_ids.tolist() == fake_text(PROMPT, length, eos=-1)
    assert end.finish_reason is FinishReason.LENGTH
    assert engine.totals.num_emitted_tokens == length


@pytest.mark.parametrize("place", range(1, 9))
def test_an_end_of_sequence_inside_an_accepted_run_ends_the_text(place: int) -> None:
    text = fake_text(PROMPT, 12, eos=-1)
    place = text.index(text[place])
    engine = engine_of(backend=FakeBackend(eos=text[place]))
    engine.add(request("r"))
    end = drain(engine)["r"]
    assert end.token_ids.tolist() == text[: place + 1]
    assert end.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("least", [3, 5, 6, 7])
def test_a_stop_before_the_shortest_output_does_not_end_a_run(least: int) -> None:
    text = fake_text(PROMPT, 12, eos=-1)
    stop = text[4]
    later = [i for i, token in enumerate(text) if token == stop and i + 1 >= least]
    engine = engine_of()
    engine.add(request("r", min_tokens=least, stop_token_ids=(stop,)))
    end = drain(engine)["r"]
    assert end.token_ids.tolist() == text[: later[0] + 1 if later else 12]


@pytest.mark.parametrize("length", [2, 5, 9, 12])
def test_every_emitted_token_has_its_logprobs_and_no_other(length: int) -> None:
    engine = engine_of()
    engine.add(request("r", max_tokens=length, logprobs=2))
    found = []
    while engine.has_work:
        found += engine.step().logprobs
    text = fake_text(PROMPT, length, eos=-1)
    assert [(entry.position, entry.token_id) for entry in found] == [(10 + i, token) for i, token in enumerate(text)]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_sequences_keep_their_accepted_drafts(preemption: str) -> None:
    """Half of the drafts are right; the cache is too small for all."""

    def half(tokens: Any) -> list[int]:
        return right(tokens) if len(tokens) % 2 else [(right(tokens)[0] + 1) % 97] * 3

    engine = make_engine(
        backend=FakeBackend(eos=-1),
        speculator=ScriptedSpeculator(half, max_draft_tokens=7),
        num_blocks=13,
        max_num_seqs=4,
        preemption=preemption,
    )
    for i in range(5):
        engine.add(request(str(i), max_tokens=24))
    ends = {}
    while engine.has_work:
        ends.update({end.request_id: end for end in engine.step().finished})
        assert broken_invariants(engine) == []
    assert sum(end.num_preemptions for end in ends.values()) > 0
    assert all(end.token_ids.tolist() == fake_text(PROMPT, 24, eos=-1) for end in ends.values())


@pytest.mark.parametrize("after", range(1, 6))
def test_an_abort_between_drafted_steps_leaves_nothing_behind(after: int) -> None:
    engine = engine_of(prefix_caching=False)
    for name in "ab":
        engine.add(request(name, max_tokens=40))
    for _ in range(after):
        engine.step()
    end = engine.abort("a")
    assert end is not None
    assert end.token_ids.tolist() == fake_text(PROMPT, 40, eos=-1)[: len(end.token_ids)]
    assert broken_invariants(engine) == []
    assert drain(engine)["b"].token_ids.tolist() == fake_text(PROMPT, 40, eos=-1)
    assert engine.inspect().blocks.num_used == 0
