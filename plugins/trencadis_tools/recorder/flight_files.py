"""The folder of flight records: a bounded number of files, each whole or not there. Nothing that goes wrong here harms an engine."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path

from trencadis.config.schema import FlightRecorderConfig
from trencadis.faults import FaultLog, as_words
from trencadis_tools.recorder.flight_record import FlightRecord, encode_flight_record

__all__ = ["SUFFIX", "FlightFiles", "default_folder"]

SUFFIX = ".flight"

logger = logging.getLogger("trencadis.engine")


def default_folder() -> Path:
    """Return ``$XDG_STATE_HOME/trencadis/flight-records``, by default below ``~/.local/state``.

    Source: XDG Base Directory Specification: a relative path in the variable counts as none.
    """
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".local" / "state") / "trencadis" / "flight-records"


class FlightFiles:
    """Writes records to one folder. May be called from several threads.

    Args:
        config: Where, and how many.
    """

    def __init__(self, config: FlightRecorderConfig) -> None:
        self._config = config
        self._faults = FaultLog(logger)
        self._lock = threading.Lock()
        self._due_s = 0.0

    def may_write(self) -> bool:
        """Return whether the last record of a fault or a stall was long enough ago; if so, the next pause begins."""
        with self._lock:
            now_s = time.monotonic()
            if now_s < self._due_s:
                return False
            self._due_s = now_s + self._config.pause_s
            return True

    def write(self, record: FlightRecord) -> Path | None:
        """Write a record, and remove the oldest files beyond ``max_files`` of its reason; returns its path, or None, which is logged once.

        The file has another name until it is whole and on the disk.
        """
        try:
            data = encode_flight_record(record)
            with self._lock:
                return self._write(data, record)
        except Exception as error:  # no disk, no folder, no memory: the engine goes on
            self._faults.say("flight record", f"No flight record could be written: {as_words(error)}.", error=None)
            return None

    def _write(self, data: bytes, record: FlightRecord) -> Path:
        folder = Path(self._config.folder).expanduser() if self._config.folder else default_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime(record.written_at))
        stem = f"{moment}-{record.written_at % 1 * 1e6:06.0f}-{os.getpid()}-{record.reason}"
        path, partial = folder / f"{stem}{SUFFIX}", folder / f".{stem}.partial"
        self._make_room(folder, record.reason)
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        logger.warning("A flight record of %d steps was written to %s (%s).", record.num_steps, path, record.reason)
        return path

    def _make_room(self, folder: Path, reason: str) -> None:
        """Remove the oldest records of a reason, so that with one more there are no more than there may be; names are in order of time.

        Those of other reasons stay: who may ask for records can push out none that a fault has left.
        """
        names = sorted(path.name for path in folder.iterdir() if path.name.endswith(f"-{reason}{SUFFIX}"))
        for name in names[: max(0, len(names) + 1 - self._config.max_files)]:
            with contextlib.suppress(OSError):  # another engine was faster
                (folder / name).unlink()
