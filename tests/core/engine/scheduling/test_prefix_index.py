from __future__ import annotations

import random

import numpy as np
import pytest

from trencadis.engine.scheduling.views import PrefixIndex
from trencadis.records import Request, SamplingParams
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend


def engine_of(**options):
    backend = FakeBackend(eos=-1, max_model_len=96)
    return make_engine(backend=backend, num_blocks=24, max_num_seqs=2, max_num_batched_tokens=32, **options)


def add(engine, name: str, prompt, *, max_tokens: int = 3, **fields) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    engine.add(Request(request_id=name, prompt_token_ids=tuple(prompt), params=params, **fields))


def looked_up(engine, slots) -> list[int]:
    """The slow reference: everybody, in the cache as it is."""
    state = engine._state
    return [len(state.local_hit(state.table.sequence(slot))) for slot in slots.tolist()]


def look_ups_of(engine, monkeypatch) -> list[int]:
    """Slots in the order in which they are looked up from now on."""
    seen: list[int] = []
    local_hit = engine._state.local_hit

    def counted(sequence):
        seen.append(sequence.slot)
        return local_hit(sequence)

    monkeypatch.setattr(engine._state, "local_hit", counted)
    return seen


@pytest.mark.representatives(2)
@pytest.mark.parametrize("seed", range(6))
def test_hits_are_those_of_a_look_up_at_any_time(seed) -> None:
    """Arrivals, steps, aborts, evictions, preemptions and resets in random order; slots and block ids live many lives."""
    rng = random.Random(seed)
    engine = engine_of(async_scheduling=bool(seed % 2))
    index = PrefixIndex(engine._state)
    num_hits = 0
    for number in range(250):
        for part in range(rng.choice([0, 1, 3])):
            shared = [rng.randrange(3)] * 4 * rng.randrange(6)
            own = [rng.randrange(90) for _ in range(rng.randint(1, 9))]
            add(
                engine,
                f"{number} {part}",
                shared + own,
                max_tokens=rng.choice([1, 30]),
                cache_salt=rng.choice(["", "s"]),
            )
        if rng.random() < 0.1 and engine.inspect().sequences:
            engine.abort(rng.choice(sorted(engine.inspect().sequences)))
        if rng.random() < 0.02:
            engine._state.blocks.reset_cache() if not engine.inspect().blocks.num_used else None
        engine.step()
        waiting = engine._state.waiting.slots.copy()
        found = index.num_blocks(waiting)
        assert found.tolist() == looked_up(engine, waiting)
        num_hits += int((found > 0).sum())
    assert num_hits > 100


def test_nobody_is_looked_up_again_while_the_cache_stands_still(monkeypatch) -> None:
    engine = engine_of()
    for number in range(40):
        add(engine, str(number), [number] * 9)
    index, waiting = PrefixIndex(engine._state), engine._state.waiting.slots
    index.num_blocks(waiting)
    seen = look_ups_of(engine, monkeypatch)
    for _ in range(3):
        assert not index.num_blocks(waiting).any()
    assert seen == []


def test_only_those_are_looked_up_again_whose_prefix_came_or_went(monkeypatch) -> None:
    engine = engine_of(async_scheduling=False)
    add(engine, "warm", [1] * 9, max_tokens=1)
    engine.step()
    for number in range(6):
        add(engine, str(number), [number] * 9)
    index, waiting = PrefixIndex(engine._state), engine._state.waiting.slots.copy()
    assert index.num_blocks(waiting).tolist() == [0, 2, 0, 0, 0, 0]
    seen = look_ups_of(engine, monkeypatch)
    blocks = engine._state.blocks
    blocks.release(blocks.allocate(blocks.num_available), now_s=0.0)  # all that is cached goes
    assert index.num_blocks(waiting).tolist() == [0] * 6
    assert seen == waiting[1:2].tolist()


def test_watches_of_those_that_left_do_not_pile_up() -> None:
    engine = engine_of(async_scheduling=False)
    index = PrefixIndex(engine._state)
    for number in range(3000):
        add(engine, str(number), [number % 97, number // 97] * 5)
        index.num_blocks(engine._state.waiting.slots)
        engine.abort(str(number))
    assert index._num_watches <= 8 * engine._state.table.capacity + 2
    assert sum(map(len, index._watchers.values())) <= index._num_watches


def test_without_a_question_nothing_is_watched() -> None:
    engine = engine_of()
    add(engine, "a", range(9))
    engine.step()
    assert not engine._state.blocks.on_change
    PrefixIndex(engine._state).num_blocks(np.empty(0, np.int32))
    assert engine._state.blocks.on_change
