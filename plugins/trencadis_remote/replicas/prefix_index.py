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
        self._num_expected: list[dict[bytes, int]] = [{} for _ in range(num_replicas)]
        self._bits = [1 << replica for replica in range(num_replicas)]  # most blocks have one replica: it is kept once

    def __len__(self) -> int:
        return len(self._cached) + sum(map(len, self._num_expected))

    def update(self, replica: int, *, added: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Note what a replica's prefix cache has gained and lost."""
        bit, cached = self._bits[replica], self._cached
        for one in added:
            others = cached.get(one)
            cached[one] = others | bit if others else bit
        for one in removed:
            _clear(cached, one, bit)

    def expect(self, replica: int, hashes: Iterable[bytes]) -> None:
        """Note a request that is on its way to a replica, whose blocks will be in its cache."""
        bit, counts, expected = self._bits[replica], self._num_expected[replica], self._expected
        for one in hashes:
            if one in counts:
                counts[one] += 1
                continue
            counts[one] = 1
            others = expected.get(one)
            expected[one] = others | bit if others else bit

    def forget(self, replica: int, hashes: Iterable[bytes]) -> None:
        """Note the end of a request: what its replica keeps of it, it has said."""
        bit, counts, expected = self._bits[replica], self._num_expected[replica], self._expected
        for one in hashes:
            count = counts.get(one, 0)
            if count > 1:
                counts[one] = count - 1
            elif count:
                del counts[one]
                others = expected[one] ^ bit
                if others:
                    expected[one] = others
                else:
                    del expected[one]

    def drop(self, replica: int) -> None:
        """Forget what a replica had, which has ended; its requests are forgotten one by one. O(blocks)."""
        bit = self._bits[replica]
        for one in [one for one, bits in self._cached.items() if bits & bit]:
            _clear(self._cached, one, bit)

    def hits(self, hashes: Sequence[bytes], out: Int32Array) -> None:
        """Write how many leading blocks each replica has.

        Args:
            hashes: Hashes of a prompt's blocks, head first.
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
