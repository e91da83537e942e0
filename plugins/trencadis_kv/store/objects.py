"""Conversion between a block's bytes and an object in a store: identity, codec and checksum."""

from __future__ import annotations

from collections.abc import Sequence

from trencadis.errors import TransferError
from trencadis.records import KVLayout, TransferCause
from trencadis_kv.interfaces import KVCodec
from trencadis_kv.store.description import Description, description_key
from trencadis_kv.store.format import HEADER_BYTES, seal_header, start_header, unsealed, verify
from trencadis_kv.store.identity import key_prefix

__all__ = ["BlockObjects", "StoredBlocks"]


class BlockObjects:
    """Packs and unpacks blocks, or one shard of each. From any thread.

    Args:
        layout: KV layout of the blocks, or of the shard.
        identity: Identity of the model.
        namespace: Namespace of the objects.
        exact_numerics: Whether other devices and kernels have other keys; see
            :func:`~trencadis_kv.store.identity.compat_id`.
        codec: KV codec of the payloads.

    Attributes:
        block_bytes: Bytes of a block in the cache.
        max_bytes: Maximum bytes of an object.
        block_size: Tokens per block.
        description: Key and content of the object that describes these blocks, for people and tools.
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
            block_hash: Hash of the block, 32 bytes.
            payload: Bytes of the block.
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
            block_hash: Hash of the requested block, 32 bytes.
            data: Bytes of the object.

        Raises:
            TransferError: The object is ``corrupt`` or ``incompatible``.
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
        """Verify an object as :meth:`payload` does, and decode it into a block's bytes.

        Args:
            block_hash: Hash of the requested block, 32 bytes.
            data: Bytes of the object.
            out: ``block_bytes`` bytes; undefined after an error.

        Raises:
            TransferError: The object is ``corrupt`` or ``incompatible``.
        """
        payload = self.payload(block_hash, data)
        self._codec.decode(payload, unsealed(bytes(data[:HEADER_BYTES])), out)


class StoredBlocks:
    """Objects of all ranks that make up blocks. From any thread.

    Args:
        shards: Shards of each block; a block exists if the objects of all shards do.
        block_bytes: Bytes of a block in the cache, on the rank that holds most of it.

    Attributes:
        shards: Shards of each block.
        block_bytes: Bytes of a block in the cache, on the rank that holds most of it.
        block_size: Tokens per block.
    """

    def __init__(self, shards: Sequence[BlockObjects], *, block_bytes: int) -> None:
        self.shards = tuple(shards)
        self.block_bytes = block_bytes
        self.block_size = shards[0].block_size

    def keys(self, hashes: Sequence[bytes]) -> list[str]:
        """Return the keys of blocks: those of the first block, then those of the next. Pure."""
        by_shard = [shard.keys(hashes) for shard in self.shards]
        return [key for of_block in zip(*by_shard, strict=True) for key in of_block]
