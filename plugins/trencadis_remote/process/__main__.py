"""``python -m trencadis_remote.process FILE``: the worker process. Started by :class:`trencadis_remote.process.process.EngineProcess`."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
from typing import Final

from trencadis.activity import ACTIVITY, EnginePhase
from trencadis.api import LEDGER
from trencadis.link import wait_for_end
from trencadis.processes import DUMP_SIGNAL
from trencadis.startup import claim_process
from trencadis_remote.process.channel import Channel
from trencadis_remote.process.messages import FailedMessage, ReadyMessage, StartMessage
from trencadis_remote.process.wire import as_error, decode_start, encode
from trencadis_remote.watch.record_signal import ignore_record_signal, record_at_signal
from trencadis_remote.watch.stall_watch import beat_s

__all__ = ["NUM_HEAPS", "share_heaps"]

_LINGER_S = 2.0

NUM_HEAPS: Final = 2
"""One that the loop of the engine rarely has to wait for, while another thread compiles a grammar."""

_M_ARENA_MAX: Final = -8

logger = logging.getLogger("trencadis")


def main(file: int) -> int:
    """Build the engine of the ``StartMessage`` that comes through a socket and serve its one client; returns the exit code."""
    share_heaps()
    claim_process()
    LEDGER.is_part = True
    LEDGER.begin("command")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = socket.socket(fileno=file)
    end.set_inheritable(False)
    _take_standard_output()
    faulthandler.enable()
    if DUMP_SIGNAL is not None:
        faulthandler.register(DUMP_SIGNAL, all_threads=True)
    ignore_record_signal()
    threading.Thread(target=_end_with_parent, args=(end.dup(),), daemon=True).start()
    channel = Channel(end)
    start = decode_start(channel.receive_first())
    if start.activity_file >= 0:
        ACTIVITY.share(start.activity_file)
        os.close(start.activity_file)
    ACTIVITY.begin(EnginePhase.LOADING)
    if start.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = start.python_path

    from trencadis.log import configure_logging

    while_loading, level = start.log_levels
    configure_logging(level, start.tables.get("log", {}).get("format", "text"), loading=while_loading)
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


def _take_standard_output() -> None:
    """Send what is printed here to standard error. The copy of standard output is closed by this process's end, and so tells the parent."""
    os.dup(1)
    os.dup2(2, 1)


def _end_with_parent(end: socket.socket) -> None:
    """Wait until the parent has ended or has closed the channel, and end this process at once."""
    wait_for_end(end)
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
    sys.exit(main(int(sys.argv[1])))
