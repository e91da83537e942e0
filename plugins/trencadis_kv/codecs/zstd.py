"""Zstandard over shuffled bytes: bytes with sign and exponent of floats compress well, those of the mantissa do not.

0  u8 item bytes; 0: the payload follows uncompressed, because compression made it no smaller
1  one frame of Zstandard
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from trencadis.errors import ConfigValueError, TransferError
from trencadis.records import ModelFacts, TransferCause
from trencadis_kv.interfaces import KVCodec

if TYPE_CHECKING:
    import zstandard

__all__ = ["Zstd", "item_bytes_of"]

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_WIDTHS = frozenset({1, 2, 4, 8})
_STORED = 0


def item_bytes_of(model: ModelFacts | None) -> int:
    """Return the bytes of one element of a model's KV cache, by its dtype; 4 if unknown. Pure."""
    return 4 if model is None else _ITEM_BYTES.get(model.dtype, 4)


class Zstd(KVCodec):
    """Compresses payloads; one that does not get smaller is stored uncompressed, one byte longer.

    Decoding detects truncated data, data that do not decompress, and a wrong length; the object's checksum detects the
    rest. Decompressing takes no more memory than ``out``, whatever size the data claim.

    Source: byte shuffling before compression as in Blosc's and HDF5's filters of that name.

    Args:
        level: Compression level of Zstandard, -7 .. 22.
        item_bytes: Bytes of one element of the KV cache: 1, 2, 4 or 8. Stored with each payload, so a reader need not
            know it.

    Raises:
        ConfigValueError: The package ``zstandard`` is not installed.
    """

    flags = 1
    max_growth_bytes = 1

    def __init__(self, *, level: int = 1, item_bytes: int = 4) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise ConfigValueError(
                'kv_codec.name = "zstd" needs the package zstandard, which is not installed.',
                hint='Run pip install "trencadis[zstd]".',
            ) from error
        self._zstd: Any = zstandard
        self._level = level
        self._item_bytes = item_bytes
        self._own = threading.local()

    def encode(self, payload: memoryview, header: bytes) -> bytes:
        """Return the smaller one of the compressed and the uncompressed payload."""
        width = self._item_bytes if payload.nbytes % self._item_bytes == 0 else 1
        packed: bytes = self._compressor().compress(_shuffled(payload, width))
        if len(packed) >= payload.nbytes:
            return bytes([_STORED]) + payload
        return bytes([width]) + packed

    def decode(self, data: memoryview, header: bytes, out: memoryview) -> None:
        """Decompress and unshuffle."""
        width = data[0] if data.nbytes else -1
        if width == _STORED:
            if data.nbytes - 1 != out.nbytes:
                raise _corrupt(f"{data.nbytes - 1} bytes are kept as they are, {out.nbytes} are expected")
            out[:] = data[1:]
            return
        if width not in _WIDTHS or out.nbytes % width:
            raise _corrupt(f"elements of {width} bytes in a block of {out.nbytes}")
        _unshuffle(self._decompressed(data[1:], out.nbytes), width, out)

    def _decompressed(self, frame: memoryview, num_bytes: int) -> bytes:
        try:
            # Decompression allocates the size that the frame claims, so the claim is checked first.
            claimed = self._zstd.get_frame_parameters(frame[:32]).content_size
            if claimed != num_bytes:
                raise _corrupt(f"a frame of {claimed} bytes, {num_bytes} are expected")
            plain: bytes = self._decompressor().decompress(frame, allow_extra_data=False)
        except self._zstd.ZstdError as error:
            raise _corrupt(str(error)) from error
        if len(plain) != num_bytes:
            raise _corrupt(f"a frame of {len(plain)} bytes, {num_bytes} are expected")
        return plain

    def _compressor(self) -> zstandard.ZstdCompressor:
        """Return this thread's compressor, since compressors cannot be shared between threads."""
        if not hasattr(self._own, "compressor"):
            self._own.compressor = self._zstd.ZstdCompressor(level=self._level)
        compressor: zstandard.ZstdCompressor = self._own.compressor
        return compressor

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        if not hasattr(self._own, "decompressor"):
            self._own.decompressor = self._zstd.ZstdDecompressor()
        decompressor: zstandard.ZstdDecompressor = self._own.decompressor
        return decompressor


def _shuffled(payload: memoryview, width: int) -> memoryview | bytes:
    """Return the first bytes of all elements, then all second ones, and so on. Pure."""
    if width == 1:
        return payload
    return np.frombuffer(payload, np.uint8).reshape(-1, width).T.tobytes()


def _unshuffle(plain: bytes, width: int, out: memoryview) -> None:
    target = np.frombuffer(out, np.uint8)
    target.reshape(-1, width)[:] = np.frombuffer(plain, np.uint8).reshape(width, -1).T


def _corrupt(what: str) -> TransferError:
    return TransferError(f"A compressed KV block is broken: {what}.", cause=TransferCause.CORRUPT)
