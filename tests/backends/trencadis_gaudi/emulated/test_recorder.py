from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trencadis.clock import SimulatedClock
from trencadis_gaudi.emulated import EmulatedDevice, EmulatedDeviceError
from trencadis_gaudi.emulated.dry_runs import DryRuns
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
