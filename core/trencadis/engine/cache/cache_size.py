"""How long a sequence may be, how many KV blocks there is room for, and the other sizes of an engine."""

from __future__ import annotations

import logging

import attrs

from trencadis.config.schema import Config
from trencadis.errors import ConfigValueError, OutOfMemoryError
from trencadis.interfaces import BackendCapabilities, Executor
from trencadis.records import BucketLimits, MemoryReport, ModelFacts

__all__ = [
    "affordable_blocks",
    "limits_of",
    "limits_of_part",
    "longest_sequence",
    "needed_blocks",
    "size_cache",
    "without_sharing",
]

logger = logging.getLogger("trencadis.engine")


def size_cache(
    config: Config,
    model: ModelFacts,
    executor: Executor,
    *,
    block_size: int,
    num_parts: int = 1,
    further_bytes: int = 0,
) -> tuple[int, int]:
    """Return the longest sequence in tokens, which one part of the blocks holds, and the number of blocks of all parts.

    Args:
        config: Tables ``model``, ``engine`` and ``cache`` are read.
        model: The loaded model.
        executor: Measures memory.
        block_size: Tokens per block.
        num_parts: Parts of equal size into which rows and blocks are divided.
        further_bytes: Kept on the device for each token beside the KV cache.

    Raises:
        ConfigValueError: ``model.max_model_len`` exceeds the model's own, or asked-for blocks cannot hold it.
        OutOfMemoryError: There is no room for one sequence of a useful length.
    """
    asked, max_model_len = config.model.max_model_len, longest_sequence(config, model)
    num_blocks = config.cache.num_blocks
    if not num_blocks:
        engine = config.engine
        report = executor.memory(max_num_batched_tokens=engine.max_num_batched_tokens, max_num_seqs=engine.max_num_seqs)
        num_seqs = engine.max_num_seqs // num_parts
        num_blocks = affordable_blocks(
            config,
            report,
            num_needed=needed_blocks(num_seqs, max_model_len, block_size),
            block_bytes=(model.kv_bytes_per_token + further_bytes) * block_size,
            block_size=block_size,
        )
    capacity = num_blocks * block_size
    if capacity < max_model_len:
        if asked:
            raise ConfigValueError(
                f"[model] max_model_len = {asked}: the KV cache of {num_blocks} blocks holds {capacity} tokens.",
                hint="Lower it, or raise cache.num_blocks or cache.memory_fraction.",
            )
        logger.warning("The KV cache holds %d tokens: max_model_len is cut from %d.", capacity, max_model_len)
        max_model_len = capacity
    return max_model_len, num_blocks * num_parts


def longest_sequence(config: Config, model: ModelFacts) -> int:
    """Return the longest sequence that configuration and model allow, tokens. Pure.

    Raises:
        ConfigValueError: ``model.max_model_len`` exceeds the model's own.
    """
    asked = config.model.max_model_len
    if asked > model.max_model_len:
        raise ConfigValueError(
            f"[model] max_model_len = {asked}: {model.architecture} was made for {model.max_model_len} tokens.",
            hint="Lower it, or leave it at 0 for the model's own.",
        )
    return asked or model.max_model_len


def needed_blocks(num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Return the number of KV blocks of so many sequences at full length: more can only keep prefixes. Pure."""
    return num_seqs * -(-max_model_len // block_size)


def affordable_blocks(
    config: Config, report: MemoryReport, *, num_needed: int, block_bytes: int, block_size: int
) -> int:
    """Return the number of KV blocks that memory pays for, and that are of use; says both in the log.

    With prefix caching every block is of use; without, those that the sequences need.

    Args:
        config: Limits.
        report: Memory.
        num_needed: Blocks of all sequences at full length.
        block_bytes: Bytes of a block.
        block_size: Tokens of a block.

    Raises:
        OutOfMemoryError: There is no room for one sequence of a useful length.
    """
    cache, usable = config.cache, report.cache_bytes
    if usable is None:
        usable = int((report.free_bytes - report.activation_bytes) * cache.memory_fraction)
    is_capped = 0 < cache.max_bytes < usable
    if is_capped:
        usable = cache.max_bytes
    num_paid = usable // max(1, block_bytes)
    if num_paid < min(2, num_needed):
        cap = f"[cache] max_bytes = {cache.max_bytes}: " if is_capped else ""
        blocks = f"{num_paid} block{'' if num_paid == 1 else 's'}"
        raise OutOfMemoryError(
            f"{cap}{usable / 2**20:.2f} MiB for the KV cache pay for {blocks} of {block_bytes / 2**20:.2f} MiB.",
            hint=f"Raise cache.max_bytes to at least {min(2, num_needed) * block_bytes}."
            if is_capped
            else "Raise cache.memory_fraction, or free memory on the device.",
        )
    most, why = num_needed, "without prefix caching, more are of no use"
    if cache.prefix_caching:
        most, why = num_paid, "those beyond keep prefixes"
        if report.shared_cache_bytes is not None and not cache.max_bytes:
            most = max(num_needed, report.shared_cache_bytes // max(1, block_bytes))
            why = f"other processes use the same memory: a cache beyond that takes {report.shared_cache_bytes / 2**30:g} GiB at most, unless cache.max_bytes says otherwise"
    num_blocks = int(min(num_paid, most))
    logger.info(
        "KV cache: %d blocks of %d tokens, %.0f MiB. Memory pays for %d; all sequences at full length need %d (%s).",
        num_blocks,
        block_size,
        num_blocks * block_bytes / 2**20,
        num_paid,
        num_needed,
        why,
    )
    return num_blocks


def limits_of_part(limits: BucketLimits, num_parts: int) -> BucketLimits:
    """Return the sizes of each of an engine's parts. Pure."""
    return attrs.evolve(
        limits,
        max_num_seqs=limits.max_num_seqs // num_parts,
        max_prefill_batch_size=min(limits.max_prefill_batch_size, limits.max_num_seqs // num_parts),
        max_merged_prefills=min(limits.max_merged_prefills, limits.max_num_seqs // num_parts),
        num_blocks=limits.num_blocks // num_parts,
    )


def limits_of(
    config: Config,
    capabilities: BackendCapabilities,
    block_size: int,
    max_model_len: int,
    num_blocks: int,
    num_to_verify: int,
) -> BucketLimits:
    """Return the sizes of an engine. Pure."""
    max_num_seqs = config.engine.max_num_seqs
    max_prefills = min(capabilities.max_prefill_batch_size or max_num_seqs, max_num_seqs)
    return BucketLimits(
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_prefill_batch_size=1 if capabilities.merges_prefills else max_prefills,
        num_blocks=num_blocks,
        contiguous=capabilities.contiguous,
        prefix_caching=config.cache.prefix_caching,
        max_draft_tokens=num_to_verify,
        max_merged_prefills=max_prefills if capabilities.merges_prefills else 1,
        unified=capabilities.layout == "unified",
    )


def without_sharing(config: Config, capabilities: BackendCapabilities) -> Config:
    """Return the config with prefix caching off if two sequences cannot have a block in common."""
    if capabilities.shares_blocks or not config.cache.prefix_caching:
        return config
    logger.info("Prefix caching is off: the backend shares no KV block between sequences.")
    return attrs.evolve(config, cache=attrs.evolve(config.cache, prefix_caching=False))
