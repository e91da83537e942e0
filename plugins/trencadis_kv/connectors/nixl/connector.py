"""KV blocks from engine to engine through NIXL: as the connector ``p2p``, with another way for the bytes.

Engines with ``p2p`` and with ``nixl`` understand each other; between them blocks go over TCP.
"""

from __future__ import annotations

import attrs

from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis_kv.connectors.nixl.config import NixlConfig
from trencadis_kv.connectors.nixl.transport import NixlTransport
from trencadis_kv.connectors.p2p.config import check_hold, check_secret
from trencadis_kv.connectors.p2p.node import Node
from trencadis_kv.connectors.p2p.scheduler import P2PScheduler
from trencadis_kv.connectors.p2p.worker import P2PWorker
from trencadis_kv.store.defaults import codec_of, policy_of

__all__ = ["make_nixl"]


def make_nixl(config: NixlConfig, context: ComponentContext) -> ConnectorPair:
    """Return the connector of one engine.

    Args:
        config: Its table.
        context: With the model's facts.

    Raises:
        ConfigError: The package nixl is missing.
        ConfigValueError: Blocks would be held until the engine closes the connector, or there is no secret.
    """
    check_hold(config, context, name="nixl")
    check_secret(config, name="nixl")
    model = "" if context.model is None else context.model.identity
    transport = NixlTransport(config)
    config = attrs.evolve(config, max_pushed_bytes=0)  # what comes along with an offer comes over the connection
    node = Node(config, clock=context.clock, model=model, name="nixl", transport=transport, codec=codec_of(context))
    return ConnectorPair(scheduler=P2PScheduler(node, policy_of(context)), worker=P2PWorker(node))
