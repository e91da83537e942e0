"""AES-GCM codec: encrypts and authenticates KV blocks.

0   nonce [12], random
12  ciphertext
-16 tag
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from trencadis.errors import ConfigValueError, TransferError
from trencadis.records import TransferCause
from trencadis_kv.interfaces import KVCodec

__all__ = ["ENCRYPTED", "AesGcm"]

ENCRYPTED = 256
"""Flag bit added to the flags of the inner codec."""

_NONCE_BYTES = 12
_TAG_BYTES = 16
_PERSON = b"trencadis kv aes"


class AesGcm(KVCodec):
    """Encrypts the output of another codec, and authenticates it together with the object's header.

    Decoding fails if the object was changed, stored under another block's key, or made with another model or encryption
    key. Each object has its own encryption key, derived from its header, so the limit of 2³² random nonces per key,
    which a large store may reach, applies to each block alone.

    Source: NIST SP 800-38D §8.2.2 and §8.3 (random nonces); keyed BLAKE2b for derivation as in libsodium's ``crypto_kdf``.

    Args:
        key: 16 or 32 bytes.
        inner: Codec applied before encryption and after decryption.

    Raises:
        ConfigValueError: The package ``cryptography`` is not installed.
    """

    def __init__(self, key: bytes, *, inner: KVCodec) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        except ImportError as error:
            raise ConfigValueError(
                'kv_codec.name = "aes_gcm" needs the package cryptography, which is not installed.',
                hint='Run pip install "trencadis[crypto]".',
            ) from error
        self._cipher: Any = AESGCM
        self._invalid = InvalidTag
        self._key = key
        self._inner = inner
        self.flags = inner.flags | ENCRYPTED
        self.max_growth_bytes = inner.max_growth_bytes + _NONCE_BYTES + _TAG_BYTES

    def encode(self, payload: memoryview, header: bytes) -> bytes:
        """Return nonce, ciphertext and tag."""
        plain = self._inner.encode(payload, header)
        nonce = os.urandom(_NONCE_BYTES)
        sealed: bytes = self._cipher(self._object_key(header)).encrypt(nonce, plain, header)
        return nonce + sealed

    def decode(self, data: memoryview, header: bytes, out: memoryview) -> None:
        """Decrypt; ``out`` is written only after the tag is verified."""
        if data.nbytes < _NONCE_BYTES + _TAG_BYTES:
            raise _corrupt(f"it has {data.nbytes} bytes")
        try:
            plain = self._cipher(self._object_key(header)).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], header)
        except self._invalid:
            raise _corrupt("it was changed, or encrypted with another key") from None
        self._inner.decode(memoryview(plain), header, out)

    def _object_key(self, header: bytes) -> bytes:
        return hashlib.blake2b(header, key=self._key, person=_PERSON, digest_size=len(self._key)).digest()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(inner={self._inner!r})"


def _corrupt(what: str) -> TransferError:
    return TransferError(
        f"An encrypted KV block cannot be read: {what}.",
        cause=TransferCause.CORRUPT,
        hint="Give every engine of a namespace the same key; after a change of keys, a new namespace.",
    )
