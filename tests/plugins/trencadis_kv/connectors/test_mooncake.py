from __future__ import annotations

import subprocess
import sys
import uuid

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis_kv.connectors.mooncake.config import MooncakeConfig
from trencadis_kv.connectors.mooncake.connector import make_mooncake
from trencadis_testing.connector_harness import ConnectorHarness, hashes_of
from trencadis_testing.fake_pool import FakeKVCache


def harness(config):
    pair = make_mooncake(config, ComponentContext(clock=SimulatedClock(), seed=0))
    return ConnectorHarness(
        pair,
        block_size=4,
        cache=lambda arrays: FakeKVCache(arrays, block_size=4),
        settle=lambda: pair.worker.wait_idle(0.05),
        patience_s=20.0,
    )


def test_blocks_of_one_engine_are_loaded_by_another(shared_master):
    config = MooncakeConfig(
        master=shared_master.address,
        namespace=uuid.uuid4().hex,
        pool_bytes=64 << 20,
        start_timeout_s=30.0,
        lookup_timeout_s=10.0,
    )
    writer, reader, hashes = harness(config), harness(config), hashes_of(range(5))
    try:
        saved = writer.save([9, 2, 7, 4, 11], hashes)
        found = reader.lookup(hashes, num_blocks=5)
        assert found.num_tokens == 20
        assert reader.load(found.transfer_id, [3, 14, 0, 8, 6], hashes) == ""
        assert reader.contents([3, 14, 0, 8, 6]) == saved
    finally:
        for one in (reader, writer):
            one.pair.scheduler.close()
            one.pair.worker.close()


def test_making_a_connector_connects_nothing():
    code = (
        "import sys; from trencadis_kv.connectors.mooncake.config import MooncakeConfig;"
        "import trencadis_kv.connectors.mooncake.connector; print('mooncake.store' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
