"""What a failure of a Redis server means for a transfer, in words that say what to do."""

from __future__ import annotations

import ssl

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.redis.address import RedisAddress
from trencadis_kv.connectors.redis.resp import ProtocolError, ServerError

__all__ = ["transfer_error"]

_SIGN_IN = "Set kv_connector.redis.password, and the user in kv_connector.redis.url, to those that the server knows."
_HINTS = {
    "NOAUTH": _SIGN_IN,
    "WRONGPASS": _SIGN_IN,
    "NOPERM": "The user needs ping, select, get, set, exists and unlink; info and config|get for advice at start-up.",
    "DENIED": "The server is in protected mode: give it a password, or let it listen on a unix socket.",
    "READONLY": "It is a replica: name the primary in kv_connector.redis.url.",
    "MASTERDOWN": "It is a replica whose primary is away: name the primary in kv_connector.redis.url.",
    "MISCONF": "The server writes nothing because it cannot save to its disk; a store of KV blocks needs no disk: save ''.",
    "MOVED": "It is a node of a cluster: name a server that is alone in kv_connector.redis.url.",
    "CLUSTERDOWN": "It is a node of a cluster: name a server that is alone in kv_connector.redis.url.",
    "OOM": "Raise maxmemory, or set maxmemory-policy allkeys-lfu.",
}
_PASSING = {"LOADING", "BUSY", "TRYAGAIN"}
"""Answers of a server that will do again by itself."""


def transfer_error(error: Exception, address: RedisAddress, *, is_interrupted: bool = False) -> TransferError:
    """Return what to raise for what a link raised. Pure.

    Args:
        error: ``OSError``, ``ServerError`` or ``ProtocolError``.
        address: Of the server.
        is_interrupted: Somebody here ended the connection.
    """
    if is_interrupted:
        return TransferError(f"the call to {address} was interrupted.", cause=TransferCause.CANCELLED)
    if isinstance(error, ServerError):
        return _of_answer(error, address)
    if isinstance(error, ProtocolError):
        return TransferError(
            f"{address} speaks no RESP2: {error}.",
            cause=TransferCause.CORRUPT,
            hint="If this is a Redis or Valkey server, something on the way changes bytes.",
        )
    if isinstance(error, TimeoutError):
        return TransferError(f"{address} does not answer in time.", cause=TransferCause.DEADLINE)
    if isinstance(error, ssl.SSLError):
        return TransferError(
            f"no TLS with {address}: {error}.",
            cause=TransferCause.UNREACHABLE,
            hint="Set kv_connector.redis.tls_ca_path to the certificate of who signed the server's.",
        )
    return TransferError(
        f"{address} cannot be reached: {error}.",
        cause=TransferCause.UNREACHABLE,
        hint="Start it there, or correct kv_connector.redis.url.",
    )


def _of_answer(error: ServerError, address: RedisAddress) -> TransferError:
    if error.code == "OOM":
        cause = TransferCause.FULL
    elif error.code in _HINTS or error.code in _PASSING or "max number of clients" in str(error):
        cause = TransferCause.UNREACHABLE
    else:
        cause = TransferCause.RAISED
    return TransferError(f"{address} answered: {error}", cause=cause, hint=_HINTS.get(error.code, ""))
