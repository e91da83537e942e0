"""A rank is killed or stopped in each call: the call fails in words soon, or succeeds, and no process is left."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from support.strategies.failing_ranks import MakesSignalled, WithoutSums
from trencadis.errors import RanksLostError
from trencadis.interfaces import BlockCopies
from trencadis.records import Bucket, ModelSource, ParallelLayout, Phase
from trencadis_plugins.executor.config import ProcessesConfig
from trencadis_testing.executor_fakes import make_sampler, one_token, plan_of

ONE = np.zeros(1, np.int32)
COPY = BlockCopies(sources=ONE, targets=ONE)


def life(executor, make_backend):
    """Make every call once."""
    executor.start(make_backend=make_backend, make_sampler=make_sampler, source=ModelSource(path="fake"))
    executor.memory(max_num_batched_tokens=8, max_num_seqs=2)
    executor.allocate(plan_of())
    executor.prepare(Bucket(1, 1, 1, Phase.DECODE))
    executor.warm_up((Bucket(1, 8, 0),))
    executor.submit(one_token(1)).wait()
    executor.embed([ONE])
    executor.copy_blocks(sources=ONE, targets=ONE)
    executor.swap_blocks(outs=COPY, ins=BlockCopies.none())
    executor.submit(one_token(2)).wait()
    executor.kv_layout()
    executor.metrics()


CALLS = (
    "__init__",
    "capabilities",
    "load",
    "memory",
    "allocate",
    "prepare",
    "warm_up",
    "submit",
    "embed",
    "copy_blocks",
    "swap_blocks",
    "kv_cache",
    "metrics",
)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("number", "said"),
    [
        pytest.param(signal.SIGKILL, "was killed by SIGKILL", marks=pytest.mark.representatives(10)),
        pytest.param(signal.SIGSTOP, "was stopped"),
    ],
    ids=["kill", "stop"],
)
@pytest.mark.parametrize("call", CALLS)
def test_a_rank_that_is_killed_or_stopped_in_a_call_is_named_and_nothing_is_left(call, number, said, victim):
    executor = WithoutSums(ProcessesConfig(), layout=ParallelLayout(tensor=2))
    with pytest.raises(RanksLostError, match=f"rank {victim} {said}"):
        life(executor, MakesSignalled(call, number, victim))
    executor.close()
    assert len(executor.process_ids) == 2
    assert not [pid for pid in executor.process_ids if Path(f"/proc/{pid}").exists()]
