"""Toolkit for connectors over a store: everything that does not depend on the store.

A store moves bytes and decides nothing; this package owns identity, verification, deadlines, back-pressure and the transfer ids' life.
A plugin that has a store implements :class:`BlockStore`, six calls that may wait, and returns :func:`store_connector` from its
factory. One that speaks to other engines implements both sides of a connector itself, with the parts of this package.
"""

from __future__ import annotations
