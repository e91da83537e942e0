from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis_plugins.sampling.row_processor import RowProcessor, select


class _AddK(RowProcessor):
    """Adds top_k to the rows that set it; counts the rows it was shown."""

    num_seen = 0

    def applies_to(self, start):
        return start.params.top_k > 0

    def _take(self, start):
        self._k = getattr(self, "_k", np.zeros(len(self._asked), dtype=np.float32))
        self._k[start.row] = start.params.top_k

    def _change(self, logits, context):
        self.num_seen += len(logits)
        return logits + self._column(self._k, context)


def test_only_rows_that_ask_are_seen_and_the_others_stay_bit_equal(process, start):
    processor = _AddK()
    logits = torch.randn((4, 5), generator=torch.Generator().manual_seed(0))
    starts = [start(2, top_k=3), start(0), start(3, top_k=7), start(1)]
    changed = process(processor, logits, starts)
    assert processor.num_seen == 2
    assert torch.equal(changed, logits + torch.tensor([[3.0], [0.0], [7.0], [0.0]]))


def test_no_work_is_done_if_no_row_asks(process, start):
    processor = _AddK()
    logits = torch.zeros((1, 5))
    assert torch.equal(process(processor, logits, [start(0)]), logits)
    assert processor.num_seen == 0


def test_a_row_that_starts_again_without_asking_is_left_alone(process, start, context_of):
    processor = _AddK()
    process(processor, torch.zeros((1, 5)), [start(0, top_k=3)])
    processor.start_row(start(0))
    assert processor.apply(torch.zeros((1, 5)), context_of([start(0)])).abs().sum() == 0


@pytest.mark.parametrize("index", [[0, 1, 2], [1], [0, 2]])
def test_select_keeps_rows_and_positions_together(index, start, context_of):
    context = context_of([start(5, [1]), start(2, [1, 1]), start(7, [1, 1, 1])])
    logits = torch.arange(6.0).view(3, 2)
    part, part_context = select(logits, context, np.array(index))
    assert torch.equal(part, logits[index])
    assert part_context.rows == tuple(context.rows[i] for i in index)
    assert part_context.positions == tuple(index)
