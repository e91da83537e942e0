from __future__ import annotations

import pytest
import torch

from trencadis.clock import SimulatedClock
from trencadis_gaudi.emulated import EmulatedDevice
from trencadis_gaudi.emulated.compiler import counting_backend


def compiled(function):
    device = EmulatedDevice(total_bytes=1, lazy=False, clock=SimulatedClock())
    return device, torch.compile(function, backend=counting_backend(device), dynamic=False)


def test_each_graph_of_torch_compile_is_a_compilation():
    device, double = compiled(lambda x: x * 2 + 1)
    assert double(torch.ones(3)).tolist() == [3, 3, 3]
    assert double(torch.zeros(3)).tolist() == [1, 1, 1]
    assert device.num_compilations == 1
    double(torch.ones(4))
    assert device.num_compilations == 2
    device.frozen = True
    double(torch.ones(4))
    with pytest.raises(Exception, match="compiled after the warm-up"):
        double(torch.ones(5))


def test_graph_that_is_only_compiled_computes_nothing_and_writes_nothing():
    def keep_and_sum(cache, x):
        cache.index_copy_(0, torch.tensor([1]), x[None])
        return x.sum(), (x * 2).double()

    device, run = compiled(keep_and_sum)
    cache, x = torch.zeros(2, 3), torch.ones(3)
    device.compile_only = True
    total, doubled = run(cache, x)
    assert (total.shape, doubled.shape, doubled.dtype) == ((), (3,), torch.float64)
    assert not cache.any()
    device.compile_only = False
    total, doubled = run(cache, x)
    assert (total.item(), doubled.tolist()) == (3, [2, 2, 2])
    assert cache.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert device.num_compilations == 1
