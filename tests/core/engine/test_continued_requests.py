"""A request whose output another engine began goes on after it, as if the tokens had been chosen here."""

from __future__ import annotations

import attrs
import pytest

from trencadis.errors import ContinuationError, RequestRefusedError
from trencadis.interfaces import SchedulingPolicy
from trencadis.records import FinishReason, Request, SamplingParams
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPT = tuple(range(1, 11))
TEXT = fake_text(PROMPT, 12, eos=-1)


def continued(num_tokens: int, name: str = "r", **params: object) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=PROMPT,
        params=SamplingParams(**{"max_tokens": 12, **params}),
        output_token_ids=tuple(TEXT[:num_tokens]),
    )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 11])
@pytest.mark.parametrize("token_budget", [3, 64])
def test_it_ends_with_the_whole_text_wherever_it_was_cut(overlap: bool, num_tokens: int, token_budget: int) -> None:
    engine = make_engine(
        backend=FakeBackend(eos=-1), async_scheduling=overlap, max_num_batched_tokens=token_budget, warmup=False
    )
    slot = engine.add(continued(num_tokens))
    new: list[int] = []
    ended = {}
    while engine.has_work:
        deltas = engine.step()
        assert set(deltas.slots.tolist()) <= {slot}
        new += deltas.token_ids.tolist()
        ended |= {one.request_id: one for one in deltas.finished}
    assert new == TEXT[num_tokens:]  # what the client has is not sent again
    end = ended["r"]
    assert (end.token_ids.tolist(), end.num_prompt_tokens, end.finish_reason) == (TEXT, 10, FinishReason.LENGTH)
    assert end.first_token_s is not None
    engine.close()


def test_lengths_count_from_the_prompt() -> None:
    engine = make_engine(backend=FakeBackend(eos=TEXT[6]))
    engine.add(continued(4, min_tokens=8, ignore_eos=True, stop_token_ids=(TEXT[5], TEXT[9])))
    end = drain(engine)["r"]
    assert end.token_ids.tolist() == TEXT[:10]  # token 5 is one of the first eight
    assert (end.finish_reason, end.stop_token_id) == (FinishReason.STOP, TEXT[9])
    engine.close()


def test_its_blocks_are_found_in_the_prefix_cache_and_shared_with_it() -> None:
    engine = make_engine(backend=FakeBackend(eos=-1), block_size=4)
    engine.add(continued(0, "first"))
    drain(engine)
    engine.add(continued(7, "second"))
    end = drain(engine)["second"]
    assert end.token_ids.tolist() == TEXT
    assert end.num_cached_tokens == 10  # of the prompt: the four blocks found have six tokens of the output, too
    engine.close()


class Full(SchedulingPolicy):
    def admit(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        return "full"


def test_what_was_accepted_once_is_not_asked_to_be_admitted_again() -> None:
    engine = make_engine(policy=Full(), backend=FakeBackend(eos=-1))
    engine.add(continued(0, "none"))
    engine.add(continued(3, "some"))
    with pytest.raises(RequestRefusedError, match="full"):
        engine.add(attrs.evolve(continued(0), output_token_ids=None))
    assert {end.token_ids.tolist() == TEXT for end in drain(engine).values()} == {True}
    engine.close()


def test_one_whose_sampler_keeps_more_than_tokens_is_refused_unless_it_has_none() -> None:
    engine = make_engine(backend=FakeBackend(eos=-1), is_portable=lambda params: not params.mirostat_mode)
    with pytest.raises(ContinuationError, match="mirostat_mode"):
        engine.add(continued(3, mirostat_mode=2))
    engine.add(continued(0, mirostat_mode=2))
    assert drain(engine)["r"].token_ids.tolist() == TEXT
    engine.close()
