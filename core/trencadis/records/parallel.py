"""How a model is divided over ranks, which features go with that, and what its copies tell of themselves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import attrs

__all__ = ["EngineLoad", "LayoutFeature", "ParallelLayout", "divide_layers"]


@attrs.frozen(kw_only=True)
class ParallelLayout:
    """Sizes of one replica's groups. Ranks are numbered stage by stage: rank = stage · tensor + rank within the stage.

    Attributes:
        tensor: Ranks that share each layer of a stage (tensor parallelism), at least 1.
        pipeline: Stages, each of which holds some of the layers (pipeline parallelism), at least 1.
        expert: Ranks of a stage over which whole experts are divided (expert parallelism): 1, where every rank holds a share of every
            expert, or ``tensor``.
        attention: How the ranks of a stage divide attention: ``tensor``, by heads; ``data``, by sequences, each of which is one rank's,
            with its KV blocks.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    attention: str = "tensor"

    @property
    def num_ranks(self) -> int:
        """Ranks of the replica."""
        return self.tensor * self.pipeline

    @property
    def output_rank(self) -> int:
        """Rank that samples, and whose output counts: the first one of the last stage."""
        return (self.pipeline - 1) * self.tensor

    @property
    def num_partitions(self) -> int:
        """Parts of the rows and KV blocks, each of which one rank of a stage has: part p is of rank p."""
        return self.tensor if self.attention == "data" else 1

    def stage(self, rank: int) -> int:
        """Return the stage of a rank, 0 .. pipeline - 1."""
        return rank // self.tensor

    def tensor_rank(self, rank: int) -> int:
        """Return the place of a rank within its stage, 0 .. tensor - 1."""
        return rank % self.tensor


def divide_layers(sizes: Sequence[int], *, num_stages: int, first: int = 0, last: int = 0) -> list[range]:
    """Return the layers of each stage: in order, at least one each, so that the largest stage is as small as can be. Pure.

    Args:
        sizes: Bytes of each layer.
        num_stages: How many.
        first: Further bytes of the first stage.
        last: Further bytes of the last stage.

    Raises:
        ValueError: There are fewer layers than stages.
    """
    if len(sizes) < num_stages:
        raise ValueError(f"{len(sizes)} layers for {num_stages} stages")
    up_to = [0, *itertools.accumulate(sizes)]
    # Largest stage of the first n layers on k stages, and where the last of these begins.
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(float("inf"), 0)] * len(sizes)]
    for k in range(1, num_stages + 1):
        besides = (first if k == 1 else 0) + (last if k == num_stages else 0)
        row = [(float("inf"), 0)]
        for n in range(1, len(sizes) + 1):
            choices = [(max(best[-1][m][0], up_to[n] - up_to[m] + besides), m) for m in range(n)]
            row.append(min(choices))
        best.append(row)
    stages, end = [], len(sizes)
    for k in range(num_stages, 0, -1):
        begin = best[k][end][1]
        stages.append(range(begin, end))
        end = begin
    return stages[::-1]


@attrs.frozen(kw_only=True)
class EngineLoad:
    """How much an engine has to do, and what its prefix cache has gained and lost since it was asked last.

    Attributes:
        num_waiting: Sequences that wait, or texts.
        num_running: Sequences that run.
        kv_usage: Share of its KV blocks that sequences hold, 0 .. 1.
        added: Hashes of blocks that are in the cache and were not.
        removed: Hashes of blocks that were in the cache and are not.
    """

    num_waiting: int
    num_running: int = 0
    kv_usage: float = 0.0
    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()


@attrs.frozen(kw_only=True)
class LayoutFeature:
    """A feature, and the layouts under which it is refused; under all others it works.

    Attributes:
        name: Name in the documentation.
        setting: Dotted path of the setting that asks for it, such as ``engine.preemption``; empty: requests do.
        unless: Values of the setting that do not ask for it.
        refused: Why, by layout: ``processes`` (ranks in processes of their own, one rank too), ``tensor``, ``pipeline``, ``expert``,
            ``attention``, ``data``. The end of a sentence that begins with setting and value.
        remedy: Setting to use instead.
        unless_provides: By layout, the capability of the component that the setting names, and of all that this one names, with which it is
            not refused.
    """

    name: str
    setting: str = ""
    unless: tuple[object, ...] = ()
    unless_provides: Mapping[str, str] = attrs.field(factory=dict)
    refused: Mapping[str, str] = attrs.field(factory=dict)
    remedy: str = ""

    def is_asked(self, value: object) -> bool:
        """Return whether a value of the setting asks for the feature. Pure."""
        return value not in self.unless
