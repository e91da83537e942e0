from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from support.core.invariants import broken_invariants
from trencadis.engine.scheduling.adapters import AdapterPlaces
from trencadis.engine.sequences import SequenceTable
from trencadis.errors import ConfigValueError, InvalidRequestError
from trencadis.interfaces import BackendCapabilities, SchedulerView, SchedulingPolicy
from trencadis.records import Request, SamplingParams
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text


def request(name: str, adapter: str = "", *, length: int = 8, max_tokens: int = 6, first: int | None = None) -> Request:
    start = sum(map(ord, name)) % 50 if first is None else first
    return Request(
        request_id=name,
        prompt_token_ids=tuple((start + i) % 97 for i in range(length)),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        adapter=adapter,
    )


def engine_of(**options: Any) -> Any:
    return make_engine(backend=FakeBackend(eos=-1, max_model_len=240), **{"max_num_seqs": 4, **options})


def running(engine: Any) -> list[str]:
    table = engine._state.table
    return sorted(table.sequence(slot).request.request_id for slot in engine._state.running.tolist())


def adapters_running(engine: Any) -> set[str]:
    table = engine._state.table
    return {table.sequence(slot).request.adapter for slot in engine._state.running.tolist()} - {""}


def text(prompt: Request) -> tuple[int, ...]:
    most = prompt.params.max_tokens or 0
    return tuple(fake_text(prompt.prompt_token_ids, most, eos=-1, adapter=prompt.adapter))


def test_without_places_a_request_that_names_an_adapter_is_refused_in_words() -> None:
    engine = engine_of()
    with pytest.raises(InvalidRequestError, match=r"adapter = 'french'.*max_loras = 0"):
        engine.add(request("a", "french"))
    assert not engine.has_work
    engine.add(request("b"))
    assert set(drain(engine)) == {"b"}


def test_a_backend_that_would_ignore_adapters_is_refused_at_the_start() -> None:
    class WithoutAdapters(FakeBackend):
        capabilities = BackendCapabilities(layout="ragged", default_block_size=4)

    with pytest.raises(ConfigValueError, match=r"max_loras = 2.*backend.adapters"):
        make_engine(backend=WithoutAdapters(), max_loras=2)


def test_one_without_a_place_is_skipped_and_those_behind_it_are_not_blocked() -> None:
    engine = engine_of(max_loras=1)
    for name, adapter in (("a", "x"), ("b", "y"), ("c", ""), ("d", "x")):
        engine.add(request(name, adapter))
    engine.step()
    assert running(engine) == ["a", "c", "d"]
    ends = drain(engine)
    assert ends["b"].first_scheduled_s is not None
    for one in (request("a", "x"), request("b", "y"), request("c"), request("d", "x")):
        assert tuple(ends[one.request_id].token_ids.tolist()) == text(one)


def test_an_adapter_keeps_its_place_until_its_last_sequence_has_left() -> None:
    """Two sequences of x run, one is aborted: y must not come in beside the other."""
    engine = engine_of(max_loras=1)
    for name, adapter in (("a", "x"), ("b", "x"), ("c", "y")):
        engine.add(request(name, adapter, max_tokens=30))
    engine.step()
    engine.abort("a")
    engine.step()
    assert running(engine) == ["b"]
    engine.abort("b")
    engine.step()
    assert running(engine) == ["c"]


@pytest.mark.parametrize(("max_skips", "is_served"), [(5, True), (10**6, False)])
def test_steady_use_of_one_adapter_keeps_another_out_only_until_it_was_skipped_too_often(
    max_skips: int, is_served: bool
) -> None:
    """x always runs, and more of it always comes; once y was passed over five times, x takes in no more."""
    engine = engine_of(max_loras=1, max_num_seqs=3, max_adapter_skips=max_skips)
    engine.add(request("x0", "x", max_tokens=12))
    engine.step()
    engine.add(request("y", "y"))
    served = set()
    for number in range(1, 60):
        engine.add(request(f"x{number}", "x", max_tokens=12))
        served.update(end.request_id for end in engine.step().finished)
        assert len(adapters_running(engine)) <= 1
    assert ("y" in served) is is_served


