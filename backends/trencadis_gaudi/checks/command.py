"""``trencadis gaudi-check``: tests on the device of the facts that the backend relies on."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    from trencadis_gaudi.checks.table import MODES, TABLE

    parser.epilog = (
        "Tests the table [backend.gaudi] whatever backend is chosen, each mode in a process of its own. Exit code 1 if a check fails; "
        "doubtful ones do not count. Nothing else may use the device meanwhile."
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), help="modes to test (default: lazy compile eager)"
    )
    names = [check.name for check in TABLE]
    parser.add_argument(
        "--only",
        nargs="+",
        action="extend",
        choices=names,
        default=[],
        metavar="CHECK",
        help="checks to run, by name (default: all)",
    )
    parser.add_argument(
        "--timeout", type=float, default=900.0, metavar="S", help="how long one check may take, seconds (default: 900)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the report too: Markdown, or JSON if it ends in .json"
    )


def run(args: argparse.Namespace, config: Any, registry: Any) -> int:
    """Run every check and print; returns 0 if none failed, else 1.

    Raises:
        ConfigValueError: The time is not positive, or two keys contradict each other.
    """
    import attrs

    from trencadis.errors import ConfigValueError
    from trencadis_gaudi.checks.processes import run_group
    from trencadis_gaudi.checks.report import EMULATED, Report, facts_of_machine, vendor_environment
    from trencadis_gaudi.checks.table import GROUPS, MODES
    from trencadis_gaudi.config import GaudiConfig

    if args.timeout <= 0:
        raise ConfigValueError(f"trencadis gaudi-check --timeout {args.timeout:g}: must be above 0.")
    options = config.backend.components.get("gaudi") or GaudiConfig()
    options.check()
    report = Report(
        is_emulated=options.device == "emulated",
        options=attrs.asdict(options),
        machine=facts_of_machine(),
        environ=vendor_environment(os.environ),
    )
    if report.is_emulated:
        print(EMULATED)
    for name, value in report.machine.items():
        print(f"      {name}: {value}")

    lines = _Lines()

    def note(result: Any) -> None:
        report.results.append(result)
        lines.add(result)

    for group in GROUPS:
        if group in args.modes or group not in MODES:
            run_group(group, report.options, timeout_s=args.timeout, note=note, only=args.only)
    lines.end()
    print(report.counts())
    if args.output is not None:
        report.write(args.output)
        print(f"The report is in {args.output}.")
    return 1 if report.num_failed else 0


class _Lines:
    """Prints results as they arrive; consecutive skipped checks with the same reason are printed as the first and a count."""

    def __init__(self) -> None:
        self._last: Any = None
        self._num_more = 0

    def add(self, result: Any) -> None:
        """Print a result, or count it as another skipped one."""
        from trencadis_gaudi.checks.records import Status
        from trencadis_gaudi.checks.report import title

        last, is_skipped = self._last, result.status is Status.SKIP
        if is_skipped and last is not None and (last.group, last.found) == (result.group, result.found):
            self._num_more += 1
            return
        self.end()
        self._last = result if is_skipped else None
        print(f"{result.status.value.upper():4}  {title(result)}: {result.found} ({result.seconds:.1f} s)", flush=True)
        if result.is_wrong:
            print(f"      expected: {result.check.expects}")
            print(f"      → {result.check.means}", flush=True)

    def end(self) -> None:
        """Print the number of counted results."""
        if self._num_more:
            print(f"SKIP  {self._last.group}: {self._num_more} more for the same reason", flush=True)
        self._num_more = 0
