from __future__ import annotations

import socket
import sys
import time

import pytest

from trencadis.errors import ConfigError, TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.mooncake.client import MooncakeClient, check_package
from trencadis_kv.connectors.mooncake.config import MooncakeConfig


def test_missing_package_is_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    with pytest.raises(ConfigError, match="needs the package mooncake") as caught:
        check_package()
    assert "trencadis[mooncake]" in caught.value.hint


def test_missing_system_library_is_named_with_how_to_get_it(monkeypatch):
    def fail(_):
        raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(ConfigError, match=r"libibverbs\.so\.1") as caught:
        check_package()
    assert "apt-get install libibverbs1 librdmacm1" in caught.value.hint


def test_master_that_is_not_there_is_found_out_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    client = MooncakeClient(MooncakeConfig(master=f"127.0.0.1:{port}"))
    start_s = time.monotonic()
    with pytest.raises(TransferError, match=f"127.0.0.1:{port}.*refused") as caught:
        client.library()
    assert caught.value.cause == TransferCause.UNREACHABLE
    assert "mooncake_master" in caught.value.hint
    assert time.monotonic() - start_s < 60.0


def test_something_that_listens_and_never_answers_costs_the_start_time_only():
    pytest.importorskip("mooncake.store", reason="mooncake is not installed", exc_type=ImportError)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = MooncakeClient(
            MooncakeConfig(master=f"127.0.0.1:{silent.getsockname()[1]}", start_timeout_s=1.0, pool_bytes=0)
        )
        start_s = time.monotonic()
        with pytest.raises(TransferError) as caught:
            client.library()
    assert caught.value.cause == TransferCause.UNREACHABLE
    assert time.monotonic() - start_s < 60.0, "set-up waits for ten minutes, with Python's lock"


def test_client_lives_from_the_first_store_to_the_last(shared_master):
    client = MooncakeClient(MooncakeConfig(master=shared_master.address, pool_bytes=0, start_timeout_s=30.0))
    client.open()
    client.open()
    library = client.library()
    client.close()
    assert client.library() is library
    assert library.is_exist("kv1/nobody") == 0
    client.close()
    client.open()
    assert client.library() is not library, "it was not closed"
    client.close()
