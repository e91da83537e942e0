"""``python -m trencadis`` is the command ``trencadis``."""

from __future__ import annotations

from trencadis.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
