"""Collectives of CUDA tensors, with as many devices as there are: one is enough."""

from __future__ import annotations

import pytest
import torch

from support.devices import cuda_only
from support.rank_processes import open_ranks
from trencadis.errors import CollectiveError
from trencadis_plugins.executor.collectives import torch_distributed
from trencadis_plugins.executor.collectives.owner import GroupAddress
from trencadis_plugins.executor.collectives.stores import StoreOwner
from trencadis_testing import CollectiveConformance


@pytest.fixture
def make_ranks(start_processes):
    """``make_ranks(kind, size)`` returns ranks in processes of their own, all on the first device; one is a group, too."""
    owners = []

    def make(kind, size, *, timeout_s=60.0):
        address = GroupAddress(
            kind=kind, name="", rank=0, size=size, generation=0, timeout_s=timeout_s, num_processes=size
        )
        owners.append(StoreOwner(address))
        return open_ranks(start_processes(size), [owners[-1].address(rank) for rank in range(size)])

    yield make
    for owner in owners:
        owner.unlink()


@cuda_only
class TestGloo(CollectiveConformance):
    """Tensors on the device, which gloo does not reach: they are copied."""

    checks_calls = False
    abort_wakes = False
    short_timeout_s = 20.0  # the first tensor of a process takes a context of the device

    @pytest.fixture(autouse=True)
    def _make(self, make_ranks):
        self.make = lambda size, *, timeout_s: make_ranks("gloo", size, timeout_s=timeout_s)


@cuda_only
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_nccl_group_of_one_rank_leaves_tensors_as_they_are(make_ranks, dtype):
    (rank,) = make_ranks("nccl", 1)
    given = torch.arange(200_000).to(dtype)
    for call in (rank.all_reduce, lambda tensor: rank.broadcast(tensor, source=0)):
        tensor = given.clone()
        call(tensor)
        assert torch.equal(tensor, given)
    assert torch.equal(rank.all_gather(given.view(2, -1)), given.view(2, -1))
    rank.barrier()
    rank.close()
    with pytest.raises(CollectiveError, match="has closed the group"):
        rank.barrier()


@cuda_only
def test_nccl_ranks_on_one_device_are_told_so(make_ranks):
    if torch.cuda.device_count() > 1:
        pytest.skip("there are several devices; ranks of this test are on the first")
    first, second = make_ranks("nccl", 2)
    packed = (bytes(12), "torch.float32", (3,), True)
    calls = [one.process.start("call", "group", "all_reduce", packed, {}) for one in (first, second)]
    said = [str(call.exception(60.0)) for call in calls]
    assert any("Duplicate GPU detected" in one and 'collective = "gloo"' in one for one in said), said


NCCL = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.27.7
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000
"""


def test_first_words_of_an_error_have_the_reason_that_nccl_gives_last():
    error = RuntimeError(NCCL)
    assert torch_distributed._first_words(error).endswith("both on CUDA device 1a000")
    assert 'collective = "gloo"' in torch_distributed._hint(error)
    plain = RuntimeError("Connection closed by peer [::1]:1. This is typically something else.\nmore")
    assert torch_distributed._first_words(plain) == "Connection closed by peer [::1]:1"
    assert torch_distributed._hint(plain) == ""
