"""Messages from the scheduler side of a connector to its worker side: one a step, as bytes."""

from __future__ import annotations

import msgspec

from trencadis.errors import TransferError
from trencadis.records import TransferCause

__all__ = ["MESSAGE_VERSION", "LoadOrder", "SaveOrder", "StepOrders", "decode_orders", "encode_orders"]

MESSAGE_VERSION = 1


class LoadOrder(msgspec.Struct, frozen=True, array_like=True):
    """Fill blocks with the objects of these hashes.

    Attributes:
        transfer_id: Id under which the result is reported.
        blocks: Ids of the blocks, in order.
        hashes: Hash of each block.
        wait_s: Seconds after which the load is given up.
    """

    transfer_id: int
    blocks: list[int]
    hashes: list[bytes]
    wait_s: float = 0.0


class SaveOrder(msgspec.Struct, frozen=True, array_like=True):
    """Save blocks under these hashes; the blocks may be overwritten once the step begins.

    Attributes:
        blocks: Ids of the blocks, in order.
        hashes: Hash of each block.
    """

    blocks: list[int]
    hashes: list[bytes]


class StepOrders(msgspec.Struct, frozen=True, array_like=True):
    """Loads and saves of one step.

    Attributes:
        version: Version of the message.
        loads: Loads to start.
        saves: Blocks to copy before a load or the step writes to them.
        cancels: Transfer ids of loads to cancel and release.
    """

    version: int = MESSAGE_VERSION
    loads: list[LoadOrder] = []
    saves: list[SaveOrder] = []
    cancels: list[int] = []


def encode_orders(orders: StepOrders) -> bytes:
    """Return a message. Pure."""
    return msgspec.msgpack.encode(orders)


def decode_orders(message: bytes) -> StepOrders:
    """Return the decoded message; no orders if it is empty. Pure.

    Raises:
        TransferError: The message cannot be decoded, or has another version.
    """
    if not message:
        return StepOrders()
    try:
        orders = msgspec.msgpack.decode(message, type=StepOrders)
    except msgspec.MsgspecError as error:
        raise TransferError(
            f"The KV connector's message cannot be read: {error}.", cause=TransferCause.CORRUPT
        ) from error
    if orders.version != MESSAGE_VERSION:
        raise TransferError(
            f"The KV connector's message is of version {orders.version}, this side speaks {MESSAGE_VERSION}.",
            cause=TransferCause.INCOMPATIBLE,
            hint="Run the same version of Trencadís in all processes of an engine.",
        )
    return orders
