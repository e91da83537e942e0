"""``python -m trencadis_plugins.executor.ranks FILE``: a rank in a process of its own, or, with ``template``, what forks them."""

from __future__ import annotations

import faulthandler
import signal
import socket
import sys
import threading

from trencadis.link import Link, LinkClosedError
from trencadis.processes import DUMP_SIGNAL
from trencadis_plugins.executor.ranks.server import RankServer
from trencadis_plugins.executor.ranks.template import end_with_executor, run_template, wake_template


def main(file: int, *, is_template: bool) -> None:
    """Serve the executor at the other end of a socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the executor's process decides when to end
    faulthandler.enable()
    end, template = socket.socket(fileno=file), 0
    if is_template:
        forked = run_template(end)
        if forked is None:
            return
        end, template = forked
    if DUMP_SIGNAL is not None:
        faulthandler.register(DUMP_SIGNAL, all_threads=True)
    threading.Thread(target=end_with_executor, args=(end.dup(), template), daemon=True).start()
    link = Link(end)
    try:
        RankServer(link).run()
    except LinkClosedError:
        wake_template(template)
    link.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), is_template=len(sys.argv) > 2)
