"""Joining of ranks: groups, share of the model, and common decisions."""

from __future__ import annotations

import os
from collections.abc import Mapping

from trencadis.errors import BackendError
from trencadis.interfaces import RankGroups
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.environment import holds_collectives
from trencadis_gaudi.habana import Habana
from trencadis_gaudi.parallel.agreement import ONE_RANK, Agreement, check_sums
from trencadis_gaudi.parallel.group import on_device
from trencadis_gaudi.parallel.host_group import HostGroup
from trencadis_gaudi.parallel.support import FEATURES
from trencadis_torch.config import TorchConfig
from trencadis_torch.parallel.share import Share, check_settings

__all__ = ["join_ranks"]


def join_ranks(groups: RankGroups, config: GaudiConfig, habana: Habana) -> tuple[Share | None, Agreement]:
    """Return a rank's share of the model (None for a single rank), and the common decisions of ranks.

    Args:
        groups: Groups made by the executor.
        config: Table ``[backend.gaudi]``.
        habana: Device of this rank, which is active.

    Raises:
        BackendError: The ranks form pipeline stages, or do not reach each other.
        ConfigValueError: A key of the configuration requires a single rank.
    """
    if groups.layout.pipeline > 1:
        raise BackendError(
            f"[parallel] pipeline = {groups.layout.pipeline}: the backend gaudi has no stages.",
            hint="Set it to 1, and tensor to the number of ranks.",
        )
    check_settings(groups, config, FEATURES, table="backend.gaudi")
    if groups.layout.num_ranks == 1:
        return None, ONE_RANK
    host = None
    if habana.emulated is None:
        _check_environment(habana, os.environ)
        host = HostGroup(groups.rank, groups.layout.num_ranks)
    groups = on_device(groups, habana, host=host)
    check_sums(groups.tensor, habana.device)
    share = Share(groups, TorchConfig(tensor_plan=config.tensor_plan), table="backend.gaudi")
    return share, Agreement(groups.tensor)


def _check_environment(habana: Habana, environ: Mapping[str, str]) -> None:
    """Check that graphs of lazy mode may contain collectives.

    Raises:
        BackendError: Graphs may not contain collectives.
    """
    if habana.is_lazy and not holds_collectives(environ):
        given = environ.get("PT_HPU_ENABLE_LAZY_COLLECTIVES", "(not set)")
        raise BackendError(
            f"PT_HPU_ENABLE_LAZY_COLLECTIVES={given} in lazy mode: HPU graphs would hold nothing that ranks exchange.",
            hint="Leave it unset: it is set to true before torch is imported.",
        )
