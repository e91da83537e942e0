"""``python -m trencadis_remote.process``: the worker process. Started by :class:`trencadis_remote.process.process.EngineProcess`."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trencadis.activity import ACTIVITY, EnginePhase
from trencadis.api import LEDGER
from trencadis.processes import DUMP_SIGNAL
from trencadis.startup import claim_process
from trencadis_remote.process.messages import FailedMessage, ReadyMessage, StartMessage
from trencadis_remote.process.process import LENGTH
from trencadis_remote.process.wire import as_error, decode_start, encode
from trencadis_remote.watch.record_signal import ignore_record_signal, record_at_signal
from trencadis_remote.watch.stall_watch import beat_s

if TYPE_CHECKING:
    from trencadis_remote.process.channel import Channel

__all__ = ["NUM_HEAPS", "share_heaps"]

_LINGER_S = 2.0

NUM_HEAPS: Final = 2
"""One that the loop of the engine rarely has to wait for, while another thread compiles a grammar."""

_M_ARENA_MAX: Final = -8

logger = logging.getLogger("trencadis")


def main() -> int:
    """Build the engine of the ``StartMessage`` on standard input and serve its one client; returns the exit code."""
    share_heaps()
    claim_process()
    LEDGER.is_part = True
    LEDGER.begin("command")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source = _take_standard_streams()
    faulthandler.enable()
    if DUMP_SIGNAL is not None:
        faulthandler.register(DUMP_SIGNAL, all_threads=True)
    ignore_record_signal()
    start = decode_start(_read(source, LENGTH.unpack(_read(source, LENGTH.size))[0]))
    if start.activity_file >= 0:
        ACTIVITY.share(start.activity_file)
        os.close(start.activity_file)
    ACTIVITY.begin(EnginePhase.LOADING)
    threading.Thread(target=_end_with_parent, args=(source, start.address), daemon=True).start()
    if start.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = start.python_path

    from trencadis.log import configure_logging
    from trencadis_remote.process.channel import Channel

    while_loading, level = start.log_levels
    configure_logging(level, start.tables.get("log", {}).get("format", "text"), loading=while_loading)
    channel = Channel(start.address, binds=False)
    try:
        _serve(start, channel)
    except Exception as error:
        logger.debug("The engine's process ends.", exc_info=error)
        channel.send(encode(FailedMessage(error=as_error(error))))
        return 1
    finally:
        channel.close(linger_s=_LINGER_S)
    return 0


def _serve(start: StartMessage, channel: Channel) -> None:
    from trencadis.api import Engine, build_engine, load_with_plugins
    from trencadis.clock import SystemClock
    from trencadis.console import track
    from trencadis.log import loading_level
    from trencadis.startup import rare_collections
    from trencadis_remote.process.worker import EngineWorker

    with rare_collections(), loading_level():
        # The parent has resolved everything: neither its file nor the environment is read again.
        resolved, registry = load_with_plugins(environ={}, overrides=start.tables)
        registry.sources = start.sources
        config = resolved.config
        with track(f"Loading {config.model.path}", unit="buckets", show=False) as advance:

            def note(done: int, total: int) -> None:
                advance(done, total)
                ACTIVITY.advance(done, total)  # for the parent, which may have a terminal

            engine = build_engine(config, registry=registry, progress=note)
    try:
        ready = ReadyMessage(
            model=engine.model,
            max_model_len=engine.max_model_len,
            plan_hash=engine.plan_hash,
            hashing=engine.hashing if start.sends_load else None,
            start=LEDGER.entries,
        )
        channel.send(encode(ready))
        if isinstance(engine, Engine) and engine.dumps:
            record_at_signal(engine.dumps)
        gc.freeze()  # loaded objects live as long as the process: keep them out of collections
        clock = SystemClock() if start.sends_load else None
        EngineWorker(engine, channel, beat_s=beat_s(config.engine.watchdog_s), load_clock=clock).run()
    finally:
        ACTIVITY.begin(EnginePhase.CLOSING)
        engine.close()


def _take_standard_streams() -> int:
    """Return the descriptor of standard input, and redirect both standard streams for everything that runs here.

    What is printed goes to standard error. The copy of standard output is closed by this process's end, and so tells the parent.
    """
    source = os.dup(0)
    os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return source


def _read(source: int, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = os.read(source, num_bytes - len(data))
        if not part:
            os._exit(1)  # the parent died while it wrote
        data += part
    return data


def _end_with_parent(source: int, address: str) -> None:
    """Wait for the end of the parent, and end this process at once."""
    while os.read(source, 1):
        pass
    shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
    os._exit(1)


def share_heaps() -> bool:
    """Have all threads of this process share ``NUM_HEAPS`` heaps; call it before any thread is started. Source: mallopt(3).

    Returns:
        False: malloc is not glibc's, or the environment says how many.
    """
    if "MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return bool(libc.mallopt(_M_ARENA_MAX, NUM_HEAPS))


if __name__ == "__main__":
    sys.exit(main())
