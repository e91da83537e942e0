from __future__ import annotations

import logging

import pytest
import torch

from trencadis.errors import BackendError
from trencadis_torch.graphs.compile_cache import CompileCounts
from trencadis_torch.graphs.compiled_forward import Graphs


class Pass:
    """Has sizes, and a tensor that graphs read."""

    def __init__(self, *signature, offset=0.0):
        self.signature = signature
        self.offset = torch.tensor(offset)


def forward(token_ids, positions, keep, attention):
    return (token_ids + positions).float().flatten().index_select(0, keep)[:, None] + attention.offset


def arguments(size, *, offset=0.0):
    return torch.arange(size)[None], torch.full((1, size), 10), torch.tensor([size - 1]), Pass(size, offset=offset)


def made(*, check=None, plain=forward, sizes=(2, 3)):
    graphs = Graphs(plain, check=check, compiler="eager")
    with graphs.preparing():
        for size in sizes:
            graphs(*arguments(size))
    return graphs


@torch.inference_mode()
def test_each_shape_is_one_graph_and_a_graph_reads_what_each_pass_brings():
    before = CompileCounts.now()
    graphs = made(sizes=(2, 3, 2))
    assert len(graphs) == 2
    assert CompileCounts.now().since(before).num_graphs == 2
    for size, offset in ((3, 0.5), (2, 7.0), (2, 0.25), (3, 1.0)):
        assert graphs(*arguments(size, offset=offset)).item() == 10 + size - 1 + offset
    assert CompileCounts.now().since(before).num_graphs == 2
    assert graphs.num_eager == 0


@torch.inference_mode()
def test_a_shape_without_a_graph_runs_as_it_is_counted_each_time_and_named_once(caplog):
    graphs = made(sizes=(2,))
    before = CompileCounts.now()
    with caplog.at_level(logging.WARNING, "trencadis.torch"):
        found = [graphs(*arguments(size, offset=0.5)).item() for size in (5, 5, 6)]
    assert found == [14.5, 14.5, 15.5]
    assert CompileCounts.now() == before
    assert graphs.num_eager == 3
    ours = [record.args[0] for record in caplog.records if record.name == "trencadis.torch"]
    assert ours == [((5,), 1), ((6,), 1)]


@torch.inference_mode()
def test_as_many_tokens_with_other_logits_are_another_shape():
    graphs = made(sizes=(3,))
    token_ids, positions, _, attention = arguments(3)
    graphs(token_ids, positions, torch.tensor([0, 1]), attention)
    assert graphs.num_eager == 1


@torch.inference_mode()
def test_a_pass_that_names_no_sizes_has_no_graph():
    graphs = made(sizes=(3,))
    token_ids, positions, keep, attention = arguments(3)
    del attention.signature
    assert graphs(token_ids, positions, keep, attention).item() == 12
    assert graphs.num_eager == 1


@torch.inference_mode()
def test_the_first_result_of_a_graph_is_compared_with_the_plain_one_and_kept_only_then():
    seen = []
    made(check=lambda plain, graph: seen.append((plain.item(), graph.item())))
    assert seen == [(3.0, 3.0), (5.0, 5.0)], "of tokens 1, 2 .. at positions 0, 1 .. the last"

    def refuse(plain, graph):
        raise BackendError("they differ")

    graphs = Graphs(forward, check=refuse, compiler="eager")
    with pytest.raises(BackendError, match="they differ"), graphs.preparing():
        graphs(*arguments(2))
    assert len(graphs) == 0
    graphs(*arguments(2))
    assert graphs.num_eager == 1, "preparing is over"


def breaking(token_ids, positions, keep, attention):
    if token_ids.sum() > 100:
        return token_ids
    return forward(token_ids, positions, keep, attention)


@torch.inference_mode()
def test_a_model_that_cannot_be_one_graph_is_refused_with_the_way_out():
    with pytest.raises(
        BackendError, match=r'compile = "buckets": torch.compile failed for the shape \(\(2,\), 1\)'
    ) as failed:
        made(plain=breaking)
    assert 'compile = "off"' in failed.value.hint
