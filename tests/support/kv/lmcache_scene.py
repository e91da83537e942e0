"""Two connectors over LMCache, where it is installed, in a process of their own: LMCache leaves threads and event loops behind.

python tests/support/kv/lmcache_scene.py REMOTE_URL NAMESPACE    prints "same" if the second loads what the first saved
"""

from __future__ import annotations

import sys

__all__: list[str] = []


def _main(url: str, namespace: str) -> None:
    from trencadis.clock import SimulatedClock
    from trencadis.interfaces import ComponentContext
    from trencadis_kv.connectors.lmcache.config import LMCacheConfig
    from trencadis_kv.connectors.lmcache.connector import make_lmcache
    from trencadis_testing.connector_harness import ConnectorHarness, hashes_of
    from trencadis_testing.fake_pool import FakeKVCache

    def harness() -> ConnectorHarness:
        config = LMCacheConfig(remote_url=url, namespace=namespace, local_bytes=64 << 20, lookup_timeout_s=10.0)
        pair = make_lmcache(config, ComponentContext(clock=SimulatedClock(), seed=0))
        return ConnectorHarness(
            pair,
            block_size=4,
            cache=lambda arrays: FakeKVCache(arrays, block_size=4),
            settle=lambda: pair.worker.wait_idle(0.05),  # type: ignore[attr-defined]
            patience_s=60.0,
        )

    writer, reader, hashes = harness(), harness(), hashes_of(range(5))
    saved = writer.save([9, 2, 7, 4, 11], hashes)
    found = reader.lookup(hashes, num_blocks=5)
    cause = reader.load(found.transfer_id, [3, 14, 0, 8, 6], hashes) if found.num_tokens else "nothing was found"
    same = not cause and reader.contents([3, 14, 0, 8, 6]) == saved
    for one in (reader, writer):
        one.pair.scheduler.close()
        one.pair.worker.close()
    sys.stdout.write("same\n" if same else f"not the same: {cause}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
