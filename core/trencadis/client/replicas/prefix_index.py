"""Which replica has which blocks in its prefix cache: as the replicas say, and as live requests will make it.

A hash has a bit for each replica, so that a prompt is looked up in one pass, whatever the number of replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from trencadis.records import Int32Array

__all__ = ["PrefixIndex"]

_FEW_BITS = 4


class PrefixIndex:
    """Blocks by replica. Memory: an entry for each block that a prefix cache holds or a live prompt has.

    Args:
        num_replicas: Replicas 0 .. num_replicas - 1.
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._num_bytes = -(-num_replicas // 8)
        self._cached: dict[bytes, int] = {}
        self._expected: dict[bytes, int] = {}
        self._num_expected: dict[tuple[int, bytes], int] = {}

    def __len__(self) -> int:
        return len(self._cached) + len(self._num_expected)

    def update(self, replica: int, *, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Note what a replica's prefix cache has gained and lost."""
        bit, cached = 1 << replica, self._cached
        for one in added:
            cached[one] = cached.get(one, 0) | bit
        for one in removed:
            _clear(cached, one, bit)

    def expect(self, replica: int, hashes: Iterable[bytes]) -> None:
        """Note a request that is on its way to a replica, whose blocks will be in its cache."""
        bit, counts, expected = 1 << replica, self._num_expected, self._expected
        for one in hashes:
            key = (replica, one)
            counts[key] = count = counts.get(key, 0) + 1
            if count == 1:
                expected[one] = expected.get(one, 0) | bit

    def forget(self, replica: int, hashes: Iterable[bytes]) -> None:
        """Note the end of a request: what its replica keeps of it, it has said."""
        bit, counts = 1 << replica, self._num_expected
        for one in hashes:
            key = (replica, one)
            if counts.get(key, 0) > 1:
                counts[key] -= 1
            elif counts.pop(key, 0):
                _clear(self._expected, one, bit)

    def drop(self, replica: int) -> None:
        """Forget what a replica had, which has ended; its requests are forgotten one by one. O(blocks)."""
        bit = 1 << replica
        for one in [one for one, bits in self._cached.items() if bits & bit]:
            _clear(self._cached, one, bit)

    def hits(self, hashes: Sequence[bytes], out: Int32Array) -> None:
        """Write how many leading blocks each replica has.

        Args:
            hashes: Of a prompt's blocks, head first.
            out: int32 ``[num_replicas]``; overwritten.
        """
        out.fill(0)
        cached, expected = self._cached, self._expected
        depth, have = 0, -1
        for one in hashes:
            now = have & (cached.get(one, 0) | expected.get(one, 0))
            if now != have and depth:
                self._write(have & ~now, depth, out)
            if not now:
                return
            depth, have = depth + 1, now
        if depth:
            self._write(have, depth, out)

    def _write(self, bits: int, depth: int, out: Int32Array) -> None:
        if bits.bit_count() <= _FEW_BITS:
            while bits:
                out[(bits & -bits).bit_length() - 1] = depth
                bits &= bits - 1
            return
        data = np.frombuffer(bits.to_bytes(self._num_bytes, "little"), np.uint8)
        chosen = np.unpackbits(data, count=self._num_replicas, bitorder="little")
        out[chosen.view(np.bool_)] = depth


def _clear(masks: dict[bytes, int], one: bytes, bit: int) -> None:
    bits = masks.get(one, 0) & ~bit
    if bits:
        masks[one] = bits
    else:
        masks.pop(one, None)
