"""A rank's place among others: its groups, its share of the model, and what all decide together."""

from __future__ import annotations

from trencadis.errors import BackendError
from trencadis.interfaces import RankGroups
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.habana import Habana
from trencadis_gaudi.parallel.agreement import Agreement, check_sums
from trencadis_gaudi.parallel.group import on_device
from trencadis_gaudi.parallel.support import FEATURES
from trencadis_torch.config import TorchConfig
from trencadis_torch.parallel.share import Share, check_settings

__all__ = ["take_place"]


def take_place(groups: RankGroups, config: GaudiConfig, habana: Habana) -> tuple[Share | None, Agreement]:
    """Return a rank's share, None where there is one rank, and what it decides with the others.

    Args:
        groups: As the executor made them.
        config: Table ``[backend.gaudi]``.
        habana: The device, which is active.

    Raises:
        BackendError: The ranks are laid out in stages, or do not reach each other.
        ConfigValueError: A key of the configuration goes with one rank only.
    """
    check_settings(groups, config, FEATURES, table="backend.gaudi")
    if groups.layout.pipeline > 1:
        raise BackendError(
            f"[parallel] pipeline = {groups.layout.pipeline}: the backend gaudi has no stages.",
            hint="Set it to 1, and tensor to the number of ranks.",
        )
    if groups.layout.num_ranks == 1:
        return None, Agreement()
    groups = on_device(groups, habana)
    check_sums(groups.tensor, habana.device)
    share = Share(groups, TorchConfig(), table="backend.gaudi")
    return share, Agreement(groups.tensor)
