from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trencadis.engine.cache.swapping import SwapCounts, Swapping
from trencadis.engine.sequences import Sequence
from trencadis.errors import ConfigValueError, InternalError
from trencadis.interfaces import BlockCopies
from trencadis.records import Request, SamplingParams
from trencadis_testing.engines import make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend


def request(name: str, length: int = 8, *, max_tokens: int = 30, salt: str = "") -> Request:
    first = sum(map(ord, name)) % 50
    return Request(
        request_id=name,
        prompt_token_ids=tuple((first + i) % 97 for i in range(length)),
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        cache_salt=salt,
    )


def swapping_engine(**more: Any):
    return make_engine(preemption="swap", **{"num_blocks": 20, "max_num_seqs": 4, **more})


def copies(num: int) -> Any:
    return np.arange(num, dtype=np.int32)


def sequence(slot: int = 0) -> Sequence:
    return Sequence(request(f"{slot}"), slot=slot, seed=0, stop_token_ids=())


# ------------------------------------------------------------------------------------------------ configuration


def test_recompute_takes_no_host_memory():
    engine = make_engine(swap_blocks=50)
    assert engine._state.swapping.num_host_blocks == 0


def test_host_holds_no_more_than_all_rows_could():
    assert swapping_engine(swap_blocks=10_000)._state.swapping.num_host_blocks == 4 * 20


def test_no_memory_for_a_block_is_an_error_that_says_what_to_do():
    with pytest.raises(ConfigValueError, match=r"swap_bytes = 0.*at least one KV block of 64 bytes") as caught:
        swapping_engine(swap_blocks=0)
    assert 'engine.preemption to "recompute"' in caught.value.hint


def test_backend_that_cannot_swap_is_refused():
    with pytest.raises(ConfigValueError, match=r'preemption = "swap": the backend ".*" cannot copy'):
        swapping_engine(backend=FakeBackend(swaps_blocks=False))


def test_executor_that_cannot_swap_is_refused():
    class Old(FakeExecutor):
        swap_blocks = None

    with pytest.raises(ConfigValueError, match=r'preemption = "swap": the executor ".*" cannot copy'):
        swapping_engine(executor=Old())


# --------------------------------------------------------------------------------------------------- the books


class Desk:
    """Takes copies down."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []

    def __call__(self, outs: BlockCopies, ins: BlockCopies) -> None:
        pairs = [list(zip(one.sources.tolist(), one.targets.tolist(), strict=True)) for one in (outs, ins)]
        self.calls.append((pairs[0], pairs[1]))


def test_copies_of_a_plan_are_handed_over_together_and_host_blocks_are_free_afterwards():
    desk = Desk()
    swapping = Swapping(num_host_blocks=6, copy=desk)
    first, second = sequence(0), sequence(1)
    assert swapping.swap_out(first, np.array([7, 3], np.int32))
    swapping.flush()
    assert desk.calls == [([(7, 0), (3, 1)], [])]
    assert swapping.swap_out(second, np.array([9], np.int32))
    swapping.swap_in(first, np.array([4, 5, 6], np.int32), num_found=0)
    assert swapping.num_free == 3, "a host block is held until its copy is handed over"
    swapping.flush()
    assert desk.calls[1] == ([(9, 2)], [(0, 4), (1, 5)])
    assert (swapping.num_free, swapping.num_swapped) == (5, 1)
    assert swapping.counts == SwapCounts(num_blocks_out=1, num_blocks_in=2)
    swapping.flush()
    assert len(desk.calls) == 2
    assert swapping.counts == SwapCounts()


def test_found_blocks_are_not_copied_and_all_found_means_no_copy():
    desk = Desk()
    swapping = Swapping(num_host_blocks=6, copy=desk)
    one = sequence()
    swapping.swap_out(one, copies(3))
    swapping.flush()
    swapping.swap_in(one, np.array([8, 9, 10], np.int32), num_found=2)
    swapping.flush()
    assert desk.calls[1] == ([], [(2, 10)])
    swapping.swap_out(one, copies(3))
    swapping.flush()
    swapping.swap_in(one, np.array([8, 9, 10, 11], np.int32), num_found=4)
    swapping.flush()
    assert len(desk.calls) == 3
    assert swapping.num_free == 6


def test_forgotten_sequence_is_copied_neither_out_nor_in():
    desk = Desk()
    swapping = Swapping(num_host_blocks=6, copy=desk)
    one, other = sequence(0), sequence(1)
    swapping.swap_out(one, copies(2))
    swapping.swap_out(other, copies(2) + 5)
    swapping.forget(one)
    swapping.forget(one)
    swapping.flush()
    assert [source for source, _ in desk.calls[0][0]] == [5, 6]
    swapping.swap_in(other, copies(2), num_found=0)
    swapping.forget(other)
    swapping.flush()
    assert len(desk.calls) == 1
    assert (swapping.num_free, swapping.num_swapped) == (6, 0)


def test_sequence_is_swapped_whole_or_not_at_all():
    swapping = Swapping(num_host_blocks=2, copy=Desk())
    one = sequence()
    assert not swapping.swap_out(one, copies(3))
    assert one.host_blocks is None
    assert not swapping.swap_out(one, copies(0))
    swapping.flush()
    assert swapping.counts == SwapCounts(num_fallbacks=1)


def test_nobody_comes_back_who_did_not_go():
    with pytest.raises(InternalError, match="slot 0 has no blocks in host memory"):
        Swapping(num_host_blocks=2, copy=Desk()).swap_in(sequence(), copies(1), num_found=0)
