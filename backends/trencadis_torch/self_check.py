"""Does the paged forward compute what the model computes? Asked of every model once, right after loading.

Two made-up sequences run through the cache in chunks, together and then one token at a time; the model's own eager attention runs
each of them whole. Whatever paging breaks in an architecture we never saw (state between tokens, positions taken from the batch,
a mask of its own) shows as other logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from trencadis.errors import ModelLoadError
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, Pass, Phase
from trencadis_torch.bridge import PAGED, switch
from trencadis_torch.kv_cache import AttentionLayer, PagedKVCache
from trencadis_torch.native_attention import NativeAttention
from trencadis_torch.ragged import Workspace
from trencadis_torch.rows import Rows
from trencadis_torch.runner import PassRunner

__all__ = ["check_model"]

BLOCK_SIZE = 4
LENGTHS, LENGTHS_LARGE = (26, 13), (12, 6)
LARGE_MODEL = 1_000_000_000

EXACT, ROUNDED = 5e-3, 0.15
"""Largest difference of the logits at a position, over their spread: in float32 the worst, in 16 bits the median position."""


@torch.inference_mode()
def check_model(
    model: Any, layers: tuple[AttentionLayer, ...], *, layout: str, kernel: NativeAttention | None = None
) -> None:
    """Compare the paged forward with the model's own; the paged attention is switched on afterwards.

    Costs two forwards of about 40 tokens, of about 20 for more than 1e9 parameters.

    Args:
        model: Of transformers.
        layers: Its attention layers.
        layout: ``ragged`` or ``padded``.
        kernel: That attends over the cache, if not PyTorch's.

    Raises:
        ModelLoadError: They differ.
    """
    lengths = LENGTHS if model.num_parameters() < LARGE_MODEL else LENGTHS_LARGE
    vocab_size = model.get_output_embeddings().weight.shape[0]
    sequences = [(torch.arange(n) * 7919 + 31 * n) % vocab_size for n in lengths]
    switch(model, "eager")
    expected = [_whole(model, tokens) for tokens in sequences]
    if not switch(model, PAGED):
        raise ModelLoadError(f"{type(model).__name__} does not take another attention implementation.")
    found = _paged(model, layers, sequences, layout, kernel)
    errors = torch.cat([_errors(a, b) for a, b in zip(expected, found, strict=True)])
    exact = model.dtype == torch.float32
    error = float(errors.max() if exact else errors.median())
    if not error <= (EXACT if exact else ROUNDED):
        raise ModelLoadError(
            f"{type(model).__name__}: logits with the paged KV cache differ from the model's own by {error:.2g} of their "
            f"spread (allowed: {EXACT if exact else ROUNDED:g}).",
            hint="This architecture cannot be served here; [backend.torch] check_model = false serves it unchecked.",
        )


def _errors(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return the root mean square difference at each position over the spread of the expected logits there."""
    return (expected - found).square().mean(-1).sqrt() / expected.std(-1).clamp_min(1e-6)


def _whole(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens[None].to(model.device), use_cache=False).logits[0]
    return logits.float()


def _paged(
    model: Any,
    layers: tuple[AttentionLayer, ...],
    sequences: list[torch.Tensor],
    layout: str,
    kernel: NativeAttention | None,
) -> list[torch.Tensor]:
    """Return the logits of every position: a chunk, the rest but one token together with the other sequence, one token."""
    longest = len(sequences[0])
    num_blocks = -(-longest // BLOCK_SIZE)
    plan = AllocationPlan(
        num_blocks=2 * num_blocks,
        block_size=BLOCK_SIZE,
        num_rows=2,
        max_model_len=longest,
        max_num_batched_tokens=2 * longest,
    )
    rows = Rows(plan, model.device)
    for row, tokens in enumerate(sequences):
        rows.tokens[row, : len(tokens)] = tokens.int()
        # Backwards, so that nothing works by lying in order.
        rows.tables[row, :num_blocks] = torch.arange(num_blocks).flip(0).int() * 2 + row
    cache = PagedKVCache(layers, num_blocks=2 * num_blocks, block_size=BLOCK_SIZE, device=model.device, kernel=kernel)
    runner = PassRunner(model, rows=rows, cache=cache, layout=layout, workspace=Workspace())
    chunk = longest // 2 - 1
    first, second = (len(tokens) - 1 for tokens in sequences)
    steps = (
        (Phase.PREFILL, (0,), (0,), (chunk,)),
        (Phase.PREFILL, (0, 1), (chunk, 0), (first - chunk, second)),
        (Phase.DECODE, (0, 1), (first, second), (1, 1)),
    )
    found: list[list[torch.Tensor]] = [[], []]
    for phase, of, starts, lengths in steps:
        one = _pass(phase, of, starts, lengths)
        inputs = runner.inputs(one)
        for row, begin, length in zip(of, inputs.firsts.tolist(), lengths, strict=False):
            logits = runner.forward(inputs, np.arange(begin, begin + length))
            found[row].append(logits.float())
    return [torch.cat(parts) for parts in found]


def _pass(phase: Phase, rows: tuple[int, ...], starts: tuple[int, ...], lengths: tuple[int, ...]) -> Pass:
    ends = np.array(starts) + np.array(lengths)
    held = -(-ends // BLOCK_SIZE)
    num_blocks = int(held.sum()) if phase is Phase.DECODE else -(-max(starts) // BLOCK_SIZE)
    zeros = np.zeros(len(rows), np.int32)
    return Pass(
        bucket=Bucket(len(rows), max(lengths), num_blocks, phase),
        indices=np.arange(len(rows), dtype=np.int32),
        rows=np.array(rows, np.int32),
        starts=np.array(starts, np.int32),
        query_lens=np.array(lengths, np.int32),
        num_logits=zeros,
        num_prompt_logits=zeros,
    )
