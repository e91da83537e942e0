from __future__ import annotations

import contextlib

import attrs
import numpy as np
import pytest

from trencadis.interfaces import SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.records import Int32Array, Request, SamplingParams
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

PROMPT = tuple(range(1, 23))


def request(name: str, prompt: tuple[int, ...] = PROMPT, **fields: object) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=4), **fields)


def view_of(engine) -> SchedulerView:
    return engine._scheduler.views.view()


def waiting_prefixes(engine) -> list[int]:
    view = view_of(engine)
    return view.prefix_tokens(view.waiting).tolist()


def test_what_a_request_says_is_in_its_columns() -> None:
    engine = make_engine()
    slot = engine.add(request("a", priority=3, weight=2.5, ttft_target_s=0.5, tpot_target_s=0.05))
    other = engine.add(request("b"))
    view = view_of(engine)
    columns = ("priority", "weight", "ttft_target_s", "tpot_target_s", "first_token_s")
    assert [getattr(view, name)[slot] for name in columns] == [3, 2.5, 0.5, 0.05, np.inf]
    assert [getattr(view, name)[other] for name in columns] == [0, 1.0, np.inf, np.inf, np.inf]


def test_first_token_and_cached_tokens_are_there_once_they_are() -> None:
    engine = make_engine(backend=FakeBackend(eos=-1), async_scheduling=False)
    engine.add(request("a"))
    drain(engine)
    engine._clock.advance(7.0)
    slot = engine.add(request("b"))
    engine.step()
    view = view_of(engine)
    assert view.first_token_s[slot] == 7.0
    assert view.num_cached_tokens[slot] == 20


def test_every_column_is_read_only_and_stays_so() -> None:
    engine = make_engine()
    engine.add(request("a"))
    view = view_of(engine)
    arrays = [getattr(view, field.name) for field in attrs.fields(SchedulerView)]
    for array in [array for array in arrays if isinstance(array, np.ndarray)]:
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.setflags(write=True)
        with pytest.raises(ValueError, match="WRITEABLE"):
            array[:].flags.writeable = True


class Unlocks(SchedulingPolicy):
    """Takes what it is shown for its own, whatever it takes."""

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        for name in ("num_tokens", "num_computed_tokens", "running", "waiting"):
            with contextlib.suppress(ValueError):
                getattr(view, name).setflags(write=True)
                getattr(view, name)[:] = 0
        return TokenSplit(decode=token_budget, prefill=token_budget)

    def victim(self, view: SchedulerView, *, candidates: Int32Array) -> int:
        with contextlib.suppress(ValueError):
            candidates.setflags(write=True)
            candidates[:] = 99
        return int(candidates[-1])


def test_a_policy_that_writes_where_it_may_not_changes_nothing() -> None:
    engine = make_engine(policy=Unlocks(), backend=FakeBackend(eos=-1, max_model_len=256), num_blocks=20)
    prompts = {name: tuple(range(first, first + 20)) for name, first in (("a", 1), ("b", 30), ("c", 60))}
    for name, prompt in prompts.items():
        params = SamplingParams(max_tokens=12)
        engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params))
    ends = drain(engine)
    assert {name: end.token_ids.tolist() for name, end in ends.items()} == {
        name: fake_text(prompt, 12, eos=-1) for name, prompt in prompts.items()
    }


def test_prefixes_are_what_admission_would_find() -> None:
    engine = make_engine(backend=FakeBackend(eos=-1))
    engine.add(request("a"))
    drain(engine)
    prompts = {"same": PROMPT, "half": (*PROMPT[:10], 90, 91, 92), "other": (5, 5, 5, 5, 5), "short": PROMPT[:4]}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt))
    engine.add(request("salted", cache_salt="s"))
    found = dict(zip([*prompts, "salted"], waiting_prefixes(engine), strict=True))
    assert found == {"same": 20, "half": 8, "other": 0, "short": 0, "salted": 0}
    assert {name: end.num_cached_tokens for name, end in drain(engine).items()} == found


@pytest.mark.parametrize("option", [{"prefix_caching": False}, {}])
def test_where_nothing_is_cached_no_prefix_is(option: dict[str, bool]) -> None:
    engine = make_engine(**option)
    engine.add(request("a"))
    assert waiting_prefixes(engine) == [0]
