"""Rank processes for tests of collectives: each makes the calls that are sent to it, and hands tensors back.

A server that has imported torch forks them, so that one costs milliseconds.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from support.devices import DEVICE
from trencadis.errors import CollectiveError
from trencadis.interfaces import Collective
from trencadis_plugins.executor.collectives.groups import create_group, open_group
from trencadis_plugins.executor.collectives.owner import GroupAddress
from trencadis_plugins.executor.collectives.segment import Layout, Segment

__all__ = ["RankProcess", "RemoteRank", "open_ranks", "rank_processes"]

_ENDS_S = 30.0
_PRELOADED = [
    "trencadis_plugins.executor.collectives.shared_memory",
    "trencadis_plugins.executor.collectives.torch_distributed",
    "support.rank_processes",
]


@contextlib.contextmanager
def rank_processes() -> Iterator[Callable[[int], list[RankProcess]]]:
    """Yield a function that starts processes; all of them, and the server, have ended afterwards."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    started: list[RankProcess] = []

    def start(number: int) -> list[RankProcess]:
        made = [RankProcess(context) for _ in range(number)]
        started.extend(made)
        return made

    try:
        yield start
    finally:
        for process in started:
            process.end()
        multiprocessing.forkserver._forkserver._stop()


class RankProcess:
    """One process, from the outside."""

    def __init__(self, context: Any) -> None:
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._is_gone = self._is_ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def number(self) -> int:
        return self._process.pid

    def start(self, verb: str, *arguments: Any) -> Future[Any]:
        """Let the process do something; the future has what it returned or raised, or ConnectionError if it ended."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = future
            if self._is_gone:
                future.set_exception(ConnectionError("the rank process has ended"))
                return future
            with contextlib.suppress(OSError):  # the reader notices
                self._pipe.send((number, verb, arguments))
        return future

    def call(self, verb: str, *arguments: Any) -> Any:
        return self.start(verb, *arguments).result(_ENDS_S * 2)

    def signal(self, number: int) -> None:
        os.kill(self.number, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.join(_ENDS_S)

    def end(self) -> None:
        """Kill the process; may be called twice."""
        if self._is_ended:
            return
        self._is_ended = True
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
        self._process.join(_ENDS_S)
        self._reader.join(_ENDS_S)
        self._pipe.close()
        self._process.close()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, is_right, found = self._pipe.recv()
                future = self._waiting.pop(number)
                if is_right:
                    future.set_result(found)
                else:
                    future.set_exception(found)
        with self._lock:
            self._is_gone = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionError("the rank process has ended"))


class RemoteRank(Collective):
    """A rank in another process; may be used as a suite uses it."""

    def __init__(self, process: RankProcess, address: GroupAddress, key: str = "group") -> None:
        self.rank, self.size = address.rank, address.size
        self.process = process
        self._key = key

    def all_reduce(self, tensor):
        self._in_place("all_reduce", tensor)

    def all_gather(self, tensor):
        return _unpacked(self.process.call("call", self._key, "all_gather", _packed(tensor), {}))

    def broadcast(self, tensor, *, source=0):
        self._in_place("broadcast", tensor, source=source)

    def send(self, tensor, *, target):
        self._in_place("send", tensor, target=target)

    def receive(self, tensor, *, source):
        self._in_place("receive", tensor, source=source)

    def barrier(self):
        self.process.call("call", self._key, "barrier", None, {})

    def abort(self):
        self.process.call("abort", self._key)

    def close(self):
        self.process.call("close", self._key)

    def _in_place(self, name, tensor, **more):
        tensor.copy_(_unpacked(self.process.call("call", self._key, name, _packed(tensor), more)))


def open_ranks(
    processes: Sequence[RankProcess], addresses: Sequence[GroupAddress], key: str = "group"
) -> list[RemoteRank]:
    """Let processes open a group, all at once."""
    for opening in [process.start("open", key, address) for process, address in zip(processes, addresses, strict=True)]:
        opening.result(_ENDS_S * 2)
    return [RemoteRank(process, address, key) for process, address in zip(processes, addresses, strict=True)]


def _serve(pipe: Connection) -> None:
    """Do what comes through a pipe, one after the other on a thread; aborts at once."""
    torch.set_num_threads(1)
    groups: dict[str, Any] = {}
    lock = threading.Lock()
    caller = ThreadPoolExecutor(1)

    def run(number: int, verb: str, arguments: tuple[Any, ...]) -> None:
        try:
            found = True, _VERBS[verb](groups, *arguments)
        except Exception as error:
            found = False, error if isinstance(error, CollectiveError) else RuntimeError(repr(error))
        with lock, contextlib.suppress(OSError):
            pipe.send((number, *found))

    while True:
        try:
            number, verb, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        if verb == "abort":
            run(number, verb, arguments)
        else:
            caller.submit(run, number, verb, arguments)


def _open(groups: dict[str, Any], key: str, address: GroupAddress) -> None:
    groups[key] = open_group(address)
    groups[key, "device"] = "cpu" if address.kind == "shared_memory" else DEVICE


def _call(groups: dict[str, Any], key: str, name: str, packed: Any, more: dict[str, int]) -> Any:
    call = getattr(groups[key], name)
    if packed is None:
        return call()
    tensor = _unpacked(packed).to(groups[key, "device"])
    found = call(tensor, **more)
    return _packed(tensor if found is None else found)


def _sum_for_ever(groups: dict[str, Any], key: str, length: int) -> None:
    """Sum until that raises, and check each sum."""
    group, number = groups[key], 0
    while True:
        tensor = torch.full((length,), float(number + group.rank))
        group.all_reduce(tensor)
        right = group.size * number + sum(range(group.size))
        if not bool((tensor == right).all()):
            raise AssertionError(f"sum {number} of rank {group.rank} is wrong")
        number = (number + 1) % 1000


_VERBS: dict[str, Callable[..., Any]] = {
    "timeout": lambda groups, key: (
        groups[key]._group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    ),
    "open": _open,
    "call": _call,
    "sum": _sum_for_ever,
    "abort": lambda groups, key: groups[key].abort(),
    "close": lambda groups, key: groups[key].close(),
    "segment": lambda groups, name, folder: groups.update(
        segment=Segment.create(name, Layout.of(2), directory=Path(folder))
    ),
    "own": lambda groups, size: groups.setdefault("owner", create_group("shared_memory", size=size)).address(0),
}


def _packed(tensor: torch.Tensor) -> tuple[bytes, str, tuple[int, ...], bool]:
    flat = tensor.cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes(), str(tensor.dtype), tuple(tensor.shape), tensor.is_contiguous()


def _unpacked(packed: tuple[bytes, str, tuple[int, ...], bool]) -> torch.Tensor:
    content, dtype, shape, is_contiguous = packed
    flat = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(getattr(torch, dtype.removeprefix("torch."))).view(shape)
    return tensor if is_contiguous or tensor.dim() < 2 else tensor.mT.contiguous().mT
