"""Handshake of two engines: protocol version, block compatibility, engine id, and the shared secret.

Each side proves that it knows the secret, by a MAC over both nonces: ``HMAC-SHA256(secret, role + both nonces +
compat)``. This keeps strangers out; it neither encrypts the blocks nor protects them from changes on the wire. An
engine that knows the secret may name any tenant, since it serves the clients of all tenants.
"""

from __future__ import annotations

import hmac
import os
from typing import Final

import attrs

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.interfaces import KVCodec
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_kv.wire.stream import VERSION, FrameStream, Hello, Message, Proof, Refuse, Welcome

__all__ = ["Identity", "accept", "greet"]

_NONCE_BYTES: Final = 16


@attrs.frozen(kw_only=True)
class Identity:
    """Identity that an engine presents.

    Attributes:
        engine: Id of this engine; new in each process.
        compat: Compatibility id of its blocks, 16 bytes.
        block_bytes: Bytes per block.
        secret: Secret of all engines that may exchange blocks; not empty.
        codec: KV codec of blocks in transit; engines whose codecs have other flags must have another ``compat``.
    """

    engine: str
    compat: bytes
    block_bytes: int
    secret: str = attrs.field(repr=False, validator=attrs.validators.min_len(1))
    codec: KVCodec = attrs.field(factory=IdentityCodec, repr=False, eq=False)


def greet(stream: FrameStream, me: Identity, *, wants: str) -> str:
    """Introduce a consumer; returns the producer's id once it is accepted.

    Args:
        stream: Connected stream.
        me: Identity of the consumer.
        wants: Id of the producer; empty: any.

    Raises:
        TransferError: ``incompatible``: another version, or blocks of another kind. ``lost``: another engine is there
            now. ``unreachable``: it is busy, or has another secret; or an error of :class:`FrameStream`.
    """
    nonce = os.urandom(_NONCE_BYTES)
    stream.send(Hello(version=VERSION, compat=me.compat, block_bytes=me.block_bytes, wants=wants, nonce=nonce))
    answer = stream.receive()
    if isinstance(answer, Refuse):
        raise TransferError(f"The other engine refuses: {answer.reason}.", cause=_cause(answer.cause))
    if not isinstance(answer, Welcome) or len(answer.nonce) != _NONCE_BYTES:
        raise _unexpected(answer)
    if wants and answer.engine != wants:
        raise TransferError(
            f"Engine {answer.engine!r} answers where {wants!r} was expected: it was started anew.",
            cause=TransferCause.LOST,
        )
    if not hmac.compare_digest(answer.proof, _proof(me, b"producer", nonce, answer.nonce)):
        raise TransferError(
            "The other engine does not know the secret.",
            cause=TransferCause.UNREACHABLE,
            hint="Set the same secret on both, such as kv_connector.p2p.secret.",
        )
    stream.send(Proof(proof=_proof(me, b"consumer", nonce, answer.nonce)))
    stream.trust()
    return answer.engine


def accept(stream: FrameStream, me: Identity) -> None:
    """Check a consumer that has connected, and accept it.

    Args:
        stream: Connected stream.
        me: Identity of the producer.

    Raises:
        TransferError: The consumer was refused, and notified; or an error of :class:`FrameStream`.
    """
    hello = stream.receive()
    if not isinstance(hello, Hello) or len(hello.nonce) != _NONCE_BYTES:
        raise _unexpected(hello)
    refusal = _refusal(hello, me)
    if refusal is not None:
        stream.send(refusal)
        raise TransferError(f"An engine was refused: {refusal.reason}.", cause=_cause(refusal.cause))
    nonce = os.urandom(_NONCE_BYTES)
    stream.send(Welcome(engine=me.engine, nonce=nonce, proof=_proof(me, b"producer", hello.nonce, nonce)))
    answer = stream.receive()
    if not isinstance(answer, Proof):
        raise _unexpected(answer)
    if not hmac.compare_digest(answer.proof, _proof(me, b"consumer", hello.nonce, nonce)):
        stream.send(Refuse(cause=TransferCause.UNREACHABLE, reason="it does not know the secret"))
        raise TransferError("An engine was refused: it does not know the secret.", cause=TransferCause.UNREACHABLE)
    stream.trust()


def _refusal(hello: Hello, me: Identity) -> Refuse | None:
    if hello.version != VERSION:
        return Refuse(
            cause=TransferCause.INCOMPATIBLE, reason=f"it speaks version {hello.version}, this engine speaks {VERSION}"
        )
    if hello.wants and hello.wants != me.engine:
        return Refuse(cause=TransferCause.LOST, reason=f"it wants engine {hello.wants!r}, and this is {me.engine!r}")
    if hello.compat != me.compat or hello.block_bytes != me.block_bytes:
        return Refuse(
            cause=TransferCause.INCOMPATIBLE,
            reason="its KV blocks are of another kind: another model, revision, dtype, block size, device or kv_codec",
        )
    return None


def _proof(me: Identity, role: bytes, consumer_nonce: bytes, producer_nonce: bytes) -> bytes:
    text = role + b"\0" + consumer_nonce + producer_nonce + me.compat
    return hmac.digest(me.secret.encode(), text, "sha256")


def _cause(word: str) -> TransferCause:
    return TransferCause(word) if word in list(TransferCause) else TransferCause.UNREACHABLE


def _unexpected(message: Message | int) -> TransferError:
    name = "BLOCK" if isinstance(message, int) else type(message).__name__.upper()
    return TransferError(f"The other engine began with {name}.", cause=TransferCause.CORRUPT)
