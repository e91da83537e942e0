from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from trencadis.clock import SimulatedClock
from trencadis_gaudi.emulated import EmulatedDevice, EmulatedDeviceError
from trencadis_gaudi.emulated.recorder import Recorder
from trencadis_gaudi.emulated.tensor import HpuTensor


@pytest.fixture(autouse=True)
def recorder():
    recorder = Recorder(EmulatedDevice(total_bytes=1 << 30, lazy=False, clock=SimulatedClock()))
    with recorder.active():
        yield recorder


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, 3, device="hpu"),
        lambda: torch.arange(3, device="hpu"),
        lambda: torch.full((2,), 7, device="hpu:0"),
        lambda: torch.tensor([1, 2], device="hpu"),
        lambda: torch.as_tensor([1, 2], device="hpu"),
        lambda: torch.ones(3).to("hpu"),
        lambda: torch.ones(3, device="hpu").new_zeros(4),
        lambda: torch.ones(3, device="hpu")[None, 1:],
        lambda: ~torch.ones(3, dtype=torch.bool, device="hpu"),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_factories_copies_and_operations_make_tensors_of_the_device(make, inference):
    with torch.inference_mode(inference):
        made = make()
    assert isinstance(made, HpuTensor)
    assert made.device == torch.device("hpu", 0)


def test_what_comes_back_is_of_the_cpu():
    tensor = torch.arange(3, device="hpu")
    assert (type(tensor.cpu()), tensor.tolist(), tensor[1].item()) == (torch.Tensor, [0, 1, 2], 1)
    assert type(tensor.to("cpu", torch.float32)) is torch.Tensor
    with pytest.raises(RuntimeError, match="numpy"):
        tensor.numpy()


def test_views_share_memory_and_changes_in_place_return_their_tensor():
    base = torch.zeros(4, 2, device="hpu")
    base[1] = 5.0
    row = base.view(8)[2:4]
    assert row.add_(1) is row
    assert base.tolist() == [[0, 0], [6, 6], [0, 0], [0, 0]]
    assert [tensor.is_view for tensor in (base, base.detach(), row)] == [False, False, True]


def test_model_moves_with_its_ties():
    model = torch.nn.ModuleDict(
        {"first": torch.nn.Linear(3, 3, bias=False), "second": torch.nn.Linear(3, 3, bias=False)}
    )
    model["second"].weight = model["first"].weight
    model.to("hpu")
    assert model["first"].weight is model["second"].weight
    assert isinstance(model["first"].weight, torch.nn.Parameter)
    assert model["first"](torch.ones(1, 3).to("hpu")).device.type == "hpu"


def test_tensors_of_two_devices_do_not_mix_but_for_single_numbers():
    tensor = torch.ones(3, device="hpu")
    assert (tensor + torch.tensor(2.0)).tolist() == [3, 3, 3]
    for call in (lambda: tensor + torch.ones(3), lambda: torch.cat([torch.ones(3), tensor])):
        with pytest.raises(EmulatedDeviceError, match="mixes tensors of the device with one of the CPU"):
            call()


def test_factories_outside_of_any_block_go_to_the_device_made_last(recorder):
    last = Recorder(EmulatedDevice(total_bytes=1, lazy=False, clock=SimulatedClock()))
    assert torch.zeros(1, device="hpu").handler is recorder
    with last.active():
        assert torch.zeros(1, device="hpu").handler is last


def test_copy_that_does_not_wait_is_garbage_until_its_event(recorder):
    tensor = torch.arange(3, device="hpu")
    first, second = (tensor.to("cpu", non_blocking=True) for _ in range(2))
    tensor.zero_()
    assert first.tolist() == [torch.iinfo(torch.int64).max // 3] * 3
    recorder.host_copies.finish(1)
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() != [0, 1, 2]
    tensor.cpu()  # waits, and copies arrive in order
    assert second.tolist() == [0, 1, 2]
    assert tensor.float().to("cpu", non_blocking=True).isnan().all()


@pytest.mark.slow
def test_emulated_device_refuses_to_stand_beside_the_gaudi_software():
    code = "import torch; torch.hpu = object(); from trencadis_gaudi.emulated.tensor import hpu; hpu()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in result.stderr
