from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trencadis.clock import SimulatedClock
from trencadis_gaudi.emulated import EmulatedDevice, EmulatedDeviceError, EmulatedMemoryError
from trencadis_gaudi.emulated.compiler import counting_backend
from trencadis_gaudi.emulated.device import RECIPE_BYTES
from trencadis_gaudi.emulated.dry_runs import DryRuns
from trencadis_gaudi.emulated.graphs import GraphStore, input_hash
from trencadis_gaudi.emulated.recorder import Recorder


def make(*, lazy=True):
    device = EmulatedDevice(total_bytes=1 << 30, lazy=lazy, clock=SimulatedClock())
    recorder = Recorder(device)
    with recorder.active():
        tensors = [torch.arange(6.0).view(2, 3).to("hpu"), torch.arange(9.0).view(3, 3).to("hpu")]
    return device, recorder, *tensors


def compiled(call, *, lazy=True):
    """How many recipes a call needs."""
    device, recorder, a, b = make(lazy=lazy)
    call(a, b)
    recorder.mark()
    return device.num_compilations


def runs(*calls):
    device, recorder, a, b = make()
    for call in calls:
        call(a, b)
        recorder.mark()
    return device.num_compilations


def test_operations_between_two_marks_are_one_recipe():
    assert compiled(lambda a, b: (a @ b).relu().sum()) == 1


def test_each_operation_is_a_recipe_outside_lazy_mode():
    assert compiled(lambda a, b: (a @ b).relu().sum(), lazy=False) == 3


def test_same_run_on_other_values_needs_nothing_new():
    assert runs(lambda a, b: a * 2, lambda a, b: (a + 1) * 2) == 2
    assert runs(lambda a, b: a @ b, lambda a, b: a.neg().detach() @ b) == 2
    assert runs(lambda a, b: a @ b, lambda a, b: a.clone() @ b, lambda a, b: a @ b) == 2


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda a, b: a @ b, lambda a, b: a[:1] @ b),
        (lambda a, b: a * 2, lambda a, b: a * 3),
        (lambda a, b: a.sum(0), lambda a, b: a.sum(1)),
        (lambda a, b: a.neg(), lambda a, b: a.int().neg()),
        (lambda a, b: a[:1], lambda a, b: a[1:]),
        (lambda a, b: a.sum(0, dtype=torch.float32), lambda a, b: a.sum(0, dtype=torch.float64)),
        (lambda a, b: torch.cat([a, b]), lambda a, b: torch.cat([b, a])),
    ],
    ids=["shape", "number", "axis", "dtype", "slice", "keyword", "order"],
)
def test_another_shape_number_or_type_is_another_recipe(first, second):
    assert runs(first, second) == 2


def test_moves_between_host_and_device_are_free():
    assert compiled(lambda a, b: a.copy_(a.cpu().double()).detach()) == 0


def test_host_read_ends_a_run():
    device, recorder, a, _ = make()
    total = a.sum()
    assert total.item() == 15
    a.neg()
    recorder.mark()
    assert (device.num_compilations, device.num_host_syncs, device.num_mark_steps) == (2, 1, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: a.sum().item(),
        lambda a, b: bool(a.any()),
        lambda a, b: a.nonzero(),
        lambda a, b: a[a > 1],
        lambda a, b: a.clone().__setitem__(a > 1, torch.tensor([1.0])),
        lambda a, b: a.masked_select(a > 1),
        lambda a, b: a.unique(),
        lambda a, b: torch.equal(a, a),
    ],
)
def test_nothing_within_a_graph_may_depend_on_data(call):
    _, recorder, a, b = make()
    with pytest.raises(EmulatedDeviceError, match="cannot be part of a graph"):
        recorder.within_graph(lambda: call(a, b))


def test_masks_that_keep_the_shape_may_be_in_a_graph():
    _, recorder, a, _ = make()
    result, recording = recorder.within_graph(lambda: a.masked_fill(a > 1, 0.0).sum())
    assert result == 1
    assert recording.num_operations == 3


def test_operations_of_a_graph_belong_to_no_other_run():
    device, recorder, a, b = make()
    a.neg()
    recorder.within_graph(lambda: a @ b)
    assert device.num_compilations == 1  # what came before the graph
    recorder.mark()
    assert device.num_compilations == 1


def test_largest_result_counts_for_the_peak():
    device, recorder, a, _ = make()
    a.expand(50, 2, 3).clone().sum()
    recorder.mark()
    assert device.peak_bytes == 50 * 6 * 4
    eager, recorder, a, _ = make(lazy=False)
    a.expand(50, 2, 3).clone().sum()
    assert eager.peak_bytes == 50 * 6 * 4


