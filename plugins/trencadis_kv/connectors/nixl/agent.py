"""A NIXL agent: memory that other engines may write to, and writes to theirs.

A write cannot be cancelled: its bytes still arrive after its handle is released, and even after the other agent is
removed. It ends only with the agent that the bytes come from or go to. So an agent whose memory may still be written to
is replaced by another, with its own name and memory, and closed when it is unused.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trencadis.errors import ConfigError, TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.nixl.config import NixlConfig

__all__ = ["NixlAgent", "ProgressThread", "check_package"]

_NAP_S: Final = 1e-4


class ProgressThread:
    """Calls a function repeatedly while it has users; the thread starts with the first one.

    Args:
        progress: Function to call; must not raise.
    """

    def __init__(self, progress: Callable[[], None]) -> None:
        self._progress = progress
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._num_users = 0
        self._is_closed = False

    def begin(self) -> None:
        """Count a user."""
        with self._changed:
            self._num_users += 1
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="trencadis-nixl-pump", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def end(self) -> None:
        """Count a user less."""
        with self._changed:
            self._num_users -= 1

    def close(self) -> None:
        """Stop the thread and wait for it. May be called twice."""
        with self._changed:
            self._is_closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._num_users > 0 or self._is_closed)
                if self._is_closed:
                    return
            self._progress()
            time.sleep(_NAP_S)


logger = logging.getLogger("trencadis.kv.nixl")

_DONE: Final = "DONE"
_UNDER_WAY: Final = "PROC"
_GLANCE_S: Final = 0.05
_MAX_OTHERS: Final = 256
"""Most remote agents that stay registered: consumers come and go, each with a name of its own."""


def check_package() -> Any:
    """Import the package, and return its module.

    Raises:
        ConfigError: The package is missing.
    """
    for name in ("nixl_cu12", "nixl_cu13", "nixl"):
        try:
            library = importlib.import_module(f"{name}._api")
        except ImportError as error:
            missing = error
            continue
        log = logging.getLogger("nixl")  # it writes to the standard output, which belongs to the command
        log.handlers.clear()
        log.propagate = True
        log.setLevel(logging.WARNING)
        return library
    raise ConfigError(
        f"kv_connector.name = 'nixl' needs the package nixl, which cannot be imported: {missing}.",
        hint='Run pip install "trencadis[nixl]"; it moves host memory, and needs no CUDA device.',
    ) from missing


def tell_ucx(config: NixlConfig) -> None:
    """Set the environment variables of UCX that are not set."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # the standard output belongs to the command
    if config.protocol == "tcp":
        # With the RDMA modules a process may crash at exit: two copies of libnl are loaded.
        os.environ.setdefault("UCX_MODULES", "^ib")
    if config.transports:
        os.environ.setdefault("UCX_TLS", config.transports)
    if config.devices:
        os.environ.setdefault("UCX_NET_DEVICES", config.devices)


