"""Kinds and bodies of the frames between two engines; :mod:`trencadis_kv.wire.stream` has their order."""

from __future__ import annotations

import enum
from typing import Any, Final, TypeAlias

import msgspec

from trencadis.records import FirstToken, TokenLogprobs

__all__ = [
    "BODIES",
    "KINDS",
    "Abort",
    "Ack",
    "Commit",
    "Hello",
    "Kind",
    "Layers",
    "Message",
    "Placed",
    "PrefillRequest",
    "PrefillResponse",
    "Proof",
    "Pull",
    "Refuse",
    "Release",
    "Renew",
    "State",
    "Status",
    "Taken",
    "Token",
    "Welcome",
    "decode_token",
    "encode_token",
]


class Kind(enum.IntEnum):
    """Kinds of frames."""

    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    PROOF = 4
    PULL = 5
    BLOCK = 6
    COMMIT = 7
    ABORT = 8
    RENEW = 9
    RELEASE = 10
    ACK = 11
    STATUS = 12
    STATE = 13
    PREFILL_REQUEST = 14
    PREFILL_RESPONSE = 15
    PLACED = 16
    TAKEN = 17
    LAYERS = 18


class _Body(msgspec.Struct, array_like=True, gc=False):
    """The body of a frame."""


class Hello(_Body):
    """The consumer's identity: ``compat`` and ``block_bytes`` of its own blocks, ``wants`` the expected engine id, or empty."""

    version: int
    compat: bytes
    block_bytes: int
    wants: str
    nonce: bytes


class Welcome(_Body):
    """The producer is the expected one, and proves the secret."""

    engine: str
    nonce: bytes
    proof: bytes


class Refuse(_Body):
    """The producer refuses this consumer; ``cause`` is a word of ``TransferCause``."""

    cause: str
    reason: str


class Proof(_Body):
    """The consumer proves the secret."""

    proof: bytes


class Pull(_Body):
    """Requests the leading blocks of these hashes from a hold.

    ``via`` names a transport for the bytes, which the producer may support too, and ``target`` is the address for it.
    ``by_layer`` asks for the first layer of all blocks, then the second, and so on, all or nothing; a producer that can
    do so begins with ``LAYERS``.
    """

    hold_id: str
    hashes: list[bytes]
    via: str = ""
    target: bytes = b""
    by_layer: bool = False


class Commit(_Body):
    """The end of the blocks, with their number."""

    num_blocks: int


class Abort(_Body):
    """No more blocks follow; ``cause`` is a word of ``TransferCause``."""

    cause: str
    reason: str


class Renew(_Body):
    """Renews the lease of a hold."""

    hold_id: str


class Release(_Body):
    """Releases a hold."""

    hold_id: str


class Ack(_Body):
    """Reply to ``Renew`` and ``Release``; ``known`` is False if there was no such hold."""

    known: bool


class Status(_Body):
    """Requests the producer's load."""


class State(_Body):
    """Reply to ``Status``: whether prefills are accepted, how many run, queued tokens, and tokens per second (0: unknown)."""

    accepts: bool
    num_remote_prefills: int
    num_tokens: int
    tokens_per_s: float


class PrefillRequest(_Body):
    """Requests a prefill whose blocks are then held. ``tokens`` are int32, little endian.

    ``tenant`` and ``cache_salt`` are part of the blocks' identity, and with ``priority`` and ``weight``
    determine the order of scheduling; without a weight, that of the tenant counts.

    ``sampling`` is the packed sampling fingerprint; empty: no first token is requested. Blocks after the first
    ``num_skipped`` may be pushed after the response, at most ``push_bytes`` bytes of them in the pool.
    """

    tokens: bytes
    tenant: str
    cache_salt: str
    timeout_s: float
    priority: int = 0
    weight: float | None = None
    sampling: bytes = b""
    push_bytes: int = 0
    num_skipped: int = 0


class Token(_Body):
    """A token, and its log-probabilities if requested: then ``rank`` is at least 1."""

    token_id: int
    logprob: float = 0.0
    rank: int = 0
    top_token_ids: list[int] = []
    top_logprobs: list[float] = []


def encode_token(first: FirstToken) -> Token:
    """Return the message of a first token. Pure."""
    logprobs = first.logprobs
    if logprobs is None:
        return Token(token_id=first.token_id)
    return Token(
        token_id=first.token_id,
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=list(logprobs.top_token_ids),
        top_logprobs=list(logprobs.top_logprobs),
    )


def decode_token(token: Token) -> FirstToken:
    """Return the first token of a message; the engine validates it. Pure."""
    if token.rank < 1:
        return FirstToken(token_id=token.token_id)
    logprobs = TokenLogprobs(
        index=0,
        position=0,
        token_id=token.token_id,
        logprob=token.logprob,
        rank=token.rank,
        top_token_ids=tuple(token.top_token_ids),
        top_logprobs=tuple(token.top_logprobs),
    )
    return FirstToken(token_id=token.token_id, logprobs=logprobs)


class PrefillResponse(_Body):
    """The prefill is computed: number of tokens held, hold id and lease.

    ``token`` is the first token after the prompt, if it was requested and the fingerprint matches. ``num_pushed``
    blocks follow, and ``COMMIT``. ``num_cached_tokens`` of the prompt were in the engine's prefix cache.
    """

    hold_id: str
    num_tokens: int
    lease_s: float
    token: Token | None = None
    num_pushed: int = 0
    num_cached_tokens: int = 0


class Layers(_Body):
    """The blocks that follow are one layer each: those of the first layer in order, then those of the second."""


class Placed(_Body):
    """The next blocks lie in a piece of the consumer's memory; these are their headers."""

    index: int
    headers: list[bytes]


class Taken(_Body):
    """A piece of the consumer's memory may be written to again."""

    index: int


Message: TypeAlias = (
    Hello
    | Welcome
    | Refuse
    | Proof
    | Pull
    | Commit
    | Abort
    | Renew
    | Release
    | Ack
    | Status
    | State
    | PrefillRequest
    | Layers
    | PrefillResponse
    | Placed
    | Taken
)

BODIES: Final[dict[Kind, type[Any]]] = {
    Kind.HELLO: Hello,
    Kind.WELCOME: Welcome,
    Kind.REFUSE: Refuse,
    Kind.PROOF: Proof,
    Kind.PULL: Pull,
    Kind.COMMIT: Commit,
    Kind.ABORT: Abort,
    Kind.RENEW: Renew,
    Kind.RELEASE: Release,
    Kind.ACK: Ack,
    Kind.STATUS: Status,
    Kind.STATE: State,
    Kind.PREFILL_REQUEST: PrefillRequest,
    Kind.PREFILL_RESPONSE: PrefillResponse,
    Kind.PLACED: Placed,
    Kind.TAKEN: Taken,
    Kind.LAYERS: Layers,
}
KINDS: Final = {body: kind for kind, body in BODIES.items()}
