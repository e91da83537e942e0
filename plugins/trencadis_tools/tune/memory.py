"""Number of KV blocks that the simulator gives a configuration without ``cache.num_blocks``."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trencadis.api import Config
from trencadis.records import StepShape
from trencadis_tools.simulation import StepTimes
from trencadis_tools.simulation.fleet import NUM_BLOCKS
from trencadis_tools.simulation.step_times import SheetStepTimes
from trencadis_tools.tune.trials import Changes
from trencadis_tools.workloads import Workload

__all__ = ["KVMemory", "memory_of"]

_BLOCK_SIZE = 16


@attrs.frozen(kw_only=True)
class KVMemory:
    """Memory for KV blocks.

    Attributes:
        num_blocks: Value of ``cache.num_blocks`` in the start; 0: not set.
        memory_fraction: Value of ``cache.memory_fraction`` in the start.
        blocks_of_all: KV blocks that fit into all memory left after loading; 0: unknown.
        most_used: Maximum number of blocks that the workload could fill.
        words: Source of the number, in words.
    """

    num_blocks: int
    memory_fraction: float
    blocks_of_all: float
    most_used: int
    words: str

    @property
    def is_short(self) -> bool:
        """Whether a larger memory fraction would help: the memory is known and the workload could fill more than the start gives."""
        return not self.num_blocks and 0 < self._paid(self.memory_fraction) < self.most_used

    def _paid(self, fraction: float) -> int:
        return int(fraction * self.blocks_of_all)

    def assumed(self, changes: Changes) -> Changes:
        """Return the assumed ``cache.num_blocks`` under changes; empty if the configuration sets it. Pure."""
        if self.num_blocks:
            return {}
        paid = self._paid(changes.get("cache.memory_fraction", self.memory_fraction)) or NUM_BLOCKS
        return {"cache.num_blocks": min(paid, self.most_used)}


def memory_of(
    config: Config,
    step_times: StepTimes,
    parts: Sequence[Workload],
    *,
    measured_blocks: int = 0,
    block_size: int = 0,
    fillable_blocks: int = 0,
) -> KVMemory:
    """Return the memory for KV blocks.

    Args:
        config: Starting configuration.
        step_times: Step times; those of a device sheet include the device's memory and the model.
        parts: Parts of the workload.
        measured_blocks: Number of KV blocks of an engine built here with this configuration; 0: none was built.
        block_size: Tokens of a block of that engine.
        fillable_blocks: Maximum number of blocks that the rows of that engine can fill, regardless of memory; 0: unknown.
    """
    size = config.cache.block_size or block_size or _BLOCK_SIZE
    most_used = max(
        sum((one.num_prompt_tokens + one.num_output_tokens) // size + 2 for one in part.requests) for part in parts
    )
    fraction, of_all = config.cache.memory_fraction, 0.0
    words = f"{NUM_BLOCKS} KV blocks of {size} tokens, as nothing says how much memory there is; set cache.num_blocks"
    if config.cache.num_blocks:
        words = f"{config.cache.num_blocks} KV blocks of {size} tokens, as cache.num_blocks says"
    elif measured_blocks and measured_blocks >= fillable_blocks > 0:
        of_all = max(measured_blocks, most_used) / fraction
        words = f"as many KV blocks of {size} tokens as sequences can fill: memory did not limit the {measured_blocks} of an engine here"
    elif measured_blocks:
        of_all = measured_blocks / fraction
        words = f"{measured_blocks} KV blocks of {size} tokens, as an engine has here"
    elif isinstance(step_times, SheetStepTimes):
        of_all = _blocks_of_sheet(step_times, size)
        words = (
            f"{int(fraction * of_all)} KV blocks of {size} tokens, cache.memory_fraction = {fraction:g} of what the weights leave of "
            f"a device of {step_times.device.name}"
        )
    return KVMemory(
        num_blocks=config.cache.num_blocks,
        memory_fraction=fraction,
        blocks_of_all=of_all,
        most_used=most_used,
        words=words,
    )


def _blocks_of_sheet(step_times: SheetStepTimes, block_size: int) -> float:
    model, device = step_times.model, step_times.device
    weights_bytes = step_times.parts(StepShape()).weights_s * device.bandwidth_bytes_per_s
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_size * model.activation_bytes
    return max(0.0, device.memory_bytes - weights_bytes) / (token_bytes / step_times.tensor * block_size)
