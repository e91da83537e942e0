"""Suites of KV connectors in a project's own tests, against whatever ``pytest --kv-connector=TARGET`` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest

from trencadis.interfaces import ConnectorPair
from trencadis_testing.conform import maker_of, parse

__all__ = ["NamedConnector"]


class NamedConnector:
    """Gives a suite its ``make``; inherit from it before the suite.

    Example::

        class TestContract(NamedConnector, KVConnectorConformance):
            targets = ("host_offload", "my_package.shelf:make_shelf")

    ``pytest --kv-connector=redis`` runs it against ``redis`` instead. A connector that needs a server or a directory gets its
    address from the fixture ``kv_connector_options``, which a ``conftest.py`` overrides.

    Attributes:
        targets: Names of installed components, or import paths, with options after commas; used without the option.
    """

    targets: tuple[str, ...] = ()
    has_threads: bool = True
    _make_target: Callable[..., Any]

    @pytest.fixture(autouse=True)
    def _take_target(self, kv_connector_target: str, kv_connector_options: Mapping[str, object]) -> None:
        asked = parse(f"kv_connector={kv_connector_target}")
        options = {**{name: str(value) for name, value in kv_connector_options.items()}, **asked.options}
        self._make_target = maker_of(attrs.evolve(asked, options=options))

    def make(self) -> ConnectorPair:
        """Return a new connector."""
        pair: ConnectorPair = self._make_target(self)
        return pair
