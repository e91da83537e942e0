"""Profile run: measures the temporary memory of the largest prefill before the KV cache is sized.

Source: vllm-gaudi, v1/worker/hpu_model_runner.py, profile_run, whose current form returns before measuring.
"""

from __future__ import annotations

import logging

import torch

from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket
from trencadis_gaudi.device_rows import DeviceRows, HostTables
from trencadis_gaudi.flat_cache import FlatKVCache
from trencadis_gaudi.graphs.model import ForwardAdapter
from trencadis_gaudi.habana import Habana
from trencadis_gaudi.memory import MemoryMeter, format_bytes
from trencadis_gaudi.model import LoadedModel
from trencadis_gaudi.passes.tensors import GaudiPasses
from trencadis_gaudi.runner import empty_pass

__all__ = ["measure_activations", "profile_bucket"]

logger = logging.getLogger("trencadis.gaudi")

_MAX_EMULATED_TOKENS = 512
"""Maximum tokens of a profile run on the emulated device, for speed; the result is scaled up."""


def profile_bucket(*, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int) -> Bucket:
    """Return the bucket of the largest prefill within the limits: several whole prompts, or the last chunk of the longest one. Pure.

    Source: vllm-gaudi, v1/worker/hpu_model_runner.py, profile_run.
    """
    if max_model_len < max_num_batched_tokens:
        batch_size = max(1, min(max_num_seqs, max_num_batched_tokens // max_model_len))
        return Bucket(batch_size, max_model_len, 0)
    return Bucket(1, max_num_batched_tokens, -(-(max_model_len - max_num_batched_tokens) // block_size))


@torch.inference_mode()
def measure_activations(
    loaded: LoadedModel,
    habana: Habana,
    *,
    block_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    scores_prompts: bool = False,
) -> int:
    """Return the peak of temporary memory of the largest prefill, bytes, and free that memory.

    Args:
        loaded: Loaded model.
        habana: Device of the model, which is active.
        block_size: Tokens per block.
        max_num_batched_tokens: Maximum tokens of a step.
        max_num_seqs: Maximum prompts of a prefill pass.
        scores_prompts: Whether logits of every token are computed, not only of the last ones.
    """
    bucket = profile_bucket(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=loaded.facts.max_model_len,
        block_size=block_size,
    )
    tried = bucket
    if habana.emulated is not None and bucket.num_tokens > _MAX_EMULATED_TOKENS:
        tried = Bucket(1, min(bucket.query_len, _MAX_EMULATED_TOKENS), min(bucket.num_blocks, 1))
    # All context entries read the same block, the padding block.
    plan = AllocationPlan(
        num_blocks=1,
        block_size=block_size,
        num_rows=tried.batch_size,
        max_model_len=tried.query_len,
        max_num_batched_tokens=tried.num_tokens,
    )
    cache = FlatKVCache(
        loaded.layers, num_blocks=1, block_size=block_size, device=habana.device, scales=loaded.cache_scales
    )
    passes = GaudiPasses(cache, contiguous=False, kernel=habana.kernels.attention)
    rows = DeviceRows(plan, habana)
    habana.mark_step()
    habana.hpu.reset_peak_memory_stats()
    meter = MemoryMeter(habana)
    before = habana.hpu.memory_allocated()
    inputs = passes.inputs(empty_pass(tried), rows, HostTables(plan.num_rows, 1).blocks)
    num_logits = tried.num_tokens if scores_prompts else tried.batch_size
    keep = torch.zeros(num_logits, dtype=torch.int64, device=habana.device)
    logits = ForwardAdapter(loaded.model, passes)(inputs.token_ids, inputs.positions, keep, inputs.tensors)
    habana.mark_step()
    habana.hpu.synchronize()
    peak = max(0, habana.hpu.max_memory_allocated() - before)
    del logits
    activations = int(peak * bucket.num_tokens / tried.num_tokens)
    logger.info("Model profiling run took %s", meter.summary())
    logger.info("The largest prefill, %s, takes %s of activations.", bucket, format_bytes(activations))
    return activations
