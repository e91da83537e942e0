from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from trencadis.errors import ConfigError, TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.lmcache.config import LMCacheConfig
from trencadis_kv.connectors.lmcache.library import LMCacheClient, LMCacheLibrary, check_package

MODULE = "trencadis_kv.connectors.lmcache.library"


def test_missing_package_is_named_with_where_the_commands_are(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs the package lmcache") as caught:
        check_package()
    assert "docs/do/kv-connectors.md" in caught.value.hint


def test_library_that_does_not_start_is_unreachable_and_is_tried_again(monkeypatch):
    number = []

    class Broken:
        def __init__(self, config):
            number.append(config)
            raise ModuleNotFoundError("No module named 'aiofile'")

    monkeypatch.setattr(f"{MODULE}.LMCacheLibrary", Broken)
    client = LMCacheClient(LMCacheConfig())
    for _ in range(2):
        with pytest.raises(
            TransferError, match="does not start: ModuleNotFoundError: No module named 'aiofile'"
        ) as caught:
            client.library()
        assert caught.value.cause == TransferCause.UNREACHABLE
    assert len(number) == 2


def test_library_lives_from_the_first_store_to_the_last(monkeypatch):
    ends = []

    class Library:
        def __init__(self, config):
            pass

        def close(self):
            ends.append(self)

    monkeypatch.setattr(f"{MODULE}.LMCacheLibrary", Library)
    client = LMCacheClient(LMCacheConfig())
    client.open()
    client.open()
    library = client.library()
    client.close()
    assert client.library() is library
    assert ends == []
    client.close()
    assert ends == [library]


@pytest.mark.parametrize(("can_remove", "asked"), [(True, ["local", "remote"]), (False, ["local"])])
def test_nothing_is_removed_from_a_store_that_cannot_remove(can_remove, asked):
    class Connector:
        def remove_sync(self, key):
            raise NotImplementedError

    class Removing(Connector):
        def remove_sync(self, key):
            return True

    class Measured(Removing):
        def __init__(self):
            self._connector = Removing() if can_remove else Connector()

    class Manager:
        def __init__(self):
            self.storage_backends = {"local": object(), "remote": SimpleNamespace(connection=Measured())}

        def remove(self, key, locations):
            removed.append((key, locations))

    removed = []
    library = LMCacheLibrary.__new__(LMCacheLibrary)
    library._manager, library._connector_base, library._key = Manager(), Connector, str
    library.remove("a")
    assert removed == [("a", asked)]
