from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from trencadis_gaudi.emulated.dry_run import DryRuns

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
