from __future__ import annotations

import math

import pytest
import torch

from trencadis_plugins.sampling.min_tokens import MinTokens


@pytest.mark.parametrize(("num_output", "is_masked"), [(0, True), (1, True), (2, False), (3, False)])
def test_ends_are_masked_while_the_output_is_shorter_than_min_tokens(num_output, is_masked, process, start):
    row = start(0, prompt=[5, 5, 5], output=[5] * num_output, min_tokens=2, eos=(1, 3))
    processed = process(MinTokens(), [[1, 2, 3, 4]], [row])
    assert processed.tolist() == [[1, -math.inf, 3, -math.inf] if is_masked else [1, 2, 3, 4]]


def test_rows_of_one_sequence_are_judged_by_their_own_positions(process, start, context_of):
    import attrs
    import torch

    processor = MinTokens()
    row = start(0, prompt=[5, 5], min_tokens=2, eos=(0,))
    process(processor, [[1, 2]], [row])
    context = attrs.evolve(context_of([row]), rows=(0, 0, 0), positions=(1, 2, 3))
    processed = processor.apply(torch.zeros((3, 2)), context)
    assert processed[:, 0].tolist() == [-math.inf, -math.inf, 0]


def test_an_end_token_outside_the_vocabulary_is_ignored(process, start):
    processed = process(
        MinTokens(), [[1, 2]] * 2, [start(0, min_tokens=2, eos=(9,)), start(1, min_tokens=2, eos=(9, 0))]
    )
    assert processed.tolist() == [[1, 2], [-math.inf, 2]]


def test_masked_logits_equal_transformers(process, start):
    from transformers.generation.logits_process import MinNewTokensLengthLogitsProcessor

    logits = torch.randn((60, 9), generator=torch.Generator().manual_seed(0))
    starts = [start(row, [0] * (1 + row % 5), [0] * (row % 7), min_tokens=4, eos=(2, 8)) for row in range(60)]
    expected = [
        MinNewTokensLengthLogitsProcessor(1 + row % 5, 4, [2, 8])(
            torch.zeros((1, 1 + row % 5 + row % 7)), one[None].clone()
        )
        for row, one in enumerate(logits)
    ]
    assert torch.equal(process(MinTokens(), logits, starts), torch.cat(expected))
