"""Built-in KV connectors: KV blocks in and out of an engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext
from trencadis.interfaces.component import Stability
from trencadis.interfaces.kv_connector import INTERFACE_VERSION
from trencadis_kv.connectors.blend.config import BlendConfig
from trencadis_kv.connectors.filesystem.config import FilesystemConfig
from trencadis_kv.connectors.host_offload.config import HostOffloadConfig
from trencadis_kv.connectors.lmcache.config import LMCacheConfig
from trencadis_kv.connectors.mooncake.config import MooncakeConfig
from trencadis_kv.connectors.nixl.config import NixlConfig
from trencadis_kv.connectors.p2p.config import P2PConfig
from trencadis_kv.connectors.redis.config import RedisConfig
from trencadis_kv.connectors.tiered.config import TieredConfig

if TYPE_CHECKING:
    from trencadis.interfaces import ConnectorPair

__all__ = ["trencadis_kv_connectors"]


@hookimpl
def trencadis_kv_connectors() -> Iterable[Component]:
    """Yield ``blend``, ``filesystem``, ``host_offload``, ``lmcache``, ``mooncake``, ``nixl``, ``p2p``, ``redis`` and ``tiered``."""
    yield _component(
        "blend", BlendConfig, "Chunks of prompts in any order, put together for requests that ask for it: approximate."
    )
    yield _component(
        "filesystem",
        FilesystemConfig,
        "Blocks as files in a directory, for other engines and for after a restart.",
        works_among_ranks=True,
        stability="stable",
    )
    yield _component(
        "host_offload",
        HostOffloadConfig,
        "Blocks in host memory, for prefixes that the device has no room for.",
        works_among_ranks=True,
        stability="stable",
    )
    yield _component("lmcache", LMCacheConfig, "Blocks in the stores that LMCache knows.", stability="experimental")
    yield _component(
        "mooncake",
        MooncakeConfig,
        "Blocks in memory that several engines share through Mooncake.",
        works_among_ranks=True,
    )
    yield _component("nixl", NixlConfig, "Blocks from engine to engine through NIXL; what is said goes over TCP.")
    yield _component("p2p", P2PConfig, "Blocks from engine to engine over TCP: prefill here, decode there.")
    yield _component(
        "redis", RedisConfig, "Blocks in a Redis or Valkey server that several engines share.", works_among_ranks=True
    )
    yield _component(
        "tiered",
        TieredConfig,
        "Several connectors as one: the longest prefix wins, saves go to all.",
        works_among_ranks=True,
    )


def _component(
    name: str,
    config: type[Any],
    summary: str,
    *,
    works_among_ranks: bool = False,
    stability: Stability = "provisional",
) -> Component:
    return Component(
        name=name,
        factory=_maker(name),
        config=config,
        summary=summary,
        interface_version=INTERFACE_VERSION,
        stability=stability,
        provides={"kv_connector.ranks"} if works_among_ranks else (),
    )


def _maker(name: str) -> Callable[[Any, ComponentContext], ConnectorPair]:
    """Return a factory that imports the connector's module when called, and calls its ``make_<name>``."""

    def make(config: Any, context: ComponentContext) -> ConnectorPair:
        module = importlib.import_module(f"trencadis_kv.connectors.{name}.connector")
        pair: ConnectorPair = getattr(module, f"make_{name}")(config, context)
        return pair

    return make
