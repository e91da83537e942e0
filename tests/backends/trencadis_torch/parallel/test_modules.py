from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trencadis_torch.parallel.cuts import even, padded
from trencadis_torch.parallel.modules import (
    GatheredLinear,
    RowLinear,
    VocabEmbedding,
    sum_outputs,
)

SIZE = 4


def cut_linear(whole, cut):
    outputs, inputs = cut.shape(whole.weight.shape)
    local = nn.Linear(inputs, outputs, bias=whole.bias is not None and cut.dim == 0)
    for name, parameter in local.named_parameters():
        parameter.data.zero_()
        if cut.ranges:
            part = cut.take(getattr(whole, name).data)
            parameter.data[: part.shape[0], ...] = part
    return local


def on_each(ranks, make, *inputs):
    return ranks(make, SIZE).call(lambda module: module(*inputs).detach())


@pytest.mark.parametrize("splits", [False, True])
def test_partial_sums_are_summed_and_the_bias_is_added_once(ranks, splits):
    whole, x = nn.Linear(16, 6), torch.randn(2, 3, 16)

    def make(groups):
        cut = even(16, dim=1, rank=groups.rank, size=SIZE, what="w")
        module = RowLinear(cut_linear(whole, cut), whole.bias, groups.tensor, splits=splits)
        module.part = slice(4 * groups.rank, 4 * groups.rank + 4)
        return module

    expected = whole(x).detach()
    found = ranks(make, SIZE).call(lambda module: module(x if splits else x[..., module.part]).detach())
    for one in found:
        torch.testing.assert_close(one, expected)
        assert torch.equal(one, found[0])


@pytest.mark.parametrize("num", [131, 128, 3])
def test_outputs_are_gathered_and_padding_is_cut_off(ranks, num):
    whole, x = nn.Linear(8, num), torch.randn(5, 8)

    def make(groups):
        cut = padded(num, dim=0, rank=groups.rank, size=SIZE)
        return GatheredLinear(cut_linear(whole, cut), num, groups.tensor)

    for one in on_each(ranks, make, x):
        torch.testing.assert_close(one, whole(x).detach())


@pytest.mark.parametrize("num", [131, 128, 3])
def test_tokens_of_other_ranks_add_nothing(ranks, num):
    whole = nn.Embedding(num, 8)
    ids = torch.arange(num).flip(0)[None]

    def make(groups):
        cut = padded(num, dim=0, rank=groups.rank, size=SIZE)
        # What padding holds does not matter.
        local = nn.Embedding(cut.size, 8)
        if cut.ranges:
            local.weight.data[: cut.ranges[0][1] - cut.ranges[0][0]] = cut.take(whole.weight.data)
        first, last = cut.ranges[0] if cut.ranges else (0, 0)
        return VocabEmbedding(local, first=first, num_rows=last - first, group=groups.tensor)

    for one in on_each(ranks, make, ids):
        assert torch.equal(one, whole(ids).detach())


def test_outputs_of_experts_are_summed(ranks):
    whole = nn.Linear(8, 6, bias=False)

    def make(groups):
        module = copy.deepcopy(whole)
        module.weight.data /= 1 + groups.rank
        sum_outputs(module, groups.tensor)
        return module

    x = torch.randn(3, 8)
    for one in on_each(ranks, make, x):
        torch.testing.assert_close(one, whole(x).detach() * sum(1 / n for n in range(1, SIZE + 1)))
