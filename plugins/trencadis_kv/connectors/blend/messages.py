"""Messages from the scheduler side of ``blend`` to its worker side, one a step, and the state that both share in one process."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import attrs
import msgspec

from trencadis.clock import Clock
from trencadis.errors import TransferError
from trencadis.interfaces.block_store import BlockStore
from trencadis.records import TransferCause
from trencadis_kv.connectors.blend.config import BlendConfig
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store.activity import Activity
from trencadis_kv.store.client import StoreClient
from trencadis_kv.store.cost import CostModel
from trencadis_kv.store.counters import TransferCounters

__all__ = [
    "AssembleOrder",
    "BlendOrders",
    "BlendShared",
    "ChunkPlace",
    "SaveChunkOrder",
    "decode_orders",
    "encode_orders",
]

_VERSION = 1


class SaveChunkOrder(msgspec.Struct, frozen=True, array_like=True):
    """Copy blocks of a chunk; it is saved once complete. The blocks may be overwritten once the step begins.

    Attributes:
        number: Number of the chunk.
        key: Identity of the chunk, 32 bytes.
        num_tokens: Number of tokens in the chunk.
        position: Position of the chunk's first token in the prompt that computed it.
        num_blocks: Number of blocks that contain the chunk.
        places: Index of each of ``blocks`` among the chunk's blocks.
        blocks: Ids of the blocks to copy.
    """

    number: int
    key: bytes
    num_tokens: int
    position: int
    num_blocks: int
    places: list[int]
    blocks: list[int]


class ChunkPlace(msgspec.Struct, frozen=True, array_like=True):
    """A chunk, or a part of one, in a prompt.

    Attributes:
        key: Identity of the chunk, 32 bytes.
        chunk_tokens: Number of tokens in the whole chunk.
        skip: Tokens of the chunk before the part that is used.
        position: Position in the prompt of the first token used.
        num_tokens: Number of tokens used.
    """

    key: bytes
    chunk_tokens: int
    skip: int
    position: int
    num_tokens: int


class AssembleOrder(msgspec.Struct, frozen=True, array_like=True):
    """Assemble chunks into blocks.

    Attributes:
        transfer_id: Id under which the result is reported.
        token_ids: Prompt up to the end of the last block, int32, little endian.
        num_exact: Leading tokens whose KV is there already.
        blocks: Ids of all blocks, including those of the exact tokens.
        chunks: Chunks in the order of their positions.
        ratio: Fraction of the chunks' tokens to recompute, 0 .. 1.
    """

    transfer_id: int
    token_ids: bytes
    num_exact: int
    blocks: list[int]
    chunks: list[ChunkPlace]
    ratio: float


class BlendOrders(msgspec.Struct, frozen=True, array_like=True):
    """Orders for one step.

    Attributes:
        version: Version of the message.
        saves: Blocks to copy before anything writes to them.
        assemblies: Assemblies to begin.
        cancels: Ids of transfers to cancel and release.
    """

    version: int = _VERSION
    saves: list[SaveChunkOrder] = []
    assemblies: list[AssembleOrder] = []
    cancels: list[int] = []


def encode_orders(orders: BlendOrders) -> bytes:
    """Return a message; empty if there is nothing to do. Pure."""
    if not (orders.saves or orders.assemblies or orders.cancels):
        return b""
    return msgspec.msgpack.encode(orders)


def decode_orders(message: bytes) -> BlendOrders:
    """Return the orders of a message. Pure.

    Raises:
        TransferError: The message cannot be decoded, or has another version.
    """
    if not message:
        return BlendOrders()
    try:
        orders = msgspec.msgpack.decode(message, type=BlendOrders)
    except msgspec.MsgspecError as error:
        raise TransferError(
            f"The message of the KV connector blend cannot be read: {error}.", cause=TransferCause.CORRUPT
        ) from error
    if orders.version != _VERSION:
        raise TransferError(
            f"The message of the KV connector blend is of version {orders.version}, this side speaks {_VERSION}.",
            cause=TransferCause.INCOMPATIBLE,
            hint="Run the same version of Trencadís in all processes of an engine.",
        )
    return orders


logger = logging.getLogger("trencadis.kv")


@attrs.define(kw_only=True, eq=False)
class BlendShared:
    """Settings, collaborators and events of one connector.

    Attributes:
        config: Table ``[kv_connector.blend]``.
        clock: The engine's clock.
        identity: Identity of the model.
        make_store: Returns a new connection to the chunks.
        policy: KV policy; decides whether an assembly is worth its time.
        counters: Transfer counters.
        cost: Estimates the time to read chunks and to compute tokens.
        activity: Tasks under way on threads.
        token_bytes: Bytes of one token in a chunk; 0 while no backend blends: then nothing is kept or found.
        kept: Numbers of stored chunks; appended by the worker side, consumed by the scheduler side.
        lost: Numbers of chunks that will not be stored.
        blended: Pairs of transfer id and seconds that blending took.
    """

    config: BlendConfig
    clock: Clock
    identity: str
    make_store: Callable[[], BlockStore]
    policy: KVPolicy
    counters: TransferCounters = attrs.field(factory=lambda: TransferCounters("blend"))
    cost: CostModel = attrs.field(factory=CostModel)
    activity: Activity = attrs.field(factory=Activity)
    token_bytes: int = 0
    kept: deque[int] = attrs.field(factory=deque)
    lost: deque[int] = attrs.field(factory=deque)
    blended: deque[tuple[int, float]] = attrs.field(factory=deque)

    def client(self) -> StoreClient:
        """Return a new connection for one thread."""
        return StoreClient(self.make_store, name="blend")

    def failed(self, error: TransferError, what: str) -> None:
        """Count and log a failure. From any thread.

        Args:
            error: Error to count and log.
            what: Operation that failed, such as ``load``.
        """
        self.counters.failed(error.cause)
        logger.warning("KV %s of blend failed (%s): %s", what, error.cause, error)
