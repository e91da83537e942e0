"""``python -m trencadis`` is the command ``trencadis``. What it says without running a command, it says without importing one."""

from __future__ import annotations

import os
import sys

from trencadis import __version__

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process and return its exit code; see :func:`trencadis.cli.main.main`."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--version"]:
        return _print(f"trencadis {__version__}")
    if arguments[:1] in (["-h"], ["--help"]):
        from trencadis.saved_help import saved

        text = saved()
        if text:
            return _print(text)
    from trencadis.startup import rare_collections

    with rare_collections():
        from trencadis.cli import main as run

    return run()


def _print(text: str) -> int:
    """Print a text; returns 0, also if the reader, such as ``head``, has gone."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
