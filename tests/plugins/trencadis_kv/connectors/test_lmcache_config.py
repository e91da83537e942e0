from __future__ import annotations

import pytest

from trencadis_kv.connectors.lmcache.config import LMCacheConfig


@pytest.mark.parametrize("url", ["", "redis://cache:6379", "fs://localhost:0/var/lib/kv"])
def test_url_is_taken(url):
    assert LMCacheConfig(remote_url=url).remote_url == url


@pytest.mark.parametrize("url", ["redis", "redis://", "://host"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ValueError, match="remote_url must be a URL"):
        LMCacheConfig(remote_url=url)


def test_client_that_hangs_is_refused_with_what_to_use():
    with pytest.raises(ValueError, match="use redis://"):
        LMCacheConfig(remote_url="resp://cache:6379")
