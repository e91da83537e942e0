from __future__ import annotations

from typing import Any

import pytest

from trencadis.errors import ConfigValueError
from trencadis_testing.engines import make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend


def swapping_engine(**more: Any):
    return make_engine(preemption="swap", **{"num_blocks": 20, "max_num_seqs": 4, **more})


# ------------------------------------------------------------------------------------------------ configuration


def test_recompute_takes_no_host_memory():
    assert "swap" not in make_engine(swap_blocks=50).inspect().stages


def test_host_holds_no_more_than_all_rows_could():
    assert swapping_engine(swap_blocks=10_000).stage("swap").num_host_blocks == 4 * 20


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
