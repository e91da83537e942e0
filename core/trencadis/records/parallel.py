"""How a model is divided over ranks."""

from __future__ import annotations

import attrs

__all__ = ["ParallelLayout"]


@attrs.frozen(kw_only=True)
class ParallelLayout:
    """Sizes of one replica's groups. Ranks are numbered stage by stage: rank = stage · tensor + rank within the stage.

    Attributes:
        tensor: Ranks that share each layer of a stage (tensor parallelism), at least 1.
        pipeline: Stages, each of which holds some of the layers (pipeline parallelism), at least 1.
        expert: Ranks of a stage over which whole experts are divided (expert parallelism): 1, where every rank holds a share of every
            expert, or ``tensor``.
    """

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of the replica."""
        return self.tensor * self.pipeline

    @property
    def output_rank(self) -> int:
        """Rank that samples, and whose output counts: the first one of the last stage."""
        return (self.pipeline - 1) * self.tensor

    def stage(self, rank: int) -> int:
        """Return the stage of a rank, 0 .. pipeline - 1."""
        return rank // self.tensor

    def tensor_rank(self, rank: int) -> int:
        """Return the place of a rank within its stage, 0 .. tensor - 1."""
        return rank % self.tensor
