from __future__ import annotations

import socket

import pytest

from trencadis_kv.wire import socket_buffers
from trencadis_kv.wire.socket_buffers import BUFFER_BYTES, set_buffer

OPTIONS = {"receive": socket.SO_RCVBUF, "send": socket.SO_SNDBUF}


@pytest.fixture(autouse=True)
def asked_anew():
    socket_buffers._may_have.cache_clear()
    yield
    socket_buffers._may_have.cache_clear()


class Limited(socket.socket):
    """Gets no larger buffer than a kernel's default limit allows, doubled as Linux does."""

    limit = 212992

    def setsockopt(self, level, option, value):
        super().setsockopt(level, option, min(value, self.limit) if level == socket.SOL_SOCKET else value)


@pytest.mark.parametrize("way", OPTIONS)
def test_buffer_is_set_where_the_kernel_allows_it_and_else_left_to_the_kernel(way):
    with socket.socket() as one, socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, OPTIONS[way], BUFFER_BYTES)
        is_allowed = probe.getsockopt(socket.SOL_SOCKET, OPTIONS[way]) >= BUFFER_BYTES
        before = one.getsockopt(socket.SOL_SOCKET, OPTIONS[way])
        set_buffer(one, way)
        after = one.getsockopt(socket.SOL_SOCKET, OPTIONS[way])
    assert (after >= BUFFER_BYTES) if is_allowed else (after == before)


@pytest.mark.parametrize("way", OPTIONS)
def test_buffer_that_would_be_smaller_is_not_set_for_the_kernel_would_not_enlarge_it(way, monkeypatch):
    monkeypatch.setattr(socket, "socket", Limited)
    with Limited() as one:
        before = one.getsockopt(socket.SOL_SOCKET, OPTIONS[way])
        set_buffer(one, way)
        assert one.getsockopt(socket.SOL_SOCKET, OPTIONS[way]) == before


def test_closed_connection_is_left_alone():
    one = socket.socket()
    one.close()
    set_buffer(one, "receive")
