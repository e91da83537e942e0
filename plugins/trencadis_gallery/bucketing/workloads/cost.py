"""Cost model of a device: the time of passes and of preparing buckets, from a few constants."""

from __future__ import annotations

from typing import Any

import attrs
from attrs.validators import gt

from trencadis.records import Phase, Shape

__all__ = ["DeviceCost"]

_BLOCKS_THAT_DOUBLE_A_TOKEN = 128
_BLOCKS_OF_A_ROW = 3


def _constant(default: float, help: str, unit: str) -> Any:  # noqa: A002 - the word of the metadata
    return attrs.field(default=default, validator=gt(0), metadata={"help": help, "unit": unit})


@attrs.frozen(kw_only=True)
class DeviceCost:
    """Time and memory of passes and graphs, for comparing tables; the defaults stand for a model of 8 G parameters.

    Measure your own where it matters: compile time differs tenfold between graph compilers.

    Source: ``step_s`` and ``block_s``, decode steps of 8 ms + 20 µs a sequence + 7 µs a block. ``token_s``, 2 operations
    a parameter at 200 T operations a second. ``compile_s``, the warm-up example in the documentation of the vLLM plugin
    for Gaudi: 72 buckets in 29 s. Graph memory, the capture example there: 14.03 GiB for 15 prefill graphs of 9,984 tokens
    together, 161.9 MiB for 48 decode graphs. None was measured by this project.
    """

    step_s: float = _constant(0.008, "Time of a step, however small.", "s")
    token_s: float = _constant(80e-6, "Time of one token position in a prefill pass.", "s")
    block_s: float = _constant(7e-6, "Time of one KV block in a decode pass; a row costs three.", "s")
    compile_s: float = _constant(0.4, "Time to prepare one bucket.", "s")
    prefill_graph_bytes: float = _constant(1.44 * 2**20, "Memory of a prefill graph for each token position.", "bytes")
    decode_graph_bytes: float = _constant(3.4 * 2**20, "Memory of a decode graph.", "bytes")

    def pass_s(self, shape: Shape) -> float:
        """Return the time of one pass, its share of the step left out, in seconds. Pure.

        Prefill: token positions, each the dearer the more context it reads: 128 blocks double it. Decode: blocks and
        rows. Within a phase the order of shapes is that of the cost which the built-in strategies minimise.
        """
        if shape.phase is Phase.PREFILL:
            return self.token_s * shape.num_tokens * (1 + shape.num_blocks / _BLOCKS_THAT_DOUBLE_A_TOKEN)
        return self.block_s * (shape.num_blocks + _BLOCKS_OF_A_ROW * shape.num_tokens)

    def graph_bytes(self, shape: Shape) -> float:
        """Return the memory that the prepared bucket of ``shape`` holds. Pure."""
        if shape.phase is Phase.PREFILL:
            return self.prefill_graph_bytes * shape.num_tokens
        return self.decode_graph_bytes
