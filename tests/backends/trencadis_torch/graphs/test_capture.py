from __future__ import annotations

import pytest
import torch

from support.devices import DEVICE, cuda_only
from trencadis_torch.graphs.capture import CudaRecorder, Recorder


def test_a_recorder_does_all_or_none_of_it():
    class Half(Recorder):
        def free_bytes(self):
            return 0

    with pytest.raises(TypeError, match=r"capture.*close.*lasts.*rehearse"):
        Half()


@cuda_only
def test_cuda_replays_what_was_captured_with_what_the_input_holds_then():
    device = torch.device(DEVICE)
    recorder, given, output = CudaRecorder(device), torch.ones(1000, device=device), torch.zeros(1000, device=device)

    def run():
        output.copy_((given * 2).cumsum(0) + 1)

    assert recorder.rehearse(run, what="it") >= 4000
    graph = recorder.capture(run, what="it")
    for value in (1.0, 3.0):
        given.fill_(value)
        graph.replay()
        assert output[:3].tolist() == [2 * value + 1, 4 * value + 1, 6 * value + 1]
    assert recorder.free_bytes() > 0
    recorder.close()
