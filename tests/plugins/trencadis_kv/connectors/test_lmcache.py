"""KV blocks through LMCache: the store, and the connector over it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest

from trencadis.errors import ConfigError, TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.lmcache.config import LMCacheConfig
from trencadis_kv.connectors.lmcache.connector import LMCacheStore
from trencadis_kv.connectors.lmcache.library import LMCacheClient, LMCacheLibrary, check_package

KEYS = [f"kv1/default/{i}" for i in range(4)]


class Library:
    """Keeps objects in a dictionary; what is kept appears after ``delay`` looks."""

    def __init__(self, *, room=100, delay=2, forgets=False):
        self.objects, self.room, self.delay, self.forgets = {}, room, delay, forgets
        self.stalls = threading.Event()
        self.stalls.set()

    def holds(self, key):
        self.stalls.wait()
        data, looks = self.objects.get(key, (None, 0))
        if looks:
            self.objects[key] = (data, looks - 1)
        return data is not None and not looks

    def read(self, key):
        data, looks = self.objects.get(key, (None, 0))
        return None if looks else data

    def write(self, key, data):
        if len(self.objects) >= self.room:
            return False
        if not self.forgets:
            self.objects[key] = (bytes(data), self.delay)
        return True

    def remove(self, key):
        self.objects.pop(key, None)

    def close(self):
        self.objects.clear()


@pytest.fixture
def make(monkeypatch):
    stores = []

    def one(library, **config):
        monkeypatch.setattr("trencadis_kv.connectors.lmcache.library.LMCacheLibrary", lambda _: library)
        given = LMCacheConfig(**{"io_timeout_s": 5.0, **config})
        stores.append(LMCacheStore(LMCacheClient(given), given))
        return stores[-1]

    yield one
    for store in stores:
        store.close()
        store.close()


def put(store, number=4):
    return store.put(KEYS[:number], [[memoryview(b"head"), memoryview(bytes([i]) * 9)] for i in range(number)])


def test_put_returns_when_the_objects_are_there_and_they_come_back(make):
    store = make(Library(delay=3))
    assert put(store) == 4
    assert store.contains([*KEYS, "kv1/nobody"]) == 4
    targets = [memoryview(bytearray(20)) for _ in KEYS]
    assert store.get(KEYS, targets) == [13] * 4
    assert [bytes(target[:13]) for target in targets] == [b"head" + bytes([i]) * 9 for i in range(4)]


def test_what_is_not_there_or_too_long_is_minus_one(make):
    store = make(Library())
    put(store, 2)
    targets = [memoryview(bytearray(size)) for size in (20, 5, 20)]
    assert store.get(KEYS[:3], targets) == [13, -1, -1]
    assert store.contains([KEYS[2], KEYS[0]]) == 0


def test_deleted_objects_are_gone(make):
    store = make(Library())
    put(store)
    store.delete(KEYS[1:2])
    assert store.contains(KEYS) == 1


def test_full_store_keeps_fewer(make):
    assert put(make(Library(room=3))) == 3


def test_store_that_takes_objects_and_has_them_not_is_found_out_at_once(make):
    store = make(Library(forgets=True), io_timeout_s=0.1)
    with pytest.raises(TransferError, match="took 4 objects, and 4 of them are not there") as caught:
        put(store)
    assert caught.value.cause == TransferCause.RAISED
    assert "aiofiles" in caught.value.hint


def test_call_that_hangs_costs_the_deadline_and_the_next_one_is_made(make):
    library = Library()
    store = make(library, io_timeout_s=0.1)
    put(store)
    library.stalls.clear()
    with pytest.raises(TransferError) as caught:
        store.contains(KEYS)
    assert caught.value.cause == TransferCause.DEADLINE
    library.stalls.set()
    assert store.contains(KEYS) == 4


def test_closed_store_raises(make):
    store = make(Library())
    store.close()
    with pytest.raises(TransferError, match="closed"):
        store.contains(KEYS)


SCENE = Path(__file__).parents[3] / "support/kv/lmcache_scene.py"


@pytest.mark.parametrize("place", ["fs", "redis"])
def test_blocks_of_one_engine_are_loaded_by_another(place, tmp_path, request):
    if importlib.util.find_spec("lmcache") is None:
        pytest.skip("lmcache is not installed: docs/do/kv-connectors.md has the commands")
    url = f"fs://localhost:0{tmp_path}" if place == "fs" else request.getfixturevalue("shared_redis").url
    words = [sys.executable, str(SCENE), url, uuid.uuid4().hex]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.splitlines()[-1:] == ["same"], done.stderr[-2000:]


def test_making_a_connector_imports_no_library():
    code = (
        "import sys; import trencadis_kv.connectors.lmcache.connector;"
        "print(any(name.partition('.')[0] == 'lmcache' for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


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
