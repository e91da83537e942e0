"""Memory profile: runs the largest step once, before the KV cache is sized, and measures its temporaries.

With the CPU's own attention kernel every temporary is a row per token, so the tensors of a step of a few tokens are counted and scaled up.
Elsewhere temporaries may grow with the square of the tokens, and a step as large as can be afforded is run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, MemoryReport, ModelFacts, Pass
from trencadis_torch.attention.native import NativeAttention
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKernel, PagedKVCache
from trencadis_torch.device import host_memory
from trencadis_torch.linear.decoder import decoder_of
from trencadis_torch.linear.decoder_pass import pass_bytes
from trencadis_torch.rows import Rows
from trencadis_torch.runner import PassRunner

__all__ = ["measure_memory", "AllocationTracker"]

logger = logging.getLogger("trencadis.torch")

MAX_CPU_TOKENS = 2048
MAX_CPU_OPERATIONS = 2e11
"""A profile run on the CPU takes a second or so; fewer tokens are tried with a larger model, and the result is scaled up."""

SHARED_CACHE_BYTES = 4 * 2**30
"""Size of a KV cache in host memory that is larger than its sequences need. Source: the default of vLLM's ``VLLM_CPU_KVCACHE_SPACE``."""

COUNTED_TOKENS = 64
"""Tokens of a profile run whose tensors are counted."""

UNSEEN = 1.25
"""Memory over what tensors hold: buffers inside kernels (rounded inputs of int8 layers) and what the allocator rounds up."""

SAMPLING_COPIES = 4
"""Float32 copies of the logits that a sampler may hold at once: raw, processed, sorted and noise."""


@torch.inference_mode()
def measure_memory(
    model: Any,
    layers: tuple[AttentionLayer, ...],
    facts: ModelFacts,
    *,
    layout: str,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    kernel: PagedKernel | None = None,
) -> MemoryReport:
    """Run the largest step, or one that stands for it, with a cache just large enough, and report memory.

    Where the model runs in one call nothing is run: its buffers are known.

    Args:
        model: With the paged attention switched on.
        layers: Attention layers of the model.
        facts: About it.
        layout: ``ragged`` or ``padded``.
        max_num_batched_tokens: Tokens of the step.
        max_num_seqs: Logits rows of the step.
        kernel: That attends over the cache, if not PyTorch's.
    """
    device: torch.device = model.device
    decoder = decoder_of(model) if isinstance(kernel, NativeAttention) and layout == "ragged" else None
    run = functools.partial(_run, model, layers, layout, facts=facts, kernel=kernel)
    if decoder is not None:
        tried, num_bytes = max_num_batched_tokens, UNSEEN * pass_bytes(decoder, max_num_batched_tokens)
    elif kernel is not None and device.type == "cpu":
        live = AllocationTracker()
        # One row of logits: what is counted is scaled up with the tokens, and logits are added below.
        tried = run(num_tokens=min(max_num_batched_tokens, COUNTED_TOKENS), num_logits=1, watch=live)
        num_bytes = UNSEEN * live.peak
    else:
        peak = _CudaPeak(device) if device.type == "cuda" else _HostPeak()
        tried = run(num_tokens=_affordable_tokens(device, facts, max_num_batched_tokens), num_logits=max_num_seqs)
        num_bytes = peak.bytes_since_start()
    activation = int(num_bytes * max_num_batched_tokens / tried)
    activation += SAMPLING_COPIES * 4 * max_num_seqs * facts.vocab_size
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
    else:
        total, free = host_memory()
    how = "its buffers" if decoder is not None else f"{tried} tokens tried"
    logger.info("Temporaries of the largest step: %.0f MiB (%s).", activation / 2**20, how)
    return MemoryReport(
        total_bytes=total,
        free_bytes=free,
        activation_bytes=activation,
        shared_cache_bytes=SHARED_CACHE_BYTES if device.type == "cpu" else None,
    )


def _affordable_tokens(device: torch.device, facts: ModelFacts, num_tokens: int) -> int:
    if device.type != "cpu":
        return num_tokens
    affordable = int(MAX_CPU_OPERATIONS / (2 * max(1, facts.num_parameters)))
    return min(num_tokens, MAX_CPU_TOKENS, max(16, affordable))


def _run(
    model: Any,
    layers: tuple[AttentionLayer, ...],
    layout: str,
    *,
    num_tokens: int,
    facts: ModelFacts,
    num_logits: int,
    kernel: PagedKernel | None,
    watch: contextlib.AbstractContextManager[Any] | None = None,
) -> int:
    """Run one prefill pass of whole prompts, its forward under ``watch``; return its tokens."""
    length = min(num_tokens, facts.max_model_len)
    # A padded pass takes one prompt at a time.
    count = max(1, num_tokens // length) if layout == "ragged" else 1
    block_size = 16
    per_row = -(-length // block_size)
    plan = AllocationPlan(
        num_blocks=count * per_row,
        block_size=block_size,
        num_rows=count,
        max_model_len=length,
        max_num_batched_tokens=num_tokens,
    )
    rows = Rows(plan, model.device)
    blocks = torch.arange(count * per_row, dtype=torch.int32, device=model.device)
    rows.tables[:, :per_row] = blocks.view(count, per_row)
    cache = PagedKVCache(layers, num_blocks=plan.num_blocks, block_size=block_size, device=model.device, kernel=kernel)
    runner = PassRunner(model, rows=rows, cache=cache, layout=layout, workspace=Workspace())
    order, zeros = np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
    one = Pass(
        bucket=Bucket(count, length, 0),
        indices=order,
        rows=order,
        starts=zeros,
        query_lens=np.full(count, length, np.int32),
        num_logits=zeros,
        num_prompt_logits=zeros,
    )
    with watch or contextlib.nullcontext():
        runner.forward(runner.inputs(one), np.arange(min(num_logits, count * length)))
    return count * length


class _CudaPeak:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_allocated(device)

    def bytes_since_start(self) -> int:
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_allocated(self._device) - self._before)


class _HostPeak:
    """The process's peak of resident memory; Linux forgets it on request."""

    def __init__(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError as error:  # a container may forbid it: then an earlier, higher peak counts, the safe side
            logger.info("The peak of resident memory cannot be reset: %s.", error)
        self._before = _status("VmRSS")

    def bytes_since_start(self) -> int:
        return max(0, _status("VmHWM") - self._before)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts, as a context, storages that operations of this thread make, until nothing holds them any more.

    Views and operations in place make none. Buffers inside a kernel are not seen.

    Attributes:
        now: Bytes that live.
        peak: The most that lived at once.

    Source: storages are followed by weak references, as in ``torch.distributed._tools.mem_tracker`` of PyTorch.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and note its new tensors."""
        options = kwargs or {}
        result = func(*args, **options)
        given = {storage.data_ptr() for storage in _storages((args, options))}
        for storage in _storages(result):
            if storage not in self._known and storage.data_ptr() not in given:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._known.add(storage)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, size).atexit = False

    def _drop(self, size: int) -> None:
        self.now -= size


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