class NixlAgent:
    """Registered memory in pieces, and its NIXL agent. From any thread.

    Args:
        library: Module that :func:`check_package` returned.
        num_pieces: Number of pieces of memory.
        num_rows: Blocks per piece.
        block_bytes: Bytes per block.

    Attributes:
        name: Name of the agent, unique to this instance.
        metadata: Metadata by which other agents register this one.
        pump: Progress thread; must run while others write to this agent's memory.
        num_users: Number of users that hold pieces.
        num_lost: Number of pieces that may still be written to.
    """

    def __init__(self, library: Any, *, num_pieces: int, num_rows: int, block_bytes: int) -> None:
        self.name = f"trencadis-{uuid.uuid4().hex}"
        options = library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = library.nixl_agent(self.name, options)
        self._memory: NDArray[np.uint8] = np.empty((num_pieces, num_rows, block_bytes), np.uint8)
        self._agent.register_memory([(self._memory.ctypes.data, self._memory.nbytes, 0, "")], "DRAM")
        self.metadata: bytes = self._agent.get_agent_metadata()
        self._lock = threading.Lock()
        self._free = list(range(num_pieces))
        self._undone: list[tuple[Any, int]] = []
        self._others: dict[bytes, str] = {}
        self.pump = ProgressThread(self._progress)
        self.num_users = self.num_lost = 0

    @property
    def num_pieces(self) -> int:
        """Pieces of its memory."""
        return len(self._memory)

    def rows(self, piece: int) -> NDArray[np.uint8]:
        """Return a piece, ``[rows, block_bytes]``."""
        rows: NDArray[np.uint8] = self._memory[piece]
        return rows

    def address(self, piece: int) -> int:
        """Return the address of a piece."""
        return int(self._memory[piece].ctypes.data)

    def take(self, number: int) -> list[int]:
        """Return free pieces; none if there are too few."""
        with self._lock:
            self._collect()
            if number > len(self._free):
                return []
            taken, self._free = self._free[:number], self._free[number:]
            return taken

    def give_back(self, pieces: list[int]) -> None:
        """Free pieces that are neither read nor written."""
        with self._lock:
            self._free.extend(pieces)

    def write(
        self,
        piece: int,
        num_bytes: int,
        *,
        metadata: bytes,
        address: int,
        timeout_s: float,
        is_gone: Callable[[], bool],
    ) -> None:
        """Write the beginning of a piece to another agent's memory; returns when it is complete.

        Args:
            piece: Index of the piece. After an error the agent frees it once nothing reads it; the caller must not.
            num_bytes: Number of bytes to write, from the start of the piece.
            metadata: Metadata of the other agent.
            address: Target address in the other agent's memory.
            timeout_s: Longest wait, seconds.
            is_gone: Returns whether the other engine is gone.

        Raises:
            TransferError: ``deadline``, ``unreachable`` or ``cancelled``.
        """
        handle: Any = None
        try:
            with self._lock:
                other = self._other(metadata)
                agent = self._agent
                here = agent.get_xfer_descs([(self.address(piece), num_bytes, 0)], "DRAM")
                there = agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM")
                handle = agent.initialize_xfer("WRITE", here, there, other)
                state = agent.transfer(handle)
            self._wait(handle, state, timeout_s=timeout_s, is_gone=is_gone)
        except TransferError:
            with self._lock:
                self._undone.append((handle, piece))
            raise
        except Exception as error:  # exceptions of many classes of the library's own
            with self._lock:
                self._forget(metadata)
                self._release(handle)
                self._free.append(piece)
            raise TransferError(
                f"NIXL cannot write to the other engine: {error}.", cause=TransferCause.UNREACHABLE
            ) from error
        with self._lock:
            self._release(handle)

    def close(self) -> None:
        """Close the agent and free its memory; no piece may be in use."""
        self.pump.close()
        with self._lock:
            self._undone.clear()
            self._agent = None

    def _progress(self) -> None:
        try:
            with self._lock:
                self._agent.get_new_notifs()
        except Exception:
            logger.debug("NIXL could not go on.", exc_info=True)

    def _wait(self, handle: Any, state: str, *, timeout_s: float, is_gone: Callable[[], bool]) -> None:
        now_s = time.monotonic()
        until_s, glance_s = now_s + timeout_s, now_s + _GLANCE_S
        while state == _UNDER_WAY:
            time.sleep(_NAP_S)
            with self._lock:
                state = self._agent.check_xfer_state(handle)
            now_s = time.monotonic()
            if state == _UNDER_WAY and now_s > until_s:
                raise TransferError("A write through NIXL took too long.", cause=TransferCause.DEADLINE)
            if state == _UNDER_WAY and now_s > glance_s:
                glance_s = now_s + _GLANCE_S
                if is_gone():
                    raise TransferError("The other engine is gone.", cause=TransferCause.CANCELLED)
        if state != _DONE:
            raise RuntimeError(f"the transfer ended as {state}")

    def _other(self, metadata: bytes) -> str:
        """Return the name of a remote agent, which is registered once only: registering it again breaks running transfers."""
        if metadata not in self._others:
            if len(self._others) >= _MAX_OTHERS:
                self._forget(next(iter(self._others)))
            name = self._agent.add_remote_agent(metadata)
            self._others[metadata] = name.decode() if isinstance(name, bytes) else name
        return self._others[metadata]

    def _forget(self, metadata: bytes) -> None:
        name = self._others.pop(metadata, None)
        if name is None:
            return
        try:
            self._agent.remove_remote_agent(name)
        except Exception:
            logger.debug("Another agent could not be removed.", exc_info=True)

    def _release(self, handle: Any) -> None:
        if handle is None:
            return
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:
            logger.debug("A handle could not be released.", exc_info=True)

    def _collect(self) -> None:
        """Free the pieces of timed-out writes that have ended."""
        left = []
        for handle, piece in self._undone:
            try:
                is_over = self._agent.check_xfer_state(handle) != _UNDER_WAY
            except Exception:
                is_over = True
            if is_over:
                self._release(handle)
                self._free.append(piece)
            else:
                left.append((handle, piece))
        self._undone = left
