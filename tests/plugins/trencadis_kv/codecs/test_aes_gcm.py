from __future__ import annotations

import sys

import pytest

from trencadis.errors import ConfigValueError, TransferError
from trencadis_kv.codecs.aes_gcm import AesGcm
from trencadis_kv.codecs.plain import Plain
from trencadis_kv.codecs.zstd import Zstd
from trencadis_kv.testing import KVCodecConformance

pytest.importorskip("cryptography")
KEY = bytes(range(32))
HEADER = bytes(range(128))


class TestAesGcm(KVCodecConformance):
    authenticates = True

    def make(self):
        return AesGcm(KEY, inner=Plain())

    def make_stranger(self):
        return AesGcm(bytes(32), inner=Plain())


class TestAesGcmAroundZstd(KVCodecConformance):
    authenticates = True

    def make(self):
        pytest.importorskip("zstandard")
        return AesGcm(KEY[:16], inner=Zstd())

    def make_stranger(self):
        return AesGcm(KEY[1:17], inner=Zstd())


def _encoded(payload, header=HEADER, key=KEY):
    return AesGcm(key, inner=Plain()).encode(memoryview(payload), header)


def test_same_payloads_are_never_encrypted_to_same_bytes():
    seen = {_encoded(bytes(64)) for _ in range(50)}
    assert len(seen) == 50
    assert len({data[:12] for data in seen}) == 50


def test_nothing_of_the_payload_is_visible():
    secret = b"a prompt that nobody else may read"
    assert secret not in _encoded(secret * 100)


def test_what_is_stored_is_aes_gcm_under_a_key_of_the_object():
    """Decrypted by the definition: derived key, nonce in front, header as associated data."""
    from hashlib import blake2b

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    data = _encoded(b"payload", key=KEY[:16])
    own = blake2b(HEADER, key=KEY[:16], person=b"trencadis kv aes", digest_size=16).digest()
    assert AESGCM(own).decrypt(data[:12], data[12:], HEADER) == b"payload"
    with pytest.raises(Exception):  # noqa: B017, PT011 - cryptography's InvalidTag has no message
        AESGCM(KEY[:16]).decrypt(data[:12], data[12:], HEADER)


def test_out_is_left_alone_by_what_is_not_authentic():
    data = bytearray(_encoded(b"payload"))
    data[20] ^= 1
    out = bytearray(b"before!")
    with pytest.raises(TransferError, match="changed, or encrypted with another key"):
        AesGcm(KEY, inner=Plain()).decode(memoryview(data), HEADER, memoryview(out))
    assert out == b"before!"


def test_the_key_is_in_no_text():
    codec = AesGcm(KEY, inner=Plain())
    with pytest.raises(TransferError) as error:
        codec.decode(memoryview(bytes(40)), HEADER, memoryview(bytearray(12)))
    for text in (repr(codec), str(codec), str(error.value), repr(error.value)):
        assert KEY.hex() not in text
        assert repr(KEY)[2:-1] not in text


def test_a_missing_package_is_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigValueError, match=r'pip install "trencadis\[crypto\]"'):
        AesGcm(KEY, inner=Plain())
