"""Policy ``always``: moves every block that can be moved."""

from __future__ import annotations

from trencadis_kv.interfaces import KVPolicy

__all__ = ["Always"]


class Always(KVPolicy):
    """Defaults of the contract: loads and saves all blocks, prefers the longest prefix, and computes what fails.

    The connector still ends a load at its timeout, and drops saves for which it has no memory.
    """
