from __future__ import annotations

import pytest
import torch

from trencadis.clock import SimulatedClock
from trencadis_gaudi.emulated import EmulatedDevice, EmulatedDeviceError, EmulatedMemoryError
from trencadis_gaudi.emulated.device import RECIPE_BYTES
from trencadis_gaudi.emulated.graphs import GraphStore, input_hash
from trencadis_gaudi.emulated.recorder import Recorder


class Doubler(torch.nn.Module):
    """Returns twice its input; told, something else in each call."""

    def __init__(self):
        super().__init__()
        self.number = 2.0

    def forward(self, x, scale=None):
        y = x * self.number
        return y if scale is None else y * scale


class Desk:
    def __init__(self, total_bytes=1 << 30):
        self.device = EmulatedDevice(total_bytes=total_bytes, lazy=True, clock=SimulatedClock())
        self.recorder = Recorder(self.device)
        self.store = GraphStore(self.device, self.recorder)

    def wrap(self, module=None, **options):
        return self.store.wrap_in_hpu_graph(module or Doubler(), **options)


def test_each_shape_is_captured_once_and_replayed_on_new_values():
    desk = Desk()
    module, inputs = desk.wrap(), (torch.ones(3), torch.arange(3.0), torch.ones(1, 3))
    with desk.recorder.active():
        outputs = [module(x.to("hpu")).tolist() for x in inputs]
    assert outputs == [[2, 2, 2], [0, 2, 4], [[2, 2, 2]]]
    assert (desk.store.num_graphs, desk.device.num_compilations, desk.device.num_recipe_hits) == (2, 2, 1)


def test_graphs_of_two_modules_are_two():
    desk = Desk()
    first, second = desk.wrap(), desk.wrap()
    with desk.recorder.active():
        first(torch.ones(3).to("hpu"))
        second(torch.ones(3).to("hpu"))
    assert desk.store.num_graphs == 2


def test_bypass_runs_the_module_as_it_is():
    desk = Desk()
    module = desk.wrap()
    with desk.recorder.active():
        x = torch.ones(3).to("hpu")
        assert module(x, bypass_hpu_graphs=True).tolist() == [2, 2, 2]
        desk.recorder.mark()
    assert (desk.store.num_graphs, desk.device.num_compilations) == (0, 1)


def test_warm_up_mode_returns_the_captured_outputs():
    desk = Desk()
    module = desk.wrap()
    with desk.recorder.active():
        module(torch.ones(3).to("hpu"))
        assert module(torch.zeros(3).to("hpu"), warmup_mode=True).tolist() == [2, 2, 2]


def test_beyond_the_largest_number_of_graphs_the_module_runs_as_it_is():
    desk = Desk()
    module = desk.wrap(max_graphs=1)
    with desk.recorder.active():
        module(torch.ones(3).to("hpu"))
        assert module(torch.ones(4).to("hpu")).tolist() == [2, 2, 2, 2]
    assert desk.store.num_graphs == 1


def test_replay_that_would_run_other_operations_is_refused():
    desk = Desk()
    module = desk.wrap()
    with desk.recorder.active():
        module(torch.ones(3).to("hpu"))
        module.number = 3.0
        with pytest.raises(EmulatedDeviceError, match="other operations than were captured"):
            module(torch.ones(3).to("hpu"))


def test_memory_of_graphs_is_booked_and_freed():
    desk = Desk()
    module = desk.wrap()
    with desk.recorder.active():
        module(torch.ones(1000).to("hpu"))
    assert desk.store.graph_bytes == RECIPE_BYTES + 2 * 4000 == desk.device.used_bytes
    module.clear_cache()
    assert (desk.store.num_graphs, desk.device.used_bytes) == (0, 0)


def test_graph_without_room_is_refused_and_not_kept():
    desk = Desk(total_bytes=RECIPE_BYTES)
    module = desk.wrap()
    with desk.recorder.active(), pytest.raises(EmulatedMemoryError):
        module(torch.ones(1000).to("hpu"))
    assert desk.store.num_graphs == 0


def test_numbers_and_containers_tell_graphs_apart_and_values_of_tensors_do_not():
    one = {"a": (torch.ones(2), [torch.ones(3)]), "n": 1}
    other = {"a": (torch.zeros(2), [torch.zeros(3)]), "n": 1}
    assert input_hash(one) == input_hash(other)
    assert input_hash(one) != input_hash({**other, "n": 2})
    assert input_hash(torch.ones(2, 3)) != input_hash(torch.ones(3, 2).T)
    assert input_hash(torch.ones(2)) != input_hash(torch.ones(2, dtype=torch.float64))
