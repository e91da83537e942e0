"""Format of a KV block outside an engine: a header that identifies and authenticates it, and the payload.

One object is one block of one rank, or one layer of it: 128 bytes of header, then the payload, which a codec may have changed. Little endian::

    0  magic "KVB1"          14  u16 group              28  u64 payload bytes
    4  u16 version           16  u16 first layer        36  compatibility id [16]
    6  u16 header bytes      18  u16 number of layers   52  block hash [32]
    8  u32 flags             20  u32 first token        84  xxh3_128(header[0:84] + payload) [16]
    12 u8 dtype, u8 layout   24  u32 number of tokens   100 zeros [28]

The checksum detects damage, not forgery; a codec that authenticates detects both.

A save starts a header, passes it to the codec, and seals it over the encoded payload; a load verifies the object, and
passes the codec the header as it was started::

    start_header ─▶ encode(payload, draft) ─▶ seal_header(draft, encoded) ─▶ store
    store ─▶ verify(header, encoded) ─▶ decode(encoded, unsealed(header), out) ─▶ device
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import xxhash

from trencadis.errors import TransferError
from trencadis.records import KVLayout, TransferCause
from trencadis_kv.store.identity import VERSION

__all__ = [
    "CODEC_FLAGS",
    "HEADER_BYTES",
    "ROTATED",
    "Header",
    "for_block",
    "for_layer",
    "pack_header",
    "parse_header",
    "seal_header",
    "start_header",
    "unsealed",
    "verify",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

HEADER_BYTES: Final = 128
"""Size of the header in front of every payload, in every store and on every stream."""

CODEC_FLAGS: Final = 0xFFFF
"""Bits of ``Header.flags`` that belong to the codec."""

ROTATED: Final = 1 << 16
"""Bit of ``Header.flags``: keys have their rotary embedding applied."""

_MAGIC: Final = b"KVB1"
_FIELDS: Final = struct.Struct("<4sHHIBBHHHIIQ16s32s16s28x")
_SIGNED: Final = 84
"""Leading header bytes that the checksum covers."""
_ZEROS: Final = bytes(HEADER_BYTES - _SIGNED - 16)
_DTYPES: Final = {"float32": 1, "bfloat16": 2, "float16": 3, "float8_e4m3fn": 4, "float8_e5m2": 5}
_OTHER: Final = 255
_KEYS_THEN_VALUES: Final = 1


class Header(NamedTuple):
    """Parsed header; a tuple, since one is made for every verified block.

    Attributes:
        version: Version of the format.
        flags: Flags of the codec in the bits ``CODEC_FLAGS``, and ``ROTATED``.
        dtype: 1 float32, 2 bfloat16, 3 float16, 4 float8_e4m3fn, 5 float8_e5m2, 255 another or several.
        layout: 1: keys of all layers, then values of all layers.
        group: Group of layers that share a block table; 0 if all do.
        first_layer: Index of the first layer in the model, from 0.
        num_layers: Number of layers whose KV this is.
        first_token: Position of the block's first token in its sequence; 0 if the writer did not know it.
        num_tokens: Number of tokens in the block.
        payload_bytes: Bytes stored after the header.
        compat: Compatibility id, 16 bytes; see :func:`~trencadis_kv.store.identity.compat_id`.
        block_hash: Hash of the block and all blocks before it, 32 bytes.
        checksum: xxh3_128 of the first 84 bytes of the header and the payload, 16 bytes, high byte first.
    """

    version: int
    flags: int
    dtype: int
    layout: int
    group: int
    first_layer: int
    num_layers: int
    first_token: int
    num_tokens: int
    payload_bytes: int
    compat: bytes
    block_hash: bytes
    checksum: bytes


def start_header(
    layout: KVLayout, *, compat: bytes, block_hash: bytes, codec_flags: int = 0, first_token: int = 0
) -> bytes:
    """Return a header of 128 bytes with length and checksum of the payload still 0. Pure.

    Args:
        layout: KV layout of the block.
        compat: Compatibility id, 16 bytes; see :func:`~trencadis_kv.store.identity.compat_id`.
        block_hash: Hash of the block and all blocks before it, 32 bytes.
        codec_flags: Flags of the codec, 16 bits.
        first_token: Position of the block's first token in its sequence; 0 if unknown.

    Raises:
        ValueError: A field has the wrong size.
    """
    if len(compat) != 16 or len(block_hash) != 32 or not 0 <= codec_flags <= CODEC_FLAGS:
        raise ValueError(
            f"compat of {len(compat)} bytes, block hash of {len(block_hash)}, codec flags {codec_flags:#x}: "
            "16, 32 and at most 16 bits are needed."
        )
    layers = [part.layer for part in layout.parts]
    dtypes = {part.dtype for part in layout.parts}
    return _FIELDS.pack(
        _MAGIC,
        VERSION,
        HEADER_BYTES,
        codec_flags | (ROTATED if layout.rotated else 0),
        _DTYPES.get(dtypes.pop(), _OTHER) if len(dtypes) == 1 else _OTHER,
        _KEYS_THEN_VALUES,
        0,
        min(layers, default=0),
        len(set(layers)),
        first_token,
        layout.block_size,
        0,
        compat,
        block_hash,
        bytes(16),
    )


def for_block(draft: bytes, block_hash: bytes) -> bytes:
    """Return a started header for another block of the same layout. Pure."""
    return draft[:52] + block_hash + draft[_SIGNED:]


def for_layer(draft: bytes, layer: int) -> bytes:
    """Return a started header for one layer of the same block. Pure."""
    return draft[:16] + struct.pack("<HH", layer, 1) + draft[20:]


def seal_header(draft: bytes, payload: Buffer | Sequence[Buffer]) -> bytes:
    """Return a started header with length and checksum of its payload, 128 bytes. Pure.

    Args:
        draft: Header from :func:`start_header`.
        payload: Payload to be stored after it, in one piece or several.
    """
    pieces = payload if isinstance(payload, (list, tuple)) else (payload,)
    num_bytes = sum([memoryview(piece).nbytes for piece in pieces])
    signed = draft[:28] + struct.pack("<Q", num_bytes) + draft[36:_SIGNED]
    return signed + _checksum(signed, pieces) + draft[_SIGNED + 16 :]


def pack_header(
    layout: KVLayout, *, compat: bytes, block_hash: bytes, payload: Buffer, codec_flags: int = 0, first_token: int = 0
) -> bytes:
    """Return the complete header of a payload, 128 bytes; see :func:`start_header`. Pure."""
    draft = start_header(layout, compat=compat, block_hash=block_hash, codec_flags=codec_flags, first_token=first_token)
    return seal_header(draft, payload)


def unsealed(header: bytes) -> bytes:
    """Return a header without length and checksum, as the codec got it when encoding. Pure."""
    return header[:28] + bytes(8) + header[36:_SIGNED] + bytes(HEADER_BYTES - _SIGNED)


def parse_header(header: Buffer) -> Header:
    """Return the parsed header; the payload is not checked. Pure.

    Raises:
        TransferError: The bytes are no header (``corrupt``), or one of another version (``incompatible``).
    """
    data = bytes(header)
    if len(data) < HEADER_BYTES or data[:4] != _MAGIC:
        raise _corrupt(f"no header: {len(data)} bytes that begin with {data[:4]!r}")
    data = data[:HEADER_BYTES]
    _, version, header_bytes, *fields = _FIELDS.unpack(data)
    if version != VERSION:
        raise TransferError(
            f"The KV object is of format version {version}, this engine speaks {VERSION}.",
            cause=TransferCause.INCOMPATIBLE,
            hint="Give engines of different versions different namespaces.",
        )
    if header_bytes != HEADER_BYTES or data[_SIGNED + 16 :] != _ZEROS:
        raise _corrupt(f"a header of {header_bytes} bytes, or no zeros at its end")
    return Header(version, *fields)


def verify(
    header: Buffer,
    payload: Buffer,
    *,
    compat: bytes,
    block_hash: bytes,
    codec_flags: int | None = None,
    layer: int | None = None,
) -> Header:
    """Return the parsed header if the object is the requested one and intact. Pure.

    Args:
        header: The first 128 bytes.
        payload: All bytes after them, as they were stored.
        compat: Compatibility id of this engine, 16 bytes.
        block_hash: Hash of the requested block, 32 bytes.
        codec_flags: Flags of the codec that is to decode the payload; None: not checked.
        layer: Index of the only layer that it must hold; None: not checked.

    Raises:
        TransferError: ``incompatible``: another version, model, layout or codec wrote it. ``corrupt``: anything else,
            including another block's bytes under this block's key.
    """
    found = parse_header(header)
    if found.compat != compat:
        raise TransferError(
            f"The KV object is of compatibility id {found.compat.hex()}, this engine's is {compat.hex()}.",
            cause=TransferCause.INCOMPATIBLE,
            hint="Another model, dtype, block size or device wrote it.",
        )
    num_bytes = memoryview(payload).nbytes
    if found.payload_bytes != num_bytes:
        raise _corrupt(f"{num_bytes} bytes after a header that says {found.payload_bytes}")
    if found.block_hash != block_hash:
        raise _corrupt(f"block {found.block_hash.hex()} under the key of {block_hash.hex()}")
    if layer is not None and (found.first_layer, found.num_layers) != (layer, 1):
        raise _corrupt(f"{found.num_layers} layers from {found.first_layer} in the place of layer {layer}")
    if _checksum(bytes(header)[:_SIGNED], (payload,)) != found.checksum:
        raise _corrupt("the checksum differs")
    if codec_flags is not None and found.flags & CODEC_FLAGS != codec_flags:
        raise TransferError(
            f"The KV object was encoded with flags {found.flags & CODEC_FLAGS:#x}, this engine's codec has {codec_flags:#x}.",
            cause=TransferCause.INCOMPATIBLE,
            hint="Set the same kv_codec on every engine of a namespace.",
        )
    return found


def _checksum(signed: bytes, pieces: Sequence[Buffer]) -> bytes:
    digest = xxhash.xxh3_128(signed)
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def _corrupt(what: str) -> TransferError:
    return TransferError(f"The KV object is broken: {what}.", cause=TransferCause.CORRUPT)
