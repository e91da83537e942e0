"""Guard of a KV codec: its exceptions and invalid results do not count as failures of the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from trencadis.errors import ContractError, TransferError
from trencadis.faults import as_words, reraise_interrupt, shown
from trencadis.interfaces import legal
from trencadis.records import TransferCause
from trencadis_kv.interfaces import KVCodec

__all__ = ["GuardedCodec"]

T = TypeVar("T")

_MAX_FLAGS = 0xFFFF


class GuardedCodec(KVCodec):
    """Calls a codec and converts its exceptions to ``TransferError``. As thread-safe as the codec itself.

    Args:
        codec: Codec to call.
        label: Name of the component and its distribution, for messages.

    Raises:
        ContractError: The codec's ``flags`` or ``max_growth_bytes`` is no whole number in its range.
    """

    def __init__(self, codec: KVCodec, label: str) -> None:
        self._codec = codec
        self._label = label
        self.flags = self._number("flags", codec.flags, _MAX_FLAGS)
        self.max_growth_bytes = self._number("max_growth_bytes", codec.max_growth_bytes, 1 << 30)

    def encode(self, payload: memoryview, header: bytes) -> memoryview:
        """Return the encoded payload."""
        return self._called(
            "encode",
            lambda: legal(KVCodec.encode, self._codec.encode(payload, header), payload, header, by=self._codec),
        )

    def decode(self, data: memoryview, header: bytes, out: memoryview) -> None:
        """Decode a payload into ``out``."""
        self._called("decode", lambda: self._codec.decode(data, header, out))

    def _called(self, method: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except TransferError:
            raise
        except BaseException as error:
            reraise_interrupt(error)
            raise TransferError(
                f"{self._label} raised {as_words(error)} in {method}().",
                cause=TransferCause.RAISED,
                hint="Mend it, or choose another in kv_codec.name.",
            ) from error

    def _number(self, name: str, number: object, most: int) -> int:
        if type(number) is int and 0 <= number <= most:
            return number
        raise ContractError(
            f"{self._label} has {name} = {shown(number)}, which must be a whole number from 0 to {most}.",
            hint="Mend it, or choose another in kv_codec.name.",
        )
