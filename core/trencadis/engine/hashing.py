"""The identity of a KV block: a keyed hash chained over everything before it.

``h_i = BLAKE2b-256(h_{i-1} + tokens_i)`` with tokens as little-endian 32-bit numbers; the root hashes the deployment's key, the
model's identity and the request's salt, so that blocks are shared only within one salt and nobody without the key
can tell from a prompt what is cached. Never Python's ``hash``: it differs between processes.
"""

from __future__ import annotations

import hashlib

from trencadis.records import Int32Array

__all__ = ["BlockHasher"]


class BlockHasher:
    """Computes block hashes for one engine. Pure once made.

    Args:
        key: The deployment's secret; empty for none.
        compatibility: Everything that changes the bytes of a block or their meaning: model, dtype, block size.
        block_size: Tokens per block.
    """

    def __init__(self, *, key: str, compatibility: str, block_size: int) -> None:
        self._key = hashlib.blake2b(key.encode(), digest_size=32).digest()
        self._compatibility = compatibility.encode()
        self._block_size = block_size
        self._roots: dict[str, bytes] = {}

    def root(self, salt: str) -> bytes:
        """Return the hash before the first block, 32 bytes."""
        if salt not in self._roots:
            if len(self._roots) > 4096:  # salts may be as many as requests
                self._roots.clear()
            data = self._compatibility + b"\0" + salt.encode()
            self._roots[salt] = hashlib.blake2b(data, key=self._key, person=b"kv1-root", digest_size=32).digest()
        return self._roots[salt]

    def extend(self, hashes: list[bytes], tokens: Int32Array, *, num_blocks: int, salt: str) -> None:
        """Append to ``hashes`` until it has ``num_blocks`` entries.

        Args:
            hashes: Chain so far, head first; changed in place.
            tokens: The sequence's tokens, at least ``num_blocks × block_size``.
            num_blocks: Full blocks wanted.
            salt: The request's cache salt.
        """
        size = self._block_size
        previous = hashes[-1] if hashes else self.root(salt)
        start = len(hashes)
        data = tokens[start * size : num_blocks * size].astype("<i4").tobytes()
        width = 4 * size
        for i in range(num_blocks - start):
            previous = hashlib.blake2b(previous + data[i * width : (i + 1) * width], digest_size=32).digest()
            hashes.append(previous)
