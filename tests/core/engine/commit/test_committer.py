"""Ends inside a run of accepted drafts: what is behind the end was never said, and is not counted."""

from __future__ import annotations

from typing import Any

from trencadis.records import Request, SamplingParams
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
