"""Whatever can be moved is."""

from __future__ import annotations

from trencadis.interfaces import KVPolicy

__all__ = ["Always"]


class Always(KVPolicy):
    """The contract's defaults: loads and saves all there is, from the source that has the most, and computes what fails.

    A load still ends at its timeout, and saves are still dropped where there is no room: that is the connector's.
    """
