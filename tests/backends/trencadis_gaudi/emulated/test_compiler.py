from __future__ import annotations

import pytest
import torch

from trencadis.clock import SimulatedClock
from trencadis_gaudi.emulated import EmulatedDevice
from trencadis_gaudi.emulated.compiler import counting_backend
from trencadis_gaudi.emulated.recorder import Recorder


def compiled(function):
    device = EmulatedDevice(total_bytes=1, lazy=False, clock=SimulatedClock())
    backend = counting_backend(device, Recorder(device))
    return device, torch.compile(function, backend=backend, dynamic=False)


@pytest.mark.slow
def test_each_graph_of_torch_compile_is_a_compilation():
    device, double = compiled(lambda x: x * 2 + 1)
    ones, four, five = (torch.ones(size).to("hpu") for size in (3, 4, 5))
    for _ in range(2):  # on the device, then on the tensors within
        assert double(ones).tolist() == [3, 3, 3]
    assert double(torch.zeros(3).to("hpu")).tolist() == [1, 1, 1]
    assert device.num_compilations == 1
    double(four)
    assert device.num_compilations == 2
    device.frozen = True
    double(four)
    with pytest.raises(Exception, match="compiled after the warm-up"):
        double(five)


def test_graph_that_is_only_compiled_computes_nothing_and_writes_nothing():
    def keep_and_sum(cache, x):
        cache.index_copy_(0, torch.arange(1, 2, device=x.device), x[None])
        return x.sum(), (x * 2).double()

    device, run = compiled(keep_and_sum)
    cache, x = torch.zeros(2, 3).to("hpu"), torch.ones(3).to("hpu")
    device.compile_only = True
    total, doubled = run(cache, x)
    assert (total.shape, doubled.shape, doubled.dtype) == ((), (3,), torch.float64)
    assert not cache.cpu().any()
    device.compile_only = False
    total, doubled = run(cache, x)
    assert (total.item(), doubled.tolist()) == (3, [2, 2, 2])
    assert cache.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert device.num_compilations == 1
