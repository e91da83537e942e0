"""Choices of the sequence to preempt when a running one needs a block, by name. All pure.

Each takes the view and the candidates, running slots by admission, and returns one of them; among equals the youngest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from trencadis.interfaces import SchedulerView
from trencadis.records import FloatArray, Int32Array, Int64Array

__all__ = ["SWAP_PRICE", "VICTIMS", "Victim", "cheapest", "largest", "least_computed", "lowest_priority", "youngest"]

SWAP_PRICE = 0.15
"""Cost of copying a token out and back, in recomputed tokens: 128 KiB each way at 20 GB/s by 90 µs.

Source: KV of Llama 3.1 8B in bfloat16, PCIe 4.0 x16 from pinned memory, and the default of ``StepTime.token_s``.
"""

Victim = Callable[[SchedulerView, Int32Array], int]


def largest(keys: Int64Array | FloatArray, candidates: Int32Array) -> int:
    """Return the candidate with the largest key, the last of them if several have it.

    Args:
        keys: One key for each of ``candidates``.
        candidates: At least one.
    """
    return int(candidates[len(keys) - 1 - int(np.argmax(keys[::-1]))])


def youngest(view: SchedulerView, candidates: Int32Array) -> int:
    """Return who was admitted last."""
    return int(candidates[-1])


def least_computed(view: SchedulerView, candidates: Int32Array) -> int:
    """Return who has the fewest computed tokens."""
    return largest(-view.num_computed_tokens[candidates], candidates)


def cheapest(view: SchedulerView, candidates: Int32Array) -> int:
    """Return whose return costs least.

    That is who has the fewest tokens to recompute: what it took from the prefix cache is likely to be there again. One whose blocks
    fit in host memory is swapped instead, and is priced by the tokens that are copied out and back.
    """
    costs: FloatArray = (view.num_computed_tokens[candidates] - view.num_cached_tokens[candidates]).astype(np.float64)
    if view.num_free_host_blocks:
        fits = -(-view.num_computed_tokens[candidates] // view.block_size) <= view.num_free_host_blocks
        costs[fits] = SWAP_PRICE * view.num_computed_tokens[candidates[fits]]
    return largest(-costs, candidates)


def lowest_priority(view: SchedulerView, candidates: Int32Array) -> int:
    """Return who is least urgent: the largest priority number, of those the latest arrival."""
    priorities = view.priority[candidates]
    lowest = candidates[priorities == priorities.max()]
    return largest(view.arrival_s[lowest], lowest)


VICTIMS: Mapping[str, Victim] = {
    "youngest": youngest,
    "least_computed": least_computed,
    "cheapest": cheapest,
    "lowest_priority": lowest_priority,
}
"""Choices by their names in the configuration."""