def test_a_place_is_kept_for_the_oldest_that_was_skipped_too_often() -> None:
    table = SequenceTable()
    slots = np.array([table.take_slot() for _ in range(4)], np.int32)
    places = AdapterPlaces(table, num_places=2, max_skips=3)
    for slot, (adapter, arrival_s) in enumerate([("hot", 0.0), ("warm", 0.0), ("old", 1.0), ("new", 2.0)]):
        table.adapter[slot], table.arrival_s[slot] = places.number(adapter), arrival_s
    places.enter(0)
    places.enter(1)
    for _ in range(3):
        places.reserve(slots[2:])
        assert places.have_turns(slots).tolist() == [True, True, False, False]
        places.passed_over(slots[2:])
    places.reserve(slots[2:])
    # The place of "hot" is to become free, being as little used as "warm" and older: it takes in no more.
    assert places.have_turns(slots).tolist() == [False, True, False, False]
    places.leave(0)
    assert places.have_turns(slots).tolist() == [False, True, True, False]
    places.enter(2)
    assert places.have_turns(slots).tolist() == [False, True, True, False]
    places.reserve(slots[3:])  # "new" is next, and "warm" the one that is to end for it
    assert places.have_turns(slots).tolist() == [False, False, True, False]


def test_whoever_a_place_was_kept_for_may_go_away() -> None:
    engine = engine_of(max_loras=1, max_num_seqs=2, max_adapter_skips=1)
    engine.add(request("a", "x", max_tokens=40))
    engine.step()
    engine.add(request("b", "y"))
    for _ in range(3):
        engine.step()
    engine.add(request("c", "x"))
    engine.step()
    assert running(engine) == ["a"]
    engine.abort("b")
    engine.step()
    assert running(engine) == ["a", "c"]


def test_nobody_gives_way_for_one_whose_adapter_has_no_place() -> None:
    class AlwaysGivesWay(SchedulingPolicy):
        preempts = True

        def order(self, view: SchedulerView) -> np.ndarray:
            return view.waiting[np.argsort(view.priority[view.waiting], kind="stable")]

        def give_way(self, view: SchedulerView, *, slot: int, candidates: np.ndarray) -> int:
            return int(candidates[-1])

    engine = make_engine(
        policy=AlwaysGivesWay(), backend=FakeBackend(eos=-1, max_model_len=240), max_loras=1, max_num_seqs=1
    )
    engine.add(request("a", "x", max_tokens=20))
    engine.step()
    engine.add(request("b", "y"))
    for _ in range(5):
        engine.step()
    assert running(engine) == ["a"]
    assert engine.totals.num_preempted == 0


def test_two_adapters_share_no_block_of_the_same_prompt_under_the_same_salt() -> None:
    engine = engine_of(max_loras=2)
    prompts = [request(name, adapter, length=16, first=3) for name, adapter in (("a", "x"), ("b", "y"), ("c", ""))]
    again = request("d", "x", length=16, first=3)
    for one in (*prompts, again):
        engine.add(one)
        ends = drain(engine)
        assert tuple(ends[one.request_id].token_ids.tolist()) == text(one)
        assert ends[one.request_id].num_cached_tokens == (12 if one is again else 0)


@settings(phases=[Phase.explicit, Phase.generate], max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    max_loras=st.integers(1, 3),
    num_blocks=st.sampled_from([14, 30, 80]),
    max_skips=st.integers(1, 6),
    overlaps=st.booleans(),
)
def test_in_any_history_no_more_adapters_run_than_allowed_and_everybody_gets_the_text_of_its_own(
    seed: int, max_loras: int, num_blocks: int, max_skips: int, overlaps: bool
) -> None:
    """17, 27: under KV pressure, preemptions and aborts."""
    rng = random.Random(seed)
    engine = make_engine(
        backend=FakeBackend(eos=-1, max_model_len=48),
        num_blocks=num_blocks,
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.choice([8, 64]),
        max_loras=max_loras,
        max_adapter_skips=max_skips,
        async_scheduling=overlaps,
    )
    requests, ends, aborted = {}, {}, set()
    for number in range(25):
        one = request(
            str(number),
            rng.choice(["", "u", "v", "w", "x", "y"]),
            length=rng.randint(1, 20),
            max_tokens=rng.randint(1, 20),
            first=rng.randint(0, 2),
        )
        requests[one.request_id] = one
        engine.add(one)
        if rng.random() < 0.2:
            victim = str(rng.randrange(number + 1))
            if engine.abort(victim) is not None:
                aborted.add(victim)
        for _ in range(rng.randint(0, 2)):
            ends.update((end.request_id, end) for end in engine.step().finished)
            assert len(adapters_running(engine)) <= max_loras
            assert adapters_running(engine) == {
                name
                for name, number in engine._state.adapters._numbers.items()
                if number in engine._state.adapters._num_users
            }
            assert broken_invariants(engine) == []
    for _ in range(1500):
        if not engine.has_work:
            break
        ends.update((end.request_id, end) for end in engine.step().finished)
        assert len(adapters_running(engine)) <= max_loras
    assert not engine.has_work
    assert set(ends) | aborted == set(requests)
    for name, end in ends.items():
        if name not in aborted:
            assert tuple(end.token_ids.tolist()) == text(requests[name])
    assert engine._state.adapters.num_running == 0
