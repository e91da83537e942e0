"""What a codec does wrong is the codec's fault, in words, and costs a transfer; never the store's, and never more."""

from __future__ import annotations

from typing import Any

import pytest

from trencadis.errors import ContractError, TransferError
from trencadis.records import TransferCause
from trencadis_kv.interfaces import KVCodec
from trencadis_kv.store.client import StoreClient
from trencadis_kv.store.guarded_codec import GuardedCodec

LABEL = 'kv_codec component "mine" of my-package 1.2 (plugin "mine")'


class Codec(KVCodec):
    """Does what it is given."""

    flags = 128
    max_growth_bytes = 2

    def __init__(self, does: Any) -> None:
        self.does = does

    def encode(self, payload: memoryview, header: bytes) -> Any:
        return self._do(payload)

    def decode(self, data: memoryview, header: bytes, out: memoryview) -> None:
        self._do(data)

    def _do(self, data: memoryview) -> Any:
        if isinstance(self.does, BaseException):
            raise self.does
        return self.does(data) if callable(self.does) else self.does


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (ValueError("broken"), "raised ValueError: broken in encode()"),
        (SystemExit(3), "raised SystemExit: 3 in encode()"),
        (None, "raised TypeError: "),
        ("text", "raised TypeError: "),
        (b"12345678", "raised ContractError: 8 bytes of 4, and max_growth_bytes = 2"),
    ],
)
def test_a_codec_that_cannot_encode_is_named(does: Any, says: str) -> None:
    codec = GuardedCodec(Codec(does), LABEL)
    with pytest.raises(TransferError) as caught:
        codec.encode(memoryview(b"data"), b"")
    assert str(caught.value).startswith(f"{LABEL} {says}")
    assert "choose another in kv_codec.name" in str(caught.value)
    assert caught.value.cause == TransferCause.RAISED


def test_a_codec_that_cannot_decode_is_named_and_its_own_errors_pass() -> None:
    out = memoryview(bytearray(4))
    with pytest.raises(TransferError, match=r"raised KeyError: 1 in decode\(\)"):
        GuardedCodec(Codec(KeyError(1)), LABEL).decode(memoryview(b"data"), b"", out)
    with pytest.raises(TransferError, match=r"^not mine$"):
        GuardedCodec(Codec(TransferError("not mine", cause="corrupt")), LABEL).decode(memoryview(b"data"), b"", out)


def test_what_it_returns_is_kept() -> None:
    codec = GuardedCodec(Codec(lambda data: bytes(data) + b"!!"), LABEL)
    assert bytes(codec.encode(memoryview(b"data"), b"")) == b"data!!"
    assert (codec.flags, codec.max_growth_bytes) == (128, 2)


@pytest.mark.parametrize(("name", "number"), [("flags", -1), ("flags", 1 << 16), ("max_growth_bytes", None)])
def test_numbers_that_are_none_are_refused_at_the_start(name: str, number: Any) -> None:
    codec = Codec(None)
    setattr(codec, name, number)
    with pytest.raises(ContractError, match=f"of my-package 1.2 .* has {name} = {number}"):
        GuardedCodec(codec, LABEL)


def test_a_store_is_not_blamed_for_its_codec() -> None:
    client = StoreClient(lambda: object(), name="redis")  # type: ignore[arg-type, return-value] # any store
    codec = GuardedCodec(Codec(ValueError("broken")), LABEL)
    with pytest.raises(TransferError, match=r"^kv_codec component .mine. of my-package 1.2"):
        client.call(lambda _: codec.encode(memoryview(b"data"), b""))
