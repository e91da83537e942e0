"""KV blocks from engine to engine: one computes a prefix and holds it, another pulls it and goes on.

They go over TCP, and between engines of one machine through memory that both see.

Prefill first: a router sends a request to a prefill engine with ``kv_transfer_params`` that ask for a remote decode, and sends it on to a
decode engine with the parameters of the answer. Decode first: the request stays where it came, and that engine sends the prompt to one of
its ``prefill_engines``. Every failure costs the time until it is noticed, and the prefix is computed where the request is.
"""

from __future__ import annotations

from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis_kv.connectors.p2p.config import P2PConfig, check_hold, check_secret
from trencadis_kv.connectors.p2p.node import Node
from trencadis_kv.connectors.p2p.scheduler import P2PScheduler
from trencadis_kv.connectors.p2p.transport import shared_memory
from trencadis_kv.connectors.p2p.worker import P2PWorker
from trencadis_kv.store.defaults import codec_of, policy_of

__all__ = ["make_p2p"]


def make_p2p(config: P2PConfig, context: ComponentContext) -> ConnectorPair:
    """Return the connector of one engine.

    Args:
        config: Its table.
        context: With the model's facts.

    Raises:
        ConfigValueError: Blocks would be held until the engine closes the connector, or there is no secret.
    """
    check_hold(config, context, name="p2p")
    check_secret(config, name="p2p")
    model = "" if context.model is None else context.model.identity
    transport = shared_memory(config.num_pull_threads) if config.shared_memory else None
    node = Node(config, clock=context.clock, model=model, transport=transport, codec=codec_of(context))
    return ConnectorPair(scheduler=P2PScheduler(node, policy_of(context)), worker=P2PWorker(node))
