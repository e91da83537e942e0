"""How many KV blocks the simulator gives a configuration that names no number."""

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
    """Room for KV blocks.

    Attributes:
        num_blocks: That ``cache.num_blocks`` of the start says; 0: it says nothing.
        memory_fraction: Of the start.
        blocks_of_all: Blocks that all of the memory left after loading pays for; 0: unknown.
        most_used: That the workload could fill at most.
        words: Where the number comes from.
    """

    num_blocks: int
    memory_fraction: float
    blocks_of_all: float
    most_used: int
    words: str

    @property
    def is_short(self) -> bool:
        """Whether more of the memory would help: it is known, and the workload could fill more than the start gives."""
        return not self.num_blocks and 0 < self._paid(self.memory_fraction) < self.most_used

    def _paid(self, fraction: float) -> int:
        return int(fraction * self.blocks_of_all)

    def assumed(self, changes: Changes) -> Changes:
        """Return the number of blocks under changes, if the configuration does not name it. Pure."""
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
    """Return the room for KV blocks.

    Args:
        config: The start.
        step_times: Those of a device sheet know the device's memory and the model.
        parts: Of the workload.
        measured_blocks: That an engine with this configuration has here; 0: none was built.
        block_size: Of that engine, tokens.
        fillable_blocks: That its rows can fill: it has no more of them, however much memory there is; 0: unknown.
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
