"""Config tables of the built-in executors."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from attrs.validators import ge, gt, in_

from trencadis.interfaces import setting

__all__ = ["COLLECTIVES", "ProcessesConfig", "RanksConfig", "RayConfig"]

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
        "started again; one that SIGSTOP has stopped is given 2 seconds.",
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


@attrs.frozen(kw_only=True)
class RayConfig(RanksConfig):
    """Table ``[executor.ray]``.

    Attributes:
        address: Address of the cluster.
        num_cpus: That are reserved for each rank.
        num_gpus: The same.
        resources: Further resources of each rank by name, such as ``HPU = 1``.
        start_timeout_s: Until all ranks have a place and their processes answer, and for how long one that starts may be silent.
        heartbeat_timeout_s: A rank that has started and is silent for so long while it has something to answer is lost.
    """

    address: str = setting("auto", "Of the Ray cluster; auto: the one that this machine belongs to.")
    num_cpus: float = setting(1.0, "CPU cores that are reserved for each rank.", unit="cores", validator=ge(0))
    num_gpus: float = setting(0.0, "GPUs that are reserved for each rank.", unit="GPUs", validator=ge(0))
    resources: Mapping[str, float] = setting(
        None, "Further resources that are reserved for each rank, by name, such as HPU = 1.", factory=dict
    )
    start_timeout_s: float = setting(
        300.0,
        "Until every rank has a place in the cluster, and its process answers; one that imports, loads or compiles may be silent for as "
        "long, unless Ray says that it has ended.",
        unit="s",
        validator=gt(0),
    )
    heartbeat_timeout_s: float = setting(
        8.0,
        "A rank that has started and of which nothing is heard for so long, while it has something to answer, is lost; ranks send a sign "
        "of life every second.",
        unit="s",
        validator=gt(1),
    )
