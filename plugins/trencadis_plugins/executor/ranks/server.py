"""The process of a rank: runs what an executor calls through a link, in order."""

from __future__ import annotations

import gc
import logging
import pickle
import queue
import threading
import time
from typing import Any

from trencadis.errors import BackendError, CollectiveError, ContractError, StepFailedError
from trencadis.faults import as_words
from trencadis.interfaces import (
    BackendCapabilities,
    PendingStep,
    RankGroups,
    SupportsRanks,
    SupportsSwapping,
)
from trencadis.link import Link
from trencadis.records import ConnectorReport, ModelFacts, ModelSource
from trencadis_plugins.executor.ranks.groups import RankAddresses
from trencadis_plugins.executor.ranks.host import RankHost, merged
from trencadis_plugins.executor.ranks.link import Kind, receive_messages, send_message
from trencadis_plugins.executor.ranks.rank import RemoteError, StartRank
from trencadis_plugins.executor.ranks.wire import decode_batch, encode_output

__all__ = ["RankServer"]

logger = logging.getLogger("trencadis.executor")


class RankServer:
    """Runs the calls of an executor in the order in which they come.

    A step is waited for where it was submitted if the backend says that it is done; else on a second thread, so that the next one is
    submitted meanwhile.

    Args:
        link: To the executor.
        beat_s: While there is something to answer, a sign of life is sent so often, seconds; 0: none.
    """

    def __init__(self, link: Link, *, beat_s: float = 0.0) -> None:
        self._link = link
        self._beat_s = beat_s
        self._num_open = 0
        self._sending = threading.Lock()
        self._host: RankHost | None = None
        self._groups: RankGroups | None = None
        self._steps: queue.SimpleQueue[tuple[int, PendingStep, ConnectorReport | None]] = queue.SimpleQueue()
        self._waiter: threading.Thread | None = None
        self._unreported: list[ConnectorReport] = []

    def run(self) -> None:
        """Answer until the executor closes the rank, or is gone.

        Raises:
            LinkClosedError: It is gone.
        """
        if self._beat_s:
            threading.Thread(target=self._beat, name="trencadis-beat", daemon=True).start()
        while True:
            for kind, number, payload in receive_messages(self._link):
                self._num_open += 1
                if kind is Kind.BATCH:
                    self._step(number, payload)
                elif not self._call(number, payload):
                    return
            self._link.wait()
            with self._sending:
                self._link.flush()

    # --------------------------------------------------------------------------------------------------- calls

    def _call(self, number: int, payload: memoryview) -> bool:
        """Run a method; False if it was the last one."""
        name = ""
        try:
            name, arguments = pickle.loads(payload)
            result = getattr(self, f"_{name}")(number, **arguments) if name in _OWN else self._of_rank(name, arguments)
            self._send(Kind.RESULT, number, pickle.dumps(result, protocol=5))
        except Exception as error:
            self._send(Kind.ERROR, number, _dumped(error))
        return name != "close"

    def _of_rank(self, name: str, arguments: dict[str, Any]) -> Any:
        host = self._started()
        return getattr(host if hasattr(host, name) else host.backend, name)(**arguments)

    def _make(self, number: int, *, start: StartRank) -> tuple[BackendCapabilities, bool]:
        """Make backend and sampler; returns the capabilities, and whether it swaps blocks."""
        backend = start.make_backend(start.rank)
        if not start.is_output:
            logging.getLogger("trencadis").setLevel(logging.WARNING)
        self._host = RankHost(backend, start.make_sampler(start.rank))
        return backend.capabilities, isinstance(backend, SupportsSwapping)

    def _load(self, number: int, *, source: ModelSource, addresses: RankAddresses | None) -> ModelFacts:
        """Take a place among the other ranks, and load the model."""
        host = self._started()
        if addresses is not None:
            if not isinstance(host.backend, SupportsRanks):
                raise ContractError(f"{type(host.backend).__name__} names collectives, and has no join().")
            self._groups = addresses.open()
            host.backend.join(self._groups)
        facts = host.load(source)
        gc.freeze()  # loaded objects live as long as the process
        return facts

    def _warm_up(self, number: int, *, buckets: Any) -> Any:
        def progress(done: int, total: int) -> None:
            self._send(Kind.PROGRESS, number, pickle.dumps((done, total)))

        return self._started().backend.warm_up(buckets, progress=progress)

    def _close(self, number: int) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.close()
        if self._groups is not None:
            self._groups.tensor.close()
            self._groups.world.close()

    def _started(self) -> RankHost:
        if self._host is None:
            raise BackendError("This rank has no model: it was not loaded, or is closed.")
        return self._host

    # --------------------------------------------------------------------------------------------------- steps

    def _step(self, number: int, payload: memoryview) -> None:
        try:
            pending, report = self._started().submit(decode_batch(payload))
        except Exception as error:
            self._failed(number, error)
            return
        if getattr(pending, "is_done", False) and self._waiter is None:
            self._finish(number, pending, report)
            return
        if self._waiter is None:
            self._waiter = threading.Thread(target=self._wait_for_steps, name="trencadis-outputs", daemon=True)
            self._waiter.start()
        self._steps.put((number, pending, report))

    def _wait_for_steps(self) -> None:
        while True:
            self._finish(*self._steps.get())

    def _finish(self, number: int, pending: PendingStep, report: ConnectorReport | None) -> None:
        if report is not None:
            self._unreported.append(report)
        try:
            output = pending.wait()
        except Exception as error:
            self._failed(number, error)
            return
        if report is not None:
            report = merged(self._unreported)
            self._unreported.clear()
        self._send(Kind.OUTPUT, number, encode_output(output, report))

    def _failed(self, number: int, error: Exception) -> None:
        if not isinstance(error, StepFailedError):
            backend = type(self._host.backend).__name__ if self._host is not None else "This rank"
            failed = StepFailedError(f"{backend}: {type(error).__name__}: {error}")
            failed.__cause__ = error
            error = failed
        self._send(Kind.ERROR, number, _dumped(error))

    def _beat(self) -> None:
        """Say every now and then that this process runs, whatever its other threads compute."""
        while True:
            time.sleep(self._beat_s)
            if self._num_open > 0:
                self._send(Kind.BEAT, 0, b"")

    def _send(self, kind: Kind, number: int, payload: bytes) -> None:
        if kind in _ANSWERS:
            self._num_open -= 1
        with self._sending:
            send_message(self._link, kind, number, payload)
            while self._link.has_unsent:
                self._link.wait()
                self._link.flush()


_ANSWERS = frozenset({Kind.RESULT, Kind.OUTPUT, Kind.ERROR})
_OWN = ("make", "load", "warm_up", "close")


def _dumped(error: Exception) -> bytes:
    """Return an error so that the other process can raise it, its cause as text, and whether it was one of waiting for other ranks."""
    logger.debug("A call of this rank raised.", exc_info=error)
    details = RemoteError.of(error.__cause__ or error), _is_of_group(error)
    try:
        data = pickle.dumps((error, *details), protocol=5)
        pickle.loads(data)  # some can be written, and not read
    except Exception:
        data = pickle.dumps((BackendError(as_words(error)), *details), protocol=5)
    return data


def _is_of_group(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, is that of a collective: the group of ranks is then of no use any more."""
    while error is not None:
        if isinstance(error, CollectiveError):
            return True
        error = error.__cause__
    return False
