"""Compares the paged forward of a model with its own, once after loading.

Two made-up sequences run through the cache in chunks, together and then one token at a time; the model's own eager attention runs
each of them whole. Whatever paging breaks in an architecture we never saw (state between tokens, positions taken from the batch,
a mask of its own) shows as other logits; and so does an error of module replacement, for the model's own logits are from before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from trencadis.errors import BackendError, ModelLoadError
from trencadis.faults import as_words
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, Pass, Phase
from trencadis_torch.attention.adapter import PAGED, switch
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKernel, PagedKVCache
from trencadis_torch.loading.inspection import vocab_size
from trencadis_torch.rows import Rows
from trencadis_torch.runner import PassRunner

__all__ = ["ModelCheck", "check_graph", "check_model", "check_sequences", "paged_logits"]

BLOCK_SIZE = 4
LENGTHS, LENGTHS_LARGE = (26, 13), (12, 6)
LARGE_MODEL = 1_000_000_000

EXACT, ROUNDED = 5e-3, 0.15
"""Largest difference of the logits at a position, over their spread: in float32 the worst, in 16 bits the median position."""

QUANTISED = 0.5
"""The same for int8 weights, of the median position: random weights, which forgive least, are measured at 0.02 to 0.2."""


class ModelCheck:
    """Logits of a model's own forward, for comparison. Costs a forward of about 40 tokens, of about 20 beyond 1e9 parameters.

    Args:
        model: Model whose modules are not replaced yet.
        layers: Attention layers of the model.
        layout: ``ragged`` or ``padded``.
        kernel: That attends over the cache, if not PyTorch's.
        agree: Whether something holds on every rank of several; None: there is one. Each rank compares its share's two forwards,
            and all refuse the model if one does.
        expected: Logits of :func:`check_sequences`, if they are known; None: a forward of each sequence computes them.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: Any,
        layers: tuple[AttentionLayer, ...],
        *,
        layout: str,
        kernel: PagedKernel | None = None,
        agree: Callable[[bool], bool] | None = None,
        expected: list[torch.Tensor] | None = None,
    ) -> None:
        if expected is None:
            switch(model, "eager")
            self._sequences = check_sequences(model, model.num_parameters())
            self._expected = [_whole(model, tokens) for tokens in self._sequences]
        else:
            self._sequences = _check_sequences(model, [len(one) for one in expected])
            self._expected = expected
        self._layers = layers
        self._layout = layout
        self._kernel = kernel
        self._agree = agree

    @torch.inference_mode()
    def compare(self, model: Any, *, quantised: bool = False, rounded: bool = False, replaced: bool = False) -> None:
        """Compare the paged forward with those logits; the paged attention is switched on afterwards. Costs as much again.

        Args:
            model: The model, as it is now.
            quantised: Whether the model's weights have been rounded to int8.
            rounded: Inputs of its layers are rounded to 16 bits, though it is in float32.
            replaced: Modules have been replaced; the error names another remedy.

        Raises:
            ModelLoadError: They differ.
        """
        name = type(model).__name__
        remedy = "check_model = false serves it unchecked"
        if replaced:
            remedy = 'quantization = "none" and pack = "off" serve it as transformers made it'
        if not switch(model, PAGED):
            raise ModelLoadError(f"{name} does not take another attention implementation.")
        packed = " and packed layers" if replaced else ""
        differ = f"logits with the paged KV cache{packed} differ from the model's own"
        try:
            found = paged_logits(model, self._layers, self._sequences, self._layout, self._kernel)
        except Exception as error:  # of the model's code, which may be anybody's
            if not replaced:
                raise
            fault = f"a forward with packed layers failed: {as_words(error)}"
        else:
            is_exact = model.dtype == torch.float32 and not rounded
            difference = _disagreement(
                torch.cat(self._expected), torch.cat(found), is_exact=is_exact, quantised=quantised
            )
            fault = difference and f"{differ} {difference}"
        # All ranks are asked before any of them gives up, also if its forward failed.
        if not (not fault if self._agree is None else self._agree(not fault)):
            raise ModelLoadError(
                f"{name}: {fault or f'{differ} on another rank'}.",
                hint=f"This architecture cannot be served here; [backend.torch] {remedy}.",
            )


