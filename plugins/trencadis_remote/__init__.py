"""Engines that run elsewhere: each in a process of its own, one or several, of which a router chooses one for each request."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import partial

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Placement

__all__ = ["trencadis_placements"]


@hookimpl
def trencadis_placements() -> Iterable[Placement]:
    """Yield ``process``."""
    yield Placement(
        name="process",
        summary="In a process of its own; with parallel.data above 1, in as many.",
        load=partial(importlib.import_module, "trencadis_remote.placement"),
    )
