"""``python -m trencadis`` is the command ``trencadis``. What it says without running a command, it says without importing one."""

from __future__ import annotations

import sys

from trencadis import __version__

__all__ = ["main"]


def main() -> int:
    """Run the command line of this process and return its exit code; see :func:`trencadis.cli.main.main`."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--version"]:
        print(f"trencadis {__version__}")
        return 0
    if arguments[:1] in (["-h"], ["--help"]):
        from trencadis.saved_help import saved

        text = saved()
        if text:
            print(text)
            return 0
    from trencadis.startup import rare_collections

    with rare_collections():
        from trencadis.cli import main as run

    return run()


if __name__ == "__main__":
    raise SystemExit(main())