def check_sequences(model: Any, num_parameters: int) -> list[torch.Tensor]:
    """Return the token ids of the check, int64 of two sequences; the first is the longer one. Pure.

    Args:
        model: Model of transformers.
        num_parameters: Number of parameters of all layers.
    """
    return _check_sequences(model, LENGTHS if num_parameters < LARGE_MODEL else LENGTHS_LARGE)


def _check_sequences(model: Any, lengths: Sequence[int]) -> list[torch.Tensor]:
    return [(torch.arange(n) * 7919 + 31 * n) % vocab_size(model) for n in lengths]


def check_model(
    model: Any,
    layers: tuple[AttentionLayer, ...],
    *,
    layout: str,
    kernel: PagedKernel | None = None,
    agree: Callable[[bool], bool] | None = None,
) -> None:
    """Compare the paged forward with the model's own; the paged attention is switched on afterwards.

    Costs two forwards of about 40 tokens, of about 20 for more than 1e9 parameters.

    Args:
        model: Model of transformers.
        layers: Attention layers of the model.
        layout: ``ragged`` or ``padded``.
        kernel: That attends over the cache, if not PyTorch's.
        agree: Agreement between ranks; see :class:`ModelCheck`.

    Raises:
        ModelLoadError: They differ.
    """
    ModelCheck(model, layers, layout=layout, kernel=kernel, agree=agree).compare(model)


def check_graph(expected: torch.Tensor, found: torch.Tensor, *, quantised: bool) -> None:
    """Compare the logits of a graph with those of the forward that it was made of.

    Args:
        expected: ``[L, V]``.
        found: The same, of the graph.
        quantised: Weights are int8.

    Raises:
        BackendError: They differ.
    """
    difference = _disagreement(
        expected.float(), found.float(), is_exact=expected.dtype == torch.float32, quantised=quantised
    )
    if difference:
        raise BackendError(
            f"A graph of torch.compile computes other logits than the model: they differ {difference}.",
            hint='Set [backend.torch] compile = "off"; compile_cache names the directory of the graphs, which can be removed.',
        )


def _errors(expected: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return the root mean square difference at each position over the spread of the expected logits there."""
    pairs = zip(expected, found, strict=True)  # one by one, for a position of a large vocabulary takes a MiB
    errors = [(one - other).square().mean().sqrt() / one.std().clamp_min(1e-6) for one, other in pairs]
    return torch.stack(errors)


def _disagreement(expected: torch.Tensor, found: torch.Tensor, *, is_exact: bool, quantised: bool) -> str:
    """Return by how much float32 logits differ, in words, if that is more than rounding does; else nothing."""
    errors = _errors(expected, found)
    is_exact = is_exact and not quantised
    allowed = EXACT if is_exact else QUANTISED if quantised else ROUNDED
    largest = float(errors.max() if is_exact else errors.median())
    return "" if largest <= allowed else f"by {largest:.2g} of their spread (allowed: {allowed:g})"


def _whole(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=tokens[None].to(model.device), use_cache=False).logits[0]
    return logits.float()


def paged_logits(
    model: Any,
    layers: tuple[AttentionLayer, ...],
    sequences: list[torch.Tensor],
    layout: str,
    kernel: PagedKernel | None = None,
) -> list[torch.Tensor]:
    """Return the logits of every position: a chunk, the rest but one token together with the other sequence, one token.

    Args:
        model: With the paged attention switched on.
        layers: Attention layers of the model.
        sequences: Token ids of two, int64; the first is the longer one.
        layout: ``ragged`` or ``padded``.
        kernel: That attends over the cache, if not PyTorch's.
    """
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
        places = [np.arange(first, first + length) for first, length in zip(inputs.firsts, lengths, strict=False)]
        logits = runner.forward(inputs, np.concatenate(places)).float()
        for row, part in zip(of, torch.split(logits, list(lengths)), strict=True):
            found[row].append(part)
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
