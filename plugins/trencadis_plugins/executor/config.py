"""Config tables of the built-in executors."""

from __future__ import annotations

import attrs
from attrs.validators import ge, gt, in_

from trencadis.interfaces import setting

__all__ = ["COLLECTIVES", "ProcessesConfig", "RanksConfig"]

COLLECTIVES = ("auto", "shared_memory", "gloo", "nccl", "hccl")


@attrs.frozen(kw_only=True)
class RanksConfig:
    """What the tables of executors with ranks in other processes have in common.

    Attributes:
        collective: How ranks add and gather tensors; ``auto``: the first that the backend computes with.
        silence_s: A step without an answer for longer, and for 20 times as long as any before, ends the ranks.
        max_restarts: How often ranks are started again within ``restart_window_s``.
        restart_window_s: See there.
    """

    collective: str = setting(
        "auto",
        "How ranks add and gather tensors: shared_memory, gloo, nccl or hccl; auto: the first that the backend computes with.",
        validator=in_(COLLECTIVES),
    )
    silence_s: float = setting(
        60.0,
        "A step that a rank has not answered for so long, and for 20 times as long as any step before, ends all ranks, which are then "
        "started again; one that a signal has stopped is given 5 seconds.",
        unit="s",
        validator=gt(0),
    )
    max_restarts: int = setting(
        3, "How often lost ranks are started again within restart_window_s; then the engine ends.", validator=ge(0)
    )
    restart_window_s: float = setting(600.0, "See max_restarts.", unit="s", validator=gt(0))


@attrs.frozen(kw_only=True)
class ProcessesConfig(RanksConfig):
    """Table ``[executor.processes]``."""
