"""Every table of the configuration refuses values that mean nothing, and names the setting."""

from __future__ import annotations

import pytest

from trencadis_kv.codecs.config import ZstdConfig
from trencadis_kv.connectors.blend.config import BlendConfig
from trencadis_kv.connectors.filesystem.config import FilesystemConfig
from trencadis_kv.connectors.nixl.config import NixlConfig
from trencadis_kv.connectors.p2p.config import P2PConfig
from trencadis_kv.connectors.redis.config import RedisConfig
from trencadis_kv.connectors.tiered.config import TieredConfig
from trencadis_kv.policies.config import CostAwareConfig
from trencadis_kv.store.settings import StoreSettings

PEERS = "10.0.0.0/33:7400,not a network/8:7400,10.0.0.0/8,10.0.0.1,[::1],localhost:0,localhost:**,fd00::5,fd00::/8:7400,:7400"
IMPOSSIBLE = {
    StoreSettings: {
        "namespace": ["../up", ""],
        "numerics": ["some"],
        "lookup_timeout_s": [0.0],
        "load_timeout_s": [-1.0],
        "num_load_threads": [0],
        "num_save_threads": [65],
        "staging_bytes": [0],
        "failure_limit": [0],
        "cooldown_s": [0.0],
    },
    P2PConfig: {
        "port": [-1, 65536],
        "peers": [(peer,) for peer in PEERS.split(",")],
        "prefill_engines": [("::1:7400",)],
        "lease_s": [0.0],
        "numerics": ["near"],
        "num_pull_threads": [0],
        "max_connections": [0],
    },
    TieredConfig: {
        "children": [(), ("a", "b", "a"), (1,)],
        "lookup_timeout_s": [0.0],
        "release_timeout_s": [0.0],
        "failure_limit": [0],
        "failure_window_s": [0.0],
        "cooldown_s": [0.0],
    },
    BlendConfig: {
        "ratio": [1.5, -0.1],
        "saves": ["some"],
        "min_chunk_tokens": [10**6],
        "capacity_bytes": [0],
        "min_found_ratio": [2],
        "num_first_tokens": [-1],
        "step_budget_s": [0],
    },
    FilesystemConfig: {
        "max_bytes": [-1],
        "low_water_ratio": [1.1, -0.1],
        "min_free_ratio": [1.0],
        "namespace": [".."],
    },
    RedisConfig: {"ttl_s": [-1], "connect_timeout_s": [0.0], "io_timeout_s": [0.0, 61.0]},
    NixlConfig: {"protocol": ["udp"], "num_pieces": [2], "piece_bytes": [0]},
    ZstdConfig: {"level": [23, -8], "item_bytes": [3, 16]},
    CostAwareConfig: {name: [0.0, -0.1, 1.1] for name in ("max_load_fraction", "max_staged_fraction")},
}


@pytest.mark.parametrize("table", IMPOSSIBLE)
@pytest.mark.representatives(9)
def test_impossible_values_are_refused_by_name(table):
    for name, values in IMPOSSIBLE[table].items():
        for value in values:
            with pytest.raises((ValueError, TypeError), match=name):
                table(**{name: value})
