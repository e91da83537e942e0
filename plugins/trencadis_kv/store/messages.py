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
        transfer_id: To report it by.
        blocks: Ids, in order.
        hashes: Of their content; as many.
        wait_s: It is given up after so many seconds.
    """

    transfer_id: int
    blocks: list[int]
    hashes: list[bytes]
    wait_s: float = 0.0


class SaveOrder(msgspec.Struct, frozen=True, array_like=True):
    """Save blocks under these hashes; the blocks may be overwritten once the step begins.

    Attributes:
        blocks: Ids, in order.
        hashes: Of their content; as many.
    """

    blocks: list[int]
    hashes: list[bytes]


class StepOrders(msgspec.Struct, frozen=True, array_like=True):
    """Loads and saves of one step.

    Attributes:
        version: Of the message.
        loads: To start.
        saves: To copy out, before a load or the step writes to a block.
        cancels: Transfer ids to give up and release.
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
        TransferError: It is no message, or of another version.
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
