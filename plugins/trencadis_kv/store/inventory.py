"""Inventory of a directory of objects, with the broken ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import attrs

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.store.description import LAYOUT, Description
from trencadis_kv.store.format import HEADER_BYTES, verify
from trencadis_kv.store.object_directory import ObjectDirectory, StoredObject

__all__ = ["BlockKey", "Finding", "NamespaceSummary", "check_object", "examine", "take_stock"]

_BLOCK: Final = re.compile(r"kv1/(?P<namespace>[^/]+)/(?P<compat>[0-9a-f]{32})/(?P<shard>[^/]+)/(?P<hash>[0-9a-f]{64})")
_DESCRIPTION: Final = re.compile(rf"kv1/(?P<namespace>[^/]+)/(?P<compat>[0-9a-f]{{32}})/{LAYOUT}")


@attrs.frozen(kw_only=True)
class BlockKey:
    """Parts of a block's key.

    Attributes:
        namespace: Namespace of the block.
        compat: Compatibility id, 16 bytes.
        shard: Group, pipeline stage and range of heads.
        block_hash: Hash of the block, 32 bytes.
    """

    namespace: str
    compat: bytes
    shard: str
    block_hash: bytes

    @classmethod
    def parse(cls, key: str) -> BlockKey | None:
        """Return the parts of a key, or None if it is not a block's. Pure."""
        match = _BLOCK.fullmatch(key)
        if match is None:
            return None
        compat, block_hash = bytes.fromhex(match["compat"]), bytes.fromhex(match["hash"])
        return cls(namespace=match["namespace"], compat=compat, shard=match["shard"], block_hash=block_hash)

    @property
    def prefix(self) -> str:
        """Prefix of the keys of its namespace summary."""
        return f"kv1/{self.namespace}/{self.compat.hex()}/{self.shard}/"


@attrs.define(kw_only=True)
class NamespaceSummary:
    """The blocks of one rank of one model in one namespace.

    Attributes:
        namespace: Namespace of the blocks.
        compat: Compatibility id, 32 hexadecimal digits.
        shard: Group, pipeline stage and range of heads.
        model: Short description of the model; empty if no description is stored.
        num_objects: Number of blocks.
        num_bytes: Bytes of the blocks, with headers.
        used_ns: Latest use, nanoseconds since 1970.
    """

    namespace: str
    compat: str
    shard: str
    model: str = ""
    num_objects: int = 0
    num_bytes: int = 0
    used_ns: int = 0


@attrs.frozen(kw_only=True)
class Finding:
    """Result of checking one object.

    Attributes:
        key: Key of the object.
        num_bytes: Bytes of header and payload.
        cause: Cause why the object cannot be used; empty if nothing is wrong, ``evicted`` if it vanished.
        message: Description of the cause; empty if nothing is wrong.
    """

    key: str
    num_bytes: int
    cause: str = ""
    message: str = ""


def take_stock(directory: ObjectDirectory) -> list[NamespaceSummary]:
    """Return the summaries of a directory, by key prefix; reads descriptions, no blocks.

    Raises:
        TransferError: ``unreachable``.
    """
    summaries: dict[str, NamespaceSummary] = {}
    models: dict[tuple[str, str], str] = {}
    for found in directory.objects():
        key = BlockKey.parse(found.key)
        if key is None:
            models |= _model_of(directory, found.key)
            continue
        summary = summaries.setdefault(
            key.prefix, NamespaceSummary(namespace=key.namespace, compat=key.compat.hex(), shard=key.shard)
        )
        summary.num_objects += 1
        summary.num_bytes += found.num_bytes
        summary.used_ns = max(summary.used_ns, found.used_ns)
    for summary in summaries.values():
        summary.model = models.get((summary.namespace, summary.compat), "")
    return [summaries[prefix] for prefix in sorted(summaries)]


def examine(directory: ObjectDirectory) -> Iterator[Finding]:
    """Read and check every object; yields the results in no order.

    Raises:
        TransferError: ``unreachable``.
    """
    for found in directory.objects():
        yield _finding(directory, found)


def check_object(key: str, data: bytes) -> None:
    """Check that an object is intact and matches its key. Pure.

    Raises:
        TransferError: ``corrupt``, or ``incompatible`` for one of another format version.
    """
    block, description = BlockKey.parse(key), _DESCRIPTION.fullmatch(key)
    if block is not None:
        view = memoryview(data)
        verify(view[:HEADER_BYTES], view[HEADER_BYTES:], compat=block.compat, block_hash=block.block_hash)
    elif description is not None:
        Description.from_json(data, compat=bytes.fromhex(description["compat"]))
    else:
        raise TransferError(f"No KV object has such a key: {key}.", cause=TransferCause.CORRUPT)


def _finding(directory: ObjectDirectory, found: StoredObject) -> Finding:
    data = directory.read(found.key)
    if data is None:
        return Finding(key=found.key, num_bytes=0, cause=TransferCause.EVICTED, message="It vanished.")
    try:
        check_object(found.key, data)
    except TransferError as error:
        return Finding(key=found.key, num_bytes=len(data), cause=error.cause, message=str(error))
    return Finding(key=found.key, num_bytes=len(data))


def _model_of(directory: ObjectDirectory, key: str) -> dict[tuple[str, str], str]:
    """Return the model in a description, by namespace and compatibility id; empty for other objects."""
    match = _DESCRIPTION.fullmatch(key)
    data = directory.read(key) if match is not None else None
    if match is None or data is None:
        return {}
    try:
        description = Description.from_json(data, compat=bytes.fromhex(match["compat"]))
    except TransferError:
        return {}
    return {(match["namespace"], match["compat"]): description.model}
