from __future__ import annotations

import random

import numpy as np

from trencadis.records import Request, SamplingParams
from trencadis_plugins.speculation.draft_memory import DraftMemory, common_prefix


def request(number: int) -> Request:
    return Request(request_id=str(number), prompt_token_ids=(1,), params=SamplingParams())


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_common_beginnings_are_those_found_one_token_at_a_time() -> None:
    rng = random.Random(0)
    for _ in range(300):
        first, second = ([rng.randrange(2) for _ in range(rng.randrange(6))] for _ in range(2))
        expected = 0
        while expected < min(len(first), len(second)) and first[expected] == second[expected]:
            expected += 1
        assert common_prefix(np.array(first, np.int32), np.array(second, np.int32)) == expected


def test_a_place_is_kept_by_the_request_that_has_the_slot() -> None:
    memory, one, other = DraftMemory(num_rows=2, num_blocks=8, block_size=4), request(0), request(1)
    held = memory.hold(5, one)
    assert held is not None
    assert memory.reserve(held, 9)
    assert held.blocks == [0, 1, 2]
    assert memory.hold(5, one) is held
    fresh = memory.hold(5, other)
    assert fresh is not None
    assert fresh is not held
    assert memory.num_free_blocks == 8


def test_whoever_was_not_drafted_for_longest_gives_way() -> None:
    memory = DraftMemory(num_rows=3, num_blocks=6, block_size=4)
    requests = {slot: request(slot) for slot in range(5)}
    for slot in (0, 1, 2):
        held = memory.hold(slot, requests[slot])
        assert held is not None
        assert memory.reserve(held, 8)
    first = memory.hold(0, requests[0])
    memory.begin(slots(3, 0))
    newcomer = memory.hold(3, requests[3])
    assert newcomer is not None, "the row of slot 1"
    assert memory.reserve(newcomer, 16), "the blocks of slots 1 and 2"
    assert memory.hold(0, requests[0]) is first
    assert not memory.reserve(newcomer, 20), "slot 0 is in the call"
    assert len(newcomer.blocks) == 4
    memory.begin(slots(3, 0, 4))
    assert memory.hold(4, requests[4]) is not None
    memory.begin(slots(3, 0, 4, 1))
    assert memory.hold(1, requests[1]) is None


def test_no_row_and_no_block_is_given_twice_or_lost() -> None:
    rng = random.Random(3)
    memory = DraftMemory(num_rows=4, num_blocks=20, block_size=2)
    requests = [request(number) for number in range(9)]
    for step in range(400):
        chosen = rng.sample(range(9), 3)
        memory.begin(slots(*chosen))
        for slot in chosen:
            held = memory.hold(slot, requests[slot])
            if held is not None:
                memory.reserve(held, rng.randrange(1, 16))
        if rng.random() < 0.3:
            memory.forget(rng.randrange(9))
        if rng.random() < 0.1:
            requests[rng.randrange(9)] = request(100 + step)
        places = list(memory._held.values())
        blocks = [block for held in places for block in held.blocks] + memory._blocks
        assert sorted(blocks) == list(range(20))
        assert sorted([held.row for held in places] + memory._rows) == list(range(4))
