"""``trencadis serve``: an OpenAI-compatible server until it is ended."""

from __future__ import annotations

import argparse
import ctypes
import signal
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trencadis.api import LEDGER, Config, Registry
from trencadis.console import say

if TYPE_CHECKING:
    from trencadis_server.lifecycle.opening import OpenServer

__all__ = [
    "MAIN_SETTINGS",
    "SHORT_FLAGS",
    "TAKES_MODEL",
    "NEEDS_ALL_PLUGINS",
    "TERMINAL_LOG_LEVELS",
    "add_arguments",
    "give_back_large_blocks",
    "run",
]

SHORT_FLAGS: Mapping[str, str] = {
    "--host": "--server.host",
    "--port": "--server.port",
    "--role": "--engine.role",
}
MAIN_SETTINGS = (
    "server.host",
    "server.port",
    "server.api_keys",
    "server.admin_key",
    "server.allowed_origins",
    "server.model_name",
    "server.max_requests",
    "server.drain_timeout_s",
    "engine.role",
)
NEEDS_ALL_PLUGINS = False
TERMINAL_LOG_LEVELS = "info", "warning"

_RECORD_SIGNAL = getattr(signal, "SIGUSR2", None)
"""Signal at which an engine's process writes its flight record; operators send it to this process too."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_LARGE_BYTES = 1 << 18
_KEPT_BYTES = 1 << 20
_MAX_ARENAS = 2


TAKES_MODEL = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags: there are none."""
    parser.epilog = (
        "SIGTERM and Ctrl-C end it in order: nothing new is taken, running requests have server.drain_timeout_s. "
        "A second one ends it at once. SIGUSR2 has the engines write flight records."
    )


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Serve until a signal comes; returns 0, or 128 plus the signal's number if a second signal came.

    Raises:
        ConfigError: The port is in use, or the configuration cannot be served.
        TrencadisError: The engine cannot be opened.
    """
    LEDGER.begin("server")
    from trencadis_server.lifecycle.opening import open_server

    give_back_large_blocks()
    if _RECORD_SIGNAL is not None:
        signal.signal(_RECORD_SIGNAL, signal.SIG_IGN)  # until there is a server, whose engines are asked for records
    with open_server(config, registry, resolved=args.resolved) as server:
        return _serve(server)


def _serve(server: OpenServer) -> int:
    import asyncio
    import contextlib

    from trencadis_server.lifecycle.lifecycle import event_loop_factory

    signals: list[int] = []

    def announce(line: str) -> None:
        say(line, stream=sys.stdout)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        service = server.service(announce)

        def end(number: int) -> None:
            signals.append(number)
            if len(signals) == 1:
                say(f"{_name_of(number)}: shutting down in order; a second signal ends it at once.")
            service.stop()
            if len(signals) > 1:
                # If even an immediate end takes too long, a third signal has its default effect.
                loop.remove_signal_handler(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt there
                loop.add_signal_handler(number, end, number)
        if _RECORD_SIGNAL is not None:
            loop.add_signal_handler(_RECORD_SIGNAL, service.record)
        for line in server.greeting():
            announce(line)
        await service.run()

    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(main())
    if signals:
        say(f"trencadis serve was stopped by {_name_of(signals[-1])}.")
    return 128 + signals[1] if len(signals) > 1 else 0


def _name_of(number: int) -> str:
    """Return the name of a signal as it is typed or sent. Pure."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def give_back_large_blocks() -> bool:
    """Make malloc return freed request bodies and answers to the system; False if the C library is not glibc.

    By default glibc raises its mmap threshold to the size of the largest block freed so far, up to 32 MiB: after one
    long answer all other blocks lie in heaps, which shrink from their ends only, and glibc makes eight heaps for each
    core. Must be called before threads are started.

    Source: mallopt(3), M_MMAP_THRESHOLD and M_ARENA_MAX.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    options = ((_M_MMAP_THRESHOLD, _LARGE_BYTES), (_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_ARENA_MAX, _MAX_ARENAS))
    return bool(min(mallopt(name, value) for name, value in options))
