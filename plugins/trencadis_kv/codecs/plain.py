"""Codec ``none``: unchanged bytes."""

from __future__ import annotations

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.interfaces import KVCodec

__all__ = ["Plain"]


class Plain(KVCodec):
    """Returns payloads as they are in the KV cache; nothing is copied before it is stored."""

    flags = 0
    max_growth_bytes = 0

    def encode(self, payload: memoryview, header: bytes) -> memoryview:
        """Return the payload itself."""
        return payload

    def decode(self, data: memoryview, header: bytes, out: memoryview) -> None:
        """Copy ``data`` into ``out``."""
        if data.nbytes != out.nbytes:
            raise TransferError(
                f"A stored KV block has {data.nbytes} bytes, {out.nbytes} are expected.", cause=TransferCause.CORRUPT
            )
        out[:] = data
