from __future__ import annotations

import pytest
import torch

from trencadis.clock import SimulatedClock
from trencadis_gaudi.emulated import EmulatedDevice
from trencadis_gaudi.emulated.compiler import counting_backend


def test_each_graph_of_torch_compile_is_a_compilation():
    device = EmulatedDevice(total_bytes=1, lazy=False, clock=SimulatedClock())
    double = torch.compile(lambda x: x * 2 + 1, backend=counting_backend(device), dynamic=False)
    assert double(torch.ones(3)).tolist() == [3, 3, 3]
    assert double(torch.zeros(3)).tolist() == [1, 1, 1]
    assert device.num_compilations == 1
    double(torch.ones(4))
    assert device.num_compilations == 2
    device.frozen = True
    double(torch.ones(4))
    with pytest.raises(Exception, match="compiled after the warm-up"):
        double(torch.ones(5))
