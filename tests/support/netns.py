"""Hosts of their own on one machine: network namespaces behind a switch, whose cables can be pulled and made slow.

    host a ── eth0 ─ port a ┐
                            ├ switch (a bridge in a namespace of its own)
    host b ── eth0 ─ port b ┘

A pulled cable is what a dead host looks like from outside: no FIN, no RST, nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["Host", "hosts"]

_CLONE_NEWNET = 0x40000000
_COUNTER = itertools.count()


class Host:
    """One namespace with an address; made by :func:`hosts`.

    Attributes:
        address: IPv4, of its only card.
    """

    def __init__(self, network: str, number: int) -> None:
        self.address = f"10.99.0.{number + 1}"
        self._switch = f"{network}s"
        self._name = f"{network}h{number}"
        self._port = f"port{number}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Have this thread, and all threads and processes that it starts meanwhile, be on that host."""
        with Path(f"/proc/self/task/{threading.get_native_id()}/ns/net").open("rb") as before:
            _enter(Path("/run/netns", self._name))
            try:
                yield
            finally:
                _set_namespace(before.fileno())

    def unplug(self) -> None:
        """Pull its cable."""
        _run("ip", "-n", self._switch, "link", "set", self._port, "down")

    def plug_in(self) -> None:
        """Put it back; the switch forwards at once."""
        _run("ip", "-n", self._switch, "link", "set", self._port, "up")

    def slow_down(self, rate: str) -> None:
        """Let no more than a rate, such as ``8mbit``, reach it; may be called again.

        Source: tc-tbf(8); what would wait for longer than a second is dropped.
        """
        where = ("dev", self._port, "root")
        _run(
            "tc", "-n", self._switch, "qdisc", "replace", *where, "tbf", "rate", rate, "burst", "16kb", "latency", "1s"
        )

    def set_quick(self) -> None:
        """Let everything reach it again."""
        _run("tc", "-n", self._switch, "qdisc", "del", "dev", self._port, "root")

    def num_received(self) -> int:
        """Return the bytes that were sent to it so far."""
        shown = _run("ip", "netns", "exec", self._name, "cat", "/sys/class/net/eth0/statistics/rx_bytes")
        return int(shown)

    def _build(self) -> None:
        _run("ip", "netns", "add", self._name)
        _run("ip", "-n", self._name, "link", "set", "lo", "up")
        cable = ("type", "veth", "peer", "name", "eth0", "netns", self._name)
        _run("ip", "-n", self._switch, "link", "add", self._port, *cable)
        _run("ip", "-n", self._switch, "link", "set", self._port, "master", "switch", "up")
        _run("ip", "-n", self._name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _run("ip", "-n", self._name, "link", "set", "eth0", "up")

    def _remove(self) -> None:
        _run("ip", "netns", "del", self._name)


@contextlib.contextmanager
def hosts(number: int) -> Iterator[tuple[Host, ...]]:
    """Have some hosts that reach each other, for as long as the block runs; skips the test where that cannot be had."""
    network = f"tr{os.getpid()}n{next(_COUNTER)}"
    made = tuple(Host(network, i) for i in range(number))
    with contextlib.ExitStack() as stack:
        _skip_without_namespaces()
        _run("ip", "netns", "add", f"{network}s")
        stack.callback(_run, "ip", "netns", "del", f"{network}s")
        _run("ip", "-n", f"{network}s", "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", f"{network}s", "link", "set", "switch", "up")
        for host in made:
            host._build()
            stack.callback(host._remove)
        yield made


def _skip_without_namespaces() -> None:
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("ip and tc are not installed: apt-get install iproute2")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    name = f"tr{os.getpid()}probe"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no network namespaces can be made here: {tried.stderr.strip()}")
    _run("ip", "netns", "del", name)


def _enter(path: Path) -> None:
    with path.open("rb") as namespace:
        _set_namespace(namespace.fileno())


def _set_namespace(descriptor: int) -> None:
    """Move this thread. Source: setns(2); os.setns is there from Python 3.12 on."""
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout
