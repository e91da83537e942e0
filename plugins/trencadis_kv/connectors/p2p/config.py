"""Config table of the connector between engines."""

from __future__ import annotations

from typing import Any, Final

import attrs
from attrs.validators import and_, ge, gt, in_, le

from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext, setting
from trencadis_kv.connectors.p2p.params import address_of, peer_of

__all__ = ["P2PConfig", "check_hold", "check_secret"]

_LEAST_SECRET: Final = 16
"""Minimum length of the secret, characters: an eavesdropper could try out shorter ones."""


def _are_peers(_: object, attribute: attrs.Attribute[Any], peers: tuple[str, ...]) -> None:
    for peer in peers:
        try:
            peer_of(peer)
        except ValueError as error:
            raise ValueError(f"{attribute.name}: {error}") from None


def _are_addresses(_: object, attribute: attrs.Attribute[Any], names: tuple[str, ...]) -> None:
    for name in names:
        try:
            address_of(name)
        except ValueError as error:
            raise ValueError(f"{attribute.name}: {error}") from None


@attrs.frozen(kw_only=True)
class P2PConfig:
    """Table ``[kv_connector.p2p]``: addresses, limits and timeouts of the exchange with other engines."""

    host: str = setting("127.0.0.1", "Address to listen on for engines that pull blocks from here.")
    port: int = setting(0, "Port to listen on; 0: any that is free.", validator=and_(ge(0), le(65535)))
    advertised_host: str = setting("", "Address that other engines reach this one by; empty: ``host``.")
    peers: tuple[str, ...] = setting(
        (),
        "Engines that blocks may be pulled from when a request names them: host:port, or a network and port such as 10.0.3.0/24:7400; "
        "port * is all. Those of ``prefill_engines`` need not be repeated. A request can make this engine connect to nothing else.",
        validator=_are_peers,
    )
    secret: str = setting(
        "",
        "What all engines that speak with each other must know, at least 16 characters; required. ``trencadis cluster`` makes one.",
        secret=True,
    )
    numerics: str = setting(
        "exact",
        "``exact``: take blocks from engines on the same kind of device only, whose low bits agree; ``any``: from all.",
        validator=in_(("exact", "any")),
    )
    lease_s: float = setting(
        30.0,
        "How long blocks of a finished prefill are kept for the engine that continues it; each request of that engine to keep them adds as long.",
        unit="s",
        validator=and_(gt(0), le(3600)),
    )
    max_hold_s: float = setting(
        50.0,
        "And never longer than this; less than cache.release_timeout_s.",
        unit="s",
        validator=and_(gt(0), le(3600)),
    )
    max_held_bytes: int = setting(
        4 << 30, "Most bytes of blocks kept for others; beyond it they are not kept.", unit="bytes", validator=ge(0)
    )
    pull_timeout_s: float = setting(
        10.0,
        "A pull that takes longer is given up; its tokens are computed.",
        unit="s",
        validator=and_(gt(0), le(600)),
    )
    shared_memory: bool = setting(
        True,
        "Engines of one machine and user pass blocks through memory that both see; else, and where they do not see each other's "
        "processes, over the connection. Not with a codec, nor with ``layerwise``, nor with ``nixl``.",
    )
    layerwise: bool = setting(
        False,
        "A request runs while its prefix is still being pulled, each layer as soon as it is there; else it waits for all of it. Needs a "
        "backend whose steps wait, which ``torch`` is; with others it has no effect.",
    )
    connect_timeout_s: float = setting(
        1.0,
        "The longest that connecting and introducing takes.",
        unit="s",
        validator=and_(gt(0), le(60)),
    )
    retry_s: float = setting(
        5.0,
        "An engine that could not be reached is left alone for so long.",
        unit="s",
        validator=and_(ge(0), le(3600)),
    )
    num_pull_threads: int = setting(4, "Pulls that run side by side.", unit="threads", validator=and_(ge(1), le(64)))
    load_share: float = setting(
        0.025,
        "The part of the time that a pull works while the engine computes, so that no request waits longer for a token; it rests for the "
        "others, but never beyond half of the time that computing would take. 1: it does not rest, nor "
        "does it where steps are computed on a device.",
        unit="ratio",
        validator=and_(gt(0), le(1)),
    )
    max_connections: int = setting(
        128,
        "Connections of other engines at once; each prompt of theirs that is computed here takes one.",
        unit="connections",
        validator=and_(ge(1), le(1024)),
    )
    prefill_engines: tuple[str, ...] = setting(
        (),
        "Engines, as host:port, that compute long prompts for this one; each must have this connector. None: all are computed here.",
        validator=_are_addresses,
    )
    min_remote_tokens: int = setting(
        512,
        "A prompt of which fewer tokens are missing here is computed here.",
        unit="tokens",
        validator=ge(1),
    )
    max_slowdown: float = setting(
        4.0,
        "A prompt is computed elsewhere if that takes at most this many times as long as here, where others must wait for it.",
        unit="ratio",
        validator=gt(0),
    )
    prefill_timeout_s: float = setting(
        10.0,
        "An engine that computes a prompt for longer is given up; another one or this one does it.",
        unit="s",
        validator=and_(gt(0), le(600)),
    )
    heartbeat_s: float = setting(
        1.0,
        "The engines that compute prompts are asked so often how much they have to do.",
        unit="s",
        validator=and_(gt(0), le(60)),
    )
    max_delegated_prefills: int = setting(
        64,
        "Prompts of this engine that are computed elsewhere at once.",
        unit="prompts",
        validator=and_(ge(1), le(1024)),
    )
    max_remote_prefills: int = setting(
        64,
        "Prompts of others that this engine takes at once; 0: none.",
        unit="prompts",
        validator=and_(ge(0), le(4096)),
    )
    first_token: bool = setting(
        True,
        "The engine that computes a prompt of this one chooses its first token, too, as this one would; if the choice cannot be "
        "described to it, the token is chosen here.",
    )
    push: bool = setting(
        True,
        "It sends the blocks along as soon as the prompt is computed, and this engine sends those that it computes for others; else they "
        "are pulled. Not with ``layerwise``, nor with ``nixl``.",
    )
    max_pushed_bytes: int = setting(
        256 << 20,
        "Most bytes of memory set aside for blocks that are sent along; what is beyond it is pulled.",
        unit="bytes",
        validator=ge(0),
    )
    max_bytes_per_step: int = setting(
        32 << 20,
        "Most bytes that a step copies to or from a device that only its own thread may touch.",
        unit="bytes",
        validator=ge(1),
    )


