from __future__ import annotations

import pytest

from trencadis_kv.connectors.mooncake.config import MooncakeConfig


@pytest.mark.parametrize("master", ["localhost:1", "10.0.0.7:65535", "[::1]:50051", "cache-1.internal:50051"])
def test_address_is_taken(master):
    assert MooncakeConfig(master=master).master == master


@pytest.mark.parametrize("master", ["", "localhost", "localhost:", ":50051", "h:0", "h:65536", "h:1:2", "a b:1"])
def test_what_is_no_address_is_refused(master):
    with pytest.raises(ValueError, match="master must be host:port"):
        MooncakeConfig(master=master)


def test_protocol_is_one_of_two():
    with pytest.raises(ValueError, match="protocol"):
        MooncakeConfig(protocol="udp")
