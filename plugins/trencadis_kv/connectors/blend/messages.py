"""What the scheduler side of ``blend`` asks of its worker side: one message a step, as bytes."""

from __future__ import annotations

import msgspec

from trencadis.errors import TransferError
from trencadis.records import TransferCause

__all__ = ["BlendOrders", "ChunkPlace", "AssembleOrder", "SaveChunkOrder", "decode_orders", "encode_orders"]

_VERSION = 1


class SaveChunkOrder(msgspec.Struct, frozen=True, array_like=True):
    """Copy blocks that belong to a chunk; it is kept once all of them were copied. They may be overwritten once the step begins.

    Attributes:
        number: Names the chunk.
        key: Of the chunk.
        num_tokens: Of the chunk.
        position: Of its first token in the prompt that computed it.
        num_blocks: That it lies in.
        places: Of the blocks named here among those.
        blocks: Their ids.
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
        key: Of the chunk.
        chunk_tokens: All that the chunk has.
        skip: Tokens of the chunk in front of those meant.
        position: Of the first one meant, in the prompt.
        num_tokens: How many are meant.
    """

    key: bytes
    chunk_tokens: int
    skip: int
    position: int
    num_tokens: int


class AssembleOrder(msgspec.Struct, frozen=True, array_like=True):
    """Fill blocks with chunks.

    Attributes:
        transfer_id: To report it by.
        token_ids: Of the prompt up to the last block, int32, little endian.
        num_exact: Leading tokens whose KV is there already.
        blocks: Ids of all blocks, those of the exact tokens too.
        chunks: In the order of their positions.
        ratio: Of the chunks' tokens, computed anew.
    """

    transfer_id: int
    token_ids: bytes
    num_exact: int
    blocks: list[int]
    chunks: list[ChunkPlace]
    ratio: float


class BlendOrders(msgspec.Struct, frozen=True, array_like=True):
    """What is to be done with a step.

    Attributes:
        version: Of the message.
        keeps: To copy out, before anything writes to a block.
        fills: To begin.
        cancels: Transfer ids to give up and release.
    """

    version: int = _VERSION
    keeps: list[SaveChunkOrder] = []
    fills: list[AssembleOrder] = []
    cancels: list[int] = []


def encode_orders(orders: BlendOrders) -> bytes:
    """Return a message; empty if there is nothing to do. Pure."""
    if not (orders.keeps or orders.fills or orders.cancels):
        return b""
    return msgspec.msgpack.encode(orders)


def decode_orders(message: bytes) -> BlendOrders:
    """Return what a message says. Pure.

    Raises:
        TransferError: It is no message, or of another version.
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
