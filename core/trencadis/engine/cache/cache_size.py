"""How long a sequence may be, and how many KV blocks there is room for."""

from __future__ import annotations

import logging

from trencadis.config.schema import Config
from trencadis.errors import ConfigValueError, OutOfMemoryError
from trencadis.interfaces import Executor
from trencadis.records import MemoryReport, ModelFacts

__all__ = ["longest_sequence", "most_blocks", "size_cache"]

logger = logging.getLogger("trencadis.engine")


def size_cache(
    config: Config, model: ModelFacts, executor: Executor, *, block_size: int, num_partitions: int = 1
) -> tuple[int, int]:
    """Return the longest sequence in tokens, which one partition holds, and the number of KV blocks of all partitions.

    Raises:
        ConfigValueError: ``model.max_model_len`` exceeds the model's own, or asked-for blocks cannot hold it.
        OutOfMemoryError: There is no room for one sequence of a useful length.
    """
    asked, max_model_len = config.model.max_model_len, longest_sequence(config, model)
    num_blocks = config.cache.num_blocks
    if not num_blocks:
        engine = config.engine
        report = executor.memory(max_num_batched_tokens=engine.max_num_batched_tokens, max_num_seqs=engine.max_num_seqs)
        num_seqs = engine.max_num_seqs // num_partitions
        num_blocks = _affordable_blocks(
            config, model, report, most_blocks(num_seqs, max_model_len, block_size), block_size
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
    return max_model_len, num_blocks * num_partitions


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


def most_blocks(num_seqs: int, max_model_len: int, block_size: int) -> int:
    """Return the number of KV blocks of so many sequences at full length: more can never be used. Pure."""
    return num_seqs * -(-max_model_len // block_size)


def _affordable_blocks(config: Config, model: ModelFacts, report: MemoryReport, most: int, block_size: int) -> int:
    cache = config.cache
    usable = report.cache_bytes
    if usable is None:
        usable = int((report.free_bytes - report.activation_bytes) * cache.memory_fraction)
    is_capped = 0 < cache.max_bytes < usable
    if is_capped:
        usable = cache.max_bytes
    block_bytes = model.kv_bytes_per_token * block_size
    num_blocks = min(usable // max(1, block_bytes), most)
    if num_blocks < 2:
        cap = f"[cache] max_bytes = {cache.max_bytes}: " if is_capped else ""
        raise OutOfMemoryError(
            f"{cap}{usable / 2**20:.2f} MiB for the KV cache pay for {num_blocks} blocks of {block_bytes / 2**20:.2f} MiB.",
            hint=f"Raise cache.max_bytes to at least {2 * block_bytes}."
            if is_capped
            else "Raise cache.memory_fraction, or free memory on the device.",
        )
    return int(num_blocks)