def check_hold(config: P2PConfig, context: ComponentContext, *, name: str) -> None:
    """Refuse a hold time at which the engine would close the connector. Pure.

    Args:
        config: Table of the connector.
        context: Context of the component's factory.
        name: Name of the connector's table, such as ``p2p``.

    Raises:
        ConfigValueError: ``max_hold_s`` is not less than ``cache.release_timeout_s``.
    """
    if config.max_hold_s >= context.quarantine_s:
        raise ConfigValueError(
            f"[kv_connector.{name}] max_hold_s = {config.max_hold_s}: blocks may be held for others until [cache] release_timeout_s = "
            f"{context.quarantine_s}, and a connector that holds them for so long is closed for good.",
            hint=f"Set kv_connector.{name}.max_hold_s to less, or cache.release_timeout_s to more.",
        )


def check_secret(config: P2PConfig, *, name: str) -> None:
    """Refuse to run without a secret of sufficient length. Pure.

    Args:
        config: Table of the connector.
        name: Name of the connector's table, such as ``p2p``.

    Raises:
        ConfigValueError: ``secret`` is missing or short.
    """
    if len(config.secret) >= _LEAST_SECRET:
        return
    what = f"has {len(config.secret)} characters, fewer than {_LEAST_SECRET}" if config.secret else "is not set"
    raise ConfigValueError(
        f"[kv_connector.{name}] secret {what}: whatever reaches the port could have prompts computed in the name of any tenant, and "
        "learn what is cached.",
        hint=f"Set TRENCADIS_KV_CONNECTOR__{name.upper()}__SECRET to the same random text for all engines, such as openssl rand -hex 32 "
        "prints; trencadis cluster makes one itself.",
    )
