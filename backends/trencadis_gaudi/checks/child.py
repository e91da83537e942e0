"""The process of one group: runs its checks and writes a line of JSON before and after each.

The job is the first argument, as JSON; lines go to a separate file descriptor, since the vendor's software prints to the standard ones.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs

from trencadis.errors import TrencadisError
from trencadis_gaudi.checks.records import Check, Found
from trencadis_gaudi.checks.table import MODES, checks_of
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.environment import prepare

__all__ = ["main", "run_checks"]


def main(argv: Sequence[str]) -> int:
    """Run the job; returns 0."""
    job = json.loads(argv[1])
    group = job["group"]
    config = GaudiConfig(**job["options"])
    mode = group if group in MODES else "compile" if config.mode == "auto" else config.mode
    capture = config.capture if mode == "lazy" else "capture_all"
    # No recipe cache, since cached recipes are not compiled; unknown releases are tested as well.
    config = attrs.evolve(config, mode=mode, capture=capture, recipe_cache="", any_version=True)
    if group != "software":
        prepare(config)
    checks = [check for check in checks_of(group) if check.name in job["names"]]
    with os.fdopen(job["lines"], "w") as lines:
        run_checks(checks, group, config, lines)
    return 0


def run_checks(checks: Sequence[Check], group: str, config: GaudiConfig, lines: TextIO) -> None:
    """Run checks in order; an error becomes the finding of its check.

    Args:
        checks: Checks to run.
        group: Process group of the checks, such as a mode.
        config: Table ``[backend.gaudi]``, with the mode.
        lines: Text stream that receives the results.
    """
    bench: Any = config
    if group != "software":  # software checks import torch themselves
        from trencadis_gaudi.checks.bench import Bench

        bench = Bench(config)
    is_open = True
    for check in checks:
        _write(lines, started=check.name)
        start_s = time.monotonic()
        found = _try(check, bench) if is_open else Found(None, "not tested: the device could not be opened")
        if check.run == "device.opens":
            is_open = bool(found.holds)
        _write(
            lines, ended=check.name, holds=found.holds, text=found.text, seconds=round(time.monotonic() - start_s, 3)
        )


def _try(check: Check, bench: Any) -> Found:
    try:
        return check.function()(bench)
    except TrencadisError as error:
        return Found(False, _first_lines(str(error)))
    except Exception as error:
        return Found(False, f"raised {type(error).__name__}{_place(error)}: {_first_lines(str(error))}")


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def _first_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:3])[:600]


def _write(lines: TextIO, **fields: Any) -> None:
    lines.write(json.dumps(fields) + "\n")
    lines.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
