"""Transfer parameters of a request, from the engine that computed its prefix to the one that continues it, named as in vLLM.

A request with ``do_remote_decode`` is a prefill: its blocks are held, and the response's parameters say where. A
request with these parameters has ``do_remote_prefill``: its prefix is pulled. A router need only copy the parameters.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from trencadis.errors import closest

__all__ = ["ANY_PORT", "KeyCheck", "RemotePrefix", "address_of", "handover_params", "peer_of", "wants_hold"]

logger = logging.getLogger("trencadis.kv.p2p")

ANY_PORT: Final = 0
"""Port of a peer of which all ports are allowed."""

_MAX_NAMED_BLOCKS: Final = 1024
"""Most block ids in the parameters: routers only check whether there are any, and a pull names blocks by their hashes."""
_MAX_CHARACTERS: Final = 256
_DEFAULT_LEASE_S: Final = 30.0
_KEYS: Final = (
    "do_remote_prefill",
    "do_remote_decode",
    "remote_engine_id",
    "remote_request_id",
    "remote_block_ids",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
    "remote_lease_s",
    "remote_num_cached_tokens",
    "tp_size",
)
_MISSPELT: Final = 0.9
"""Least similarity to one of our keys, 0 to 1, of a misspelt key; ``remote_notify_port`` of other engines is 0.76
similar to ``remote_port``."""
_MAX_KEYS: Final = 256
"""Most keys that are remembered: clients may make up any number."""


@attrs.frozen(kw_only=True)
class RemotePrefix:
    """Location of a prefix at another engine.

    Attributes:
        engine: Id of the engine.
        hold_id: Id of the hold of the blocks at that engine.
        host: Host name or address of the engine.
        port: Port on which the engine listens for other engines.
        num_tokens: Number of leading tokens that are held.
        lease_s: Seconds for which they are held unless the lease is renewed.
        num_cached_tokens: Prompt tokens that the engine found cached when it computed the prefix.
    """

    engine: str
    hold_id: str
    host: str
    port: int
    num_tokens: int
    lease_s: float
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> RemotePrefix | None:
        """Return the prefix in a request's transfer parameters, or None if there is no valid one. Pure."""
        if not params or params.get("do_remote_prefill") is not True:
            return None
        texts = [params.get(name) for name in ("remote_engine_id", "remote_request_id", "remote_host")]
        if not all(isinstance(text, str) and 0 < len(text) <= _MAX_CHARACTERS for text in texts):
            return None
        port, num_tokens = _number(params.get("remote_port")), params.get("remote_num_tokens")
        if not 0 < port < 65536 or isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 0:
            return None
        engine, hold_id, host = map(str, texts)
        return cls(
            engine=engine,
            hold_id=hold_id,
            host=host,
            port=port,
            num_tokens=num_tokens,
            lease_s=_duration(params.get("remote_lease_s")),
            num_cached_tokens=_count(params.get("remote_num_cached_tokens")),
        )


class KeyCheck:
    """Warns once for each key that looks like a misspelt one of ours; foreign keys pass, since routers send them."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def look_at(self, params: Mapping[str, Any] | None) -> None:
        """Check a request's parameters."""
        for key in params or ():
            if key in _KEYS or key in self._seen or len(key) > _MAX_CHARACTERS or len(self._seen) >= _MAX_KEYS:
                continue
            self._seen.add(key)
            meant = closest(key, _KEYS, cutoff=_MISSPELT)
            if meant:
                logger.warning(
                    "kv_transfer_params have the key %s, which has no effect. Did the client or router mean %r? Said once for each key.",
                    ascii(key),
                    meant,
                )


def wants_hold(params: Mapping[str, Any] | None) -> bool:
    """Return whether another engine continues a request. Pure."""
    return bool(params) and params is not None and params.get("do_remote_decode") is True


def handover_params(prefix: RemotePrefix, *, blocks: Sequence[int]) -> dict[str, Any]:
    """Return the transfer parameters of a prefix. Pure.

    Args:
        prefix: Location of the prefix.
        blocks: Ids of the prefix's blocks, for inspection; they mean nothing in another engine.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": prefix.engine,
        "remote_request_id": prefix.hold_id,
        "remote_block_ids": list(blocks[:_MAX_NAMED_BLOCKS]),
        "remote_host": prefix.host,
        "remote_port": prefix.port,
        "remote_num_tokens": prefix.num_tokens,
        "remote_lease_s": prefix.lease_s,
        "remote_num_cached_tokens": prefix.num_cached_tokens,
        "tp_size": 1,
    }


def address_of(name: str) -> tuple[str, int]:
    """Return host and port of ``host:port``, ``[::1]:port`` for IPv6. Pure.

    Raises:
        ValueError: The text is not ``host:port``.
    """
    host, colon, port = name.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if is_bracketed else host
    if ":" in host and not is_bracketed:
        raise ValueError(f"{name!r} is no address: brackets are needed around one of IPv6, as in [::1]:7400")
    if not colon or not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{name!r} is no address: host:port is needed, such as 10.0.3.17:7400")
    return host, int(port)


def peer_of(name: str) -> tuple[str | ipaddress.IPv4Network | ipaddress.IPv6Network, int]:
    """Return host, in lower case, or network, and port of a peer: ``host:port``, ``10.0.3.0/24:port``; ``*`` is any port. Pure.

    Raises:
        ValueError: The text is no host or network with a port.
    """
    host, colon, port = name.rpartition(":")
    if not colon or port.endswith("]") or "/" in port:
        raise ValueError(f"{name!r} has no port: write {name}:7400, or {name}:* for all ports")
    if port == "*":
        host, number = address_of(f"{host}:1")[0], ANY_PORT
    else:
        host, number = address_of(name)
    if "/" not in host:
        return host.lower(), number
    try:
        return ipaddress.ip_network(host), number
    except ValueError as error:
        raise ValueError(f"{host!r} is no network: {error}") from None


def _number(value: Any) -> int:
    """Return a port, which some routers write as text, or 0."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 6:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _duration(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < 1e6 else _DEFAULT_LEASE_S
