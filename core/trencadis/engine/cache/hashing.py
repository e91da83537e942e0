"""The identity of a KV block: a keyed hash chained over everything before it.

``h_i = BLAKE2b-256(h_{i-1} + tokens_i)`` with tokens as little-endian 32-bit numbers; the root hashes the deployment's key, the
model's identity and the request's salt, so that blocks are shared only within one salt, and nobody without the key can tell from a
prompt what is cached. Never Python's ``hash``: it differs between processes.

A prefix that the operator lists as shared begins with a root without a salt; where it ends, the chain goes on under the salt:

    unsalted root ─ block 0 ─ block 1 ─┐ end of the listed prefix
                              salt ────┴─▶ block 2 ─ block 3 ...

Long prompts often begin as earlier ones do, such as those of an agent's session. So the hashes of segments of :data:`SEGMENT_BLOCKS`
blocks are remembered, with their tokens, by the hash of the block before them: a segment that comes again is compared, not hashed.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from trencadis.config.schema import Config
from trencadis.records import Int32Array, ModelFacts

__all__ = ["MAX_SEGMENTS", "SEGMENT_BLOCKS", "BlockHasher", "compatibility_of"]

SEGMENT_BLOCKS = 64
MAX_SEGMENTS = 8_192
"""Segments that a process remembers: some 500,000 blocks, at about 170 bytes each where a block has 16 tokens, so 90 MB; allocated as they come."""

# Of all hashers of the process, such as those of simulated engines and the router in front of them: the hash before a segment
# depends on key, model and salt, so a segment found here has the same hashes whichever hasher computed it. The least recently used is first.
_segments: OrderedDict[bytes, tuple[bytes, list[bytes]]] = OrderedDict()
_segments_lock = threading.Lock()


class BlockHasher:
    """Computes block hashes for one engine. Pure once made.

    Args:
        key: The deployment's secret; empty for none.
        compatibility: Everything that changes the bytes of a block or their meaning: model, dtype, block size.
        block_size: Tokens per block.
        shared_prefixes: Token ids of prefixes whose blocks requests of every salt share; blocks that lie fully inside one count.

    Attributes:
        compatibility: The argument.
        block_size: The argument.
    """

    def __init__(
        self, *, key: str, compatibility: str, block_size: int, shared_prefixes: Sequence[Sequence[int]] = ()
    ) -> None:
        self.compatibility = compatibility
        self.block_size = block_size
        self._key = hashlib.blake2b(key.encode(), digest_size=32).digest()
        self._compatibility = compatibility.encode()
        self._block_size = block_size
        self._shared = [np.array(prefix, "<i4") for prefix in shared_prefixes if len(prefix) >= block_size]
        self._most_shared = max((len(prefix) // block_size for prefix in self._shared), default=0)
        self._roots: dict[str, bytes] = {}

    def root(self, salt: str) -> bytes:
        """Return the hash before the first block, 32 bytes."""
        known = self._roots.get(salt)
        if known is None:
            if len(self._roots) > 4096:  # salts may be as many as requests
                self._roots.clear()
            data = self._compatibility + b"\0" + salt.encode()
            known = self._hash(data, b"kv1-root")
            self._roots[salt] = known
        return known

    def shared_root(self) -> bytes:
        """Return the hash before the first block of a prefix that is shared by every salt, 32 bytes. Pure."""
        return self._hash(self.root(""), b"kv1-shared")

    def num_shared(self, tokens: Int32Array) -> int:
        """Return how many leading blocks of tokens lie fully inside a listed prefix. Pure."""
        size, most = self._block_size, 0
        for prefix in self._shared:
            length = min(len(prefix), len(tokens)) // size * size
            differs = np.flatnonzero(prefix[:length] != tokens[:length])
            most = max(most, (int(differs[0]) if differs.size else length) // size)
        return most

    def extend(self, hashes: list[bytes], tokens: Int32Array, *, num_blocks: int, salt: str) -> None:
        """Append to ``hashes`` until it has ``num_blocks`` entries.

        Args:
            hashes: Chain so far, head first; changed in place.
            tokens: The sequence's tokens, at least ``num_blocks × block_size``.
            num_blocks: Full blocks wanted.
            salt: The request's cache salt.
        """
        size, start = self._block_size, len(hashes)
        num_shared = 0
        if start <= self._most_shared and self._shared:
            num_shared = self.num_shared(tokens[: num_blocks * size])
        previous = hashes[-1] if hashes else self.shared_root() if num_shared else self.root(salt)
        data = tokens[start * size : num_blocks * size].astype("<i4").tobytes()
        width = 4 * size
        first = 0
        if num_blocks - start >= SEGMENT_BLOCKS and not num_shared:
            for first in range(SEGMENT_BLOCKS, num_blocks - start + 1, SEGMENT_BLOCKS):
                hashes += _segment(previous, data[(first - SEGMENT_BLOCKS) * width : first * width], width)
                previous = hashes[-1]
        for i in range(first, num_blocks - start):
            if num_shared and start + i == num_shared:
                previous = self._hash(previous + self.root(salt), b"kv1-salted")
            previous = hashlib.blake2b(previous + data[i * width : (i + 1) * width], digest_size=32).digest()
            hashes.append(previous)

    def _hash(self, data: bytes, person: bytes) -> bytes:
        return hashlib.blake2b(data, key=self._key, person=person, digest_size=32).digest()


def _segment(previous: bytes, data: bytes, width: int) -> list[bytes]:
    """Return the hashes of a segment's blocks, computed or remembered.

    Args:
        previous: The hash before it, 32 bytes.
        data: Tokens of the block.
        width: Bytes of a block.
    """
    key = previous
    with _segments_lock:
        known, found = _segments.pop(key, (b"", []))
    if known != data:  # after one block different segments may come: the newest is remembered
        found = []
        for at in range(0, len(data), width):
            previous = hashlib.blake2b(previous + data[at : at + width], digest_size=32).digest()
            found.append(previous)
    with _segments_lock:
        if len(_segments) >= MAX_SEGMENTS:
            _segments.popitem(last=False)
        _segments[key] = data, found
    return found


def compatibility_of(config: Config, model: ModelFacts, block_size: int) -> str:
    """Return everything that changes the bytes of a KV block or their meaning; where the files lie only if they have no fingerprint."""
    where = () if model.fingerprint else (config.model.path, config.model.revision)
    return "\0".join((*where, model.identity, str(block_size)))