def test_a_view_of_the_cache_is_no_workspace_of_a_graph() -> None:
    _, recorder, _, _ = make()
    cache = torch.zeros(1 << 16).to("hpu")
    with torch.inference_mode():
        _, recording = recorder.within_graph(lambda: cache.view(256, 256).narrow(0, 0, 4) + 1)
    assert recording.largest_bytes == 4 * 256 * 4


def test_compiling_alone_makes_the_recipe_that_a_run_needs_and_computes_nothing():
    device, recorder, a, b = make()
    target = torch.zeros(2, 3).to("hpu")
    for compile_only in (True, False):
        device.compile_only = compile_only
        target.add_((a @ b).relu())
        recorder.mark()
        assert device.num_compilations == 1
        assert torch.equal(target.cpu(), torch.zeros(2, 3) if compile_only else (a.cpu() @ b.cpu()).relu())


ATEN = torch.ops.aten


@pytest.mark.parametrize(
    "call",
    [
        lambda: (ATEN.mm.default, (torch.ones(3, 4), torch.ones(4, 5).T.contiguous().T)),
        lambda: (ATEN.add.Tensor, (torch.ones(2, 3).T, torch.ones(3, 1))),
        lambda: (ATEN.cat.default, ([torch.ones(2, 3), torch.ones(4, 3)],)),
        lambda: (ATEN.index_select.default, (torch.ones(5, 2), 0, torch.tensor([4, 4, 1]))),
        lambda: (ATEN.max.dim, (torch.ones(3, 4), 1)),
        lambda: (ATEN._softmax.default, (torch.ones(2, 3), 1, False)),
    ],
)
def test_result_has_shape_type_and_strides_of_the_real_one(call):
    func, args = call()
    found, real = DryRuns().run(func, args, {}), func(*args)
    found, real = ((item,) if isinstance(item, torch.Tensor) else tuple(item) for item in (found, real))
    assert [(x.shape, x.dtype, x.stride(), x.device) for x in found] == [
        (x.shape, x.dtype, x.stride(), x.device) for x in real
    ]


def test_nothing_is_computed():
    ones = torch.ones(8, 8)
    func = ATEN.mul.Tensor
    for _ in range(20):  # memory that nobody writes to may hold anything, but not always the product
        if not torch.equal(DryRuns().run(func, (ones, 7.25), {}), func(ones, 7.25)):
            return
    pytest.fail("the product was computed")


def test_tensor_that_would_be_changed_in_place_stays_as_it_is():
    cache, slots = torch.zeros(4, 2), torch.tensor([1 << 40])
    assert DryRuns().run(ATEN.index_copy_.default, (cache, 0, slots, torch.ones(1, 2)), {}) is cache
    assert not cache.any()


def test_views_and_factories_are_real():
    base = torch.arange(6.0)
    assert DryRuns().run(ATEN.view.default, (base, [2, 3]), {}).data_ptr() == base.data_ptr()
    assert DryRuns().run(ATEN.arange.default, (3,), {}).tolist() == [0, 1, 2]


def test_fused_attention_has_its_shape():
    query = torch.ones(1, 2, 5, 8)
    from torch.utils._python_dispatch import TorchDispatchMode

    class Dry(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return DryRuns().run(func, args, kwargs or {})

    with Dry():
        found = scaled_dot_product_attention(query, query, query, is_causal=True)
    real = scaled_dot_product_attention(query, query, query, is_causal=True)
    assert (found.shape, found.stride()) == (real.shape, real.stride())


def test_shape_is_found_out_once_for_each_kind_of_arguments():
    runs, calls = DryRuns(), []

    class Counted:
        _schema = ATEN.mul.Tensor._schema

        def __call__(self, *args, **kwargs):
            calls.append(args)
            return ATEN.mul.Tensor(*args, **kwargs)

    func = Counted()
    results = [runs.run(func, args, {}) for args in ((torch.ones(2), 3), (torch.zeros(2), 3), (torch.ones(2), 3.0))]
    results += [runs.run(func, (torch.ones(2, dtype=torch.int64), number), {}) for number in (1, 1.0)]
    assert len(calls) == 4
    assert [one.dtype for one in results] == [torch.float32] * 3 + [torch.int64, torch.float32]
    assert len({one.data_ptr() for one in results}) == len(results)


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


def compiled_by_torch(function):
    device = EmulatedDevice(total_bytes=1, lazy=False, clock=SimulatedClock())
    backend = counting_backend(device, Recorder(device))
    return device, torch.compile(function, backend=backend, dynamic=False)


def test_each_graph_of_torch_compile_is_a_compilation():
    device, double = compiled_by_torch(lambda x: x * 2 + 1)
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

    device, run = compiled_by_torch(keep_and_sum)
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
