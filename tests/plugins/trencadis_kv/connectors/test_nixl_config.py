from __future__ import annotations

import pytest

from trencadis_kv.connectors.nixl.config import NixlConfig
from trencadis_kv.connectors.p2p.config import P2PConfig


def test_table_has_the_settings_of_p2p_and_its_own():
    config = NixlConfig(host="10.0.0.7", lease_s=5.0, devices="eth0")
    assert isinstance(config, P2PConfig)
    assert (config.host, config.lease_s, config.devices) == ("10.0.0.7", 5.0, "eth0")


@pytest.mark.parametrize("changes", [{"protocol": "udp"}, {"num_pieces": 2}, {"piece_bytes": 0}])
def test_what_cannot_work_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        NixlConfig(**changes)
