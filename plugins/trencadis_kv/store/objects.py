"""Conversion between a block's bytes and an object in a store: identity, codec and checksum."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.errors import TransferError
from trencadis.interfaces import KVCodec
from trencadis.records import KVLayout, TransferCause
from trencadis_kv.store.description import Description, description_key
from trencadis_kv.store.format import HEADER_BYTES, seal_header, start_header, unsealed, verify
from trencadis_kv.store.identity import key_prefix

__all__ = ["BlockObjects", "StoredBlocks"]


class BlockObjects:
    """Packs and unpacks blocks, or one shard of each. From any thread.

    Args:
        layout: Of the blocks.
        identity: Of the model.
        namespace: Whose objects these are.
        exact_numerics: See :func:`~trencadis_kv.store.identity.compat_id`.
        codec: What the payload goes through.

    Attributes:
        block_bytes: Of a block in the cache.
        max_bytes: Of an object at most.
        block_size: Tokens of a block.
        description: Key and content of the object that says what these blocks are, for people and tools.
    """

    def __init__(
        self, layout: KVLayout, *, identity: str, namespace: str, exact_numerics: bool, codec: KVCodec
    ) -> None:
        self._layout = layout
        self._codec = codec
        description = Description(layout=layout, identity=identity, exact_numerics=exact_numerics)
        self._compat = description.compat
        self._prefix = key_prefix(namespace, compat=self._compat, layout=layout)
        self.description = (description_key(namespace, self._compat), description.to_json())
        self.block_bytes = layout.block_bytes
        self.block_size = layout.block_size
        self.max_bytes = HEADER_BYTES + layout.block_bytes + codec.max_growth_bytes

    def keys(self, hashes: Sequence[bytes]) -> list[str]:
        """Return the keys of blocks. Pure."""
        return [self._prefix + block_hash.hex() for block_hash in hashes]

    def pack(self, block_hash: bytes, payload: memoryview) -> list[memoryview]:
        """Return the pieces of an object. Pure.

        Args:
            block_hash: Of the block.
            payload: Its bytes.
        """
        draft = start_header(self._layout, compat=self._compat, block_hash=block_hash, codec_flags=self._codec.flags)
        encoded = memoryview(self._codec.encode(payload.toreadonly(), draft))
        return [memoryview(seal_header(draft, encoded)), encoded]

    @property
    def is_plain(self) -> bool:
        """Whether payloads equal the blocks' bytes: the codec changes nothing."""
        return not self._codec.flags

    def payload(self, block_hash: bytes, data: memoryview) -> memoryview:
        """Return the payload of an object after verifying that it is the block's; a view. Pure.

        Args:
            block_hash: That was asked for.
            data: The object.

        Raises:
            TransferError: ``corrupt`` or ``incompatible``.
        """
        if len(data) < HEADER_BYTES:
            raise TransferError(
                f"The KV object is broken: {len(data)} bytes are no header.", cause=TransferCause.CORRUPT
            )
        payload = data[HEADER_BYTES:]
        verify(
            bytes(data[:HEADER_BYTES]),
            payload,
            compat=self._compat,
            block_hash=block_hash,
            codec_flags=self._codec.flags,
        )
        return payload

    def unpack(self, block_hash: bytes, data: memoryview, out: memoryview) -> None:
        """Decode an object into a block's bytes; otherwise as :meth:`payload`.

        Args:
            block_hash: That was asked for.
            data: The object.
            out: ``block_bytes`` bytes; undefined after an error.

        Raises:
            TransferError: ``corrupt`` or ``incompatible``.
        """
        payload = self.payload(block_hash, data)
        self._codec.decode(payload, unsealed(bytes(data[:HEADER_BYTES])), out)


class StoredBlocks:
    """The objects that blocks consist of, of all ranks. From any thread.

    Args:
        shards: Of each block; a block is there if the objects of all are.
        block_bytes: Of a block in the cache, on the rank that holds most of it.

    Attributes:
        shards: As above.
        block_bytes: As above.
        block_size: Tokens of a block.
    """

    def __init__(self, shards: Sequence[BlockObjects], *, block_bytes: int) -> None:
        self.shards = tuple(shards)
        self.block_bytes = block_bytes
        self.block_size = shards[0].block_size

    def keys(self, hashes: Sequence[bytes]) -> list[str]:
        """Return the keys of blocks: those of the first block, then those of the next. Pure."""
        by_shard = [shard.keys(hashes) for shard in self.shards]
        return [key for of_block in zip(*by_shard, strict=True) for key in of_block]
