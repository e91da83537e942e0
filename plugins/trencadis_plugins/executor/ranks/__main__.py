"""``python -m trencadis_plugins.executor.ranks FILE``: a rank in a process of its own. Started by :class:`RankProcess`."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading

from trencadis_plugins.executor.ranks.link import LinkClosedError, RankLink
from trencadis_plugins.executor.ranks.process import DUMP_SIGNAL
from trencadis_plugins.executor.ranks.server import RankServer


def _end_with_parent() -> None:
    """Wait for the end of the executor's process, and end this one at once, whatever it does."""
    while os.read(0, 1):
        pass
    os._exit(1)


def main(file: int) -> None:
    """Serve the executor at the other end of a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the executor's process decides when to end
    faulthandler.enable()
    if DUMP_SIGNAL is not None:
        faulthandler.register(DUMP_SIGNAL, all_threads=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    link = RankLink(socket.socket(fileno=file))
    with contextlib.suppress(LinkClosedError):
        RankServer(link).run()
    link.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
