"""The table of this engine against others on the same machine; see ``--help`` and ``benchmarks/README.md``."""

from __future__ import annotations

import sys
from pathlib import Path
from runpy import run_module

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # where the package ``peers`` is
    run_module("peers.command", run_name="__main__", alter_sys=True)
