"""Placement of experts by measured load: more copies of the busiest ones, packed so that every rank has as much to do. NumPy alone.

Source: DeepSeek's Expert Parallelism Load Balancer (EPLB), as vLLM 0.33 has it in ``vllm/distributed/eplb/policy/default.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["balance_ratio", "balanced_packing", "place_experts", "replicate_experts"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def balanced_packing(weights: npt.ArrayLike, num_packs: int) -> tuple[Ints, Ints]:
    """Put items into packs of equally many, of about equal weight; rows are independent. Pure.

    The heaviest item goes first, into the lightest pack that has room; of equal ones into the first.

    Args:
        weights: Weights of items, ``[L, N]``.
        num_packs: P, of which N is a multiple.

    Returns:
        Pack of each item, and its place there, int64 ``[L, N]`` each.

    Raises:
        ValueError: N is no multiple of P.
    """
    items = np.asarray(weights, np.float64)
    num_rows, num_items = items.shape
    if num_items % num_packs:
        raise ValueError(f"{num_items} items do not go into {num_packs} packs of equally many")
    room = num_items // num_packs
    packs, places = np.zeros((2, num_rows, num_items), np.int64)
    if room == 1:
        packs[:] = np.arange(num_items)
        return packs, places
    for row, order in enumerate(np.argsort(-items, axis=1, kind="stable")):
        total, count = np.zeros(num_packs), np.zeros(num_packs, np.int64)
        for item in order:
            pack = int(np.argmin(np.where(count < room, total, np.inf)))
            packs[row, item], places[row, item] = pack, count[pack]
            total[pack] += items[row, item]
            count[pack] += 1
    return packs, places


def replicate_experts(weights: npt.ArrayLike, num_physical: int) -> tuple[Ints, Ints]:
    """Give copies to experts: one by one, to that whose copies have the most to do each. Pure.

    Args:
        weights: Loads of logical experts, ``[L, E]``.
        num_physical: P, copies of all experts together, at least E.

    Returns:
        Logical expert of each physical one, ``[L, P]``, and how many copies each logical one has, ``[L, E]``; int64.

    Raises:
        ValueError: P is less than E.
    """
    loads = np.asarray(weights, np.float64)
    num_rows, num_logical = loads.shape
    if num_physical < num_logical:
        raise ValueError(f"{num_physical} places are not enough for {num_logical} experts")
    physical = np.tile(np.arange(num_physical, dtype=np.int64), (num_rows, 1))
    counts = np.ones((num_rows, num_logical), np.int64)
    rows = np.arange(num_rows)
    for place in range(num_logical, num_physical):
        busiest = (loads / counts).argmax(axis=1)
        physical[:, place] = busiest
        counts[rows, busiest] += 1
    return physical, counts


def place_experts(
    weights: npt.ArrayLike, *, num_physical: int, num_ranks: int, num_groups: int = 1, num_nodes: int = 1
) -> Ints:
    """Place experts on ranks: groups on nodes, then copies within each node, then those on its ranks. Pure.

    With one group and one node (the default) copies are made and placed over all ranks at once: the global variant.

    Args:
        weights: Loads of logical experts, ``[L, E]``.
        num_physical: P, copies of all experts together.
        num_ranks: Number of ranks, which P is a multiple of.
        num_groups: Experts that follow each other and are routed to together, equally many in each.
        num_nodes: Machines, of which groups and ranks are multiples.

    Returns:
        Logical expert of each place, int64 ``[L, P]``: P / ``num_ranks`` places of the first rank, then those of the next.

    Raises:
        ValueError: A number is no multiple of another.
    """
    loads = np.asarray(weights, np.float64)
    num_rows, num_logical = loads.shape
    for name, number, of in (
        ("experts", num_logical, num_groups),
        ("groups", num_groups, num_nodes),
        ("ranks", num_ranks, num_nodes),
        ("places", num_physical, num_ranks),
    ):
        if number % of:
            raise ValueError(f"{number} {name} cannot be divided evenly over {of}")
    group_size, groups_each, logical_each = num_logical // num_groups, num_groups // num_nodes, num_logical // num_nodes
    nodes, ranks_in_node = balanced_packing(loads.reshape(num_rows, num_groups, -1).sum(-1), num_nodes)
    first = (nodes * groups_each + ranks_in_node) * group_size
    by_node = _inverse((first[:, :, None] + np.arange(group_size)).reshape(num_rows, num_logical))
    own = np.take_along_axis(loads, by_node, 1).reshape(-1, logical_each)
    physical, counts = replicate_experts(own, num_physical // num_nodes)
    packs, places = balanced_packing(np.take_along_axis(own / counts, physical, 1), num_ranks // num_nodes)
    order = _inverse(packs * (num_physical // num_ranks) + places)
    placed = np.take_along_axis(physical, order, 1).reshape(num_rows, num_nodes, -1)
    placed += logical_each * np.arange(num_nodes)[:, None]
    return np.take_along_axis(by_node, placed.reshape(num_rows, num_physical), 1)


def _inverse(permutations: Ints) -> Ints:
    """Return the inverse of the permutation in each row. Pure."""
    return np.argsort(permutations, axis=1)


def balance_ratio(weights: npt.ArrayLike, placed: npt.ArrayLike, *, num_ranks: int) -> Floats:
    """Return the mean load of a rank by the greatest, copies of an expert sharing its load evenly; 1 where all are equal. Pure.

    Args:
        weights: Loads of logical experts, ``[L, E]``.
        placed: Logical expert of each place, ``[L, P]``.
        num_ranks: Number of ranks, which P is a multiple of.

    Returns:
        Float64 ``[L]``; 1 where there is no load.
    """
    loads, where = np.asarray(weights, np.float64), np.asarray(placed, np.int64)
    counts: Any = np.stack([np.bincount(row, minlength=loads.shape[1]) for row in where])
    each = np.take_along_axis(loads / np.maximum(counts, 1), where, 1)
    ranks = each.reshape(len(loads), num_ranks, -1).sum(-1)
    greatest = ranks.max(1)
    ratios: Floats = np.where(greatest > 0, ranks.mean(1) / np.where(greatest > 0, greatest, 1.0), 1.0)
    return ratios
