"""The connector over a store, as a whole."""

from __future__ import annotations

from support.kv.store_parts import make_pool
from trencadis.interfaces import ComponentContext
from trencadis_kv.store.settings import StoreSettings
from trencadis_kv.store.store_connector import store_connector
from trencadis_testing.kv_connector import KVConnectorConformance
from trencadis_testing.kv_faults import DictStore


class Suite(KVConnectorConformance):
    has_threads = True
    settings = StoreSettings(close_timeout_s=1.0)

    def make(self):
        self.objects = {}
        context = ComponentContext(clock=self.clock, seed=0)
        return store_connector(lambda: DictStore(self.objects), self.settings, context, name="shelf")


class TestSmallStagingAndManyThreads(Suite):
    settings = StoreSettings(staging_bytes=2000, num_load_threads=4, num_save_threads=3)


class TestDeviceWithAThreadOfItsOwn(Suite):
    settings = StoreSettings(max_load_bytes_per_step=200)

    def kv_cache(self, arrays):
        pool = super().kv_cache(arrays)
        pool.any_thread = False
        return pool


def test_pair_with_other_stores_shares_the_store_and_nothing_else():
    suite, seen = Suite(), []
    pair = suite.make()
    other = pair.with_stores(lambda store: seen.append(store) or store)
    assert other.worker is not pair.worker
    other.scheduler.on_ready(make_pool().layout)
    assert seen
    assert suite.objects
    other.scheduler.close()
