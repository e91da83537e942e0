"""Contract of the noun ``kv_codec``: how a KV block's bytes are kept in a store, such as compressed or encrypted.

A codec sees bytes and no meaning; identity, checksum and deadlines are the caller's. It is lossless: what it cannot give back bit
for bit it refuses, and the block is computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from trencadis.errors import ContractError
from trencadis.interfaces.laws import Law, law

__all__ = ["INTERFACE_VERSION", "STABILITY", "KVCodec"]

INTERFACE_VERSION = 1
STABILITY = "provisional"


def _encoded(_: str, answer: Any, payload: memoryview, max_growth_bytes: int) -> memoryview:
    encoded = memoryview(answer)
    if encoded.nbytes > payload.nbytes + max_growth_bytes:
        raise ContractError(f"{encoded.nbytes} bytes of {payload.nbytes}, and max_growth_bytes = {max_growth_bytes}")
    return encoded


class KVCodec(ABC):
    """Turns payloads into stored bytes and back. Called from several threads at once, on one object; holds no state between calls.

    Attributes:
        flags: Written into every object's header, 0 .. 65535; an object with other flags is not decoded but counts as a miss. So
            whatever a reader must agree on is in them. 0: the payload is kept as it is. 1 .. 255 name a compression, and 256
            is added if encrypted; 1 is zstd. Codecs of third parties take 128 .. 255.
        max_growth_bytes: ``encode`` returns at most so many bytes more than it was given, whatever their content.
    """

    flags: int
    max_growth_bytes: int

    @abstractmethod
    @law(
        Law("at most ``max_growth_bytes`` more bytes than ``payload``", _encoded, ("payload", "self.max_growth_bytes"))
    )
    def encode(self, payload: memoryview, header: bytes) -> bytes | memoryview:
        """Return what is to be stored. Does not change the payload; may return it.

        Args:
            payload: Bytes of one block, contiguous, 0 .. 2³⁰.
            header: Identity of the object: the same bytes are handed to :meth:`decode`. An encrypting codec authenticates them.

        Returns:
            Contiguous bytes, at most ``len(payload) + max_growth_bytes``; they stay as they are when ``encode`` is called again.
        """

    @abstractmethod
    def decode(self, data: memoryview, header: bytes, out: memoryview) -> None:
        """Fill ``out`` with the payload that was encoded, and touch nothing else. The content of ``out`` after an error is undefined.

        Args:
            data: Stored bytes, or anything else: they came from outside, and may be cut, changed or made up.
            header: See :meth:`encode`.
            out: Writable contiguous bytes, as many as the payload has.

        Raises:
            TransferError: With the cause ``corrupt``: this is not what ``encode`` made of ``len(out)`` bytes with this header, as
                far as the codec can tell. One that neither checks nor encrypts can tell the length alone.
        """
