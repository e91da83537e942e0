"""How a model is divided over ranks, which features go with that, and what its copies tell of themselves."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

__all__ = ["EngineLoad", "LayoutFeature", "ParallelLayout"]


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
        name: As the documentation calls it.
        setting: Dotted path of the setting that asks for it, such as ``engine.preemption``; empty: requests do.
        unless: Values of the setting that do not ask for it.
        refused: Why, by layout: ``processes`` (ranks in processes of their own, one rank too), ``tensor``, ``pipeline``, ``expert``,
            ``data``. The end of a sentence that begins with setting and value.
        remedy: What to set instead.
        unless_provides: Capability of the component that the setting names, and of all that this one names, with which it is not refused.
    """

    name: str
    setting: str = ""
    unless_provides: str = ""
    unless: tuple[object, ...] = ()
    refused: Mapping[str, str] = attrs.field(factory=dict)
    remedy: str = ""

    def is_asked(self, value: object) -> bool:
        """Return whether a value of the setting asks for the feature. Pure."""
        return value not in self.unless
