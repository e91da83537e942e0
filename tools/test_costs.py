"""Pytest plugin that measures the CPU seconds of tests, of the processes they start included.

``PYTHONPATH=tools pytest -p test_costs --costs FILE`` appends one line of JSON per test and phase (setup, call, teardown), then
``python tools/test_costs.py FILE`` prints the seconds per module and the heaviest tests. Wall times on a busy machine say little;
CPU seconds add up and stay comparable. A child counts where it is reaped: a server that lives as long as a module counts in the
teardown of the module's last test.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections import Counter
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--costs", type=Path, required=True, help="file to which the CPU seconds of each phase are appended"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the meter where tests run: in the workers of xdist, or in this process if there are none."""
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        config.pluginmanager.register(Meter(config.getoption("costs")))


class Meter:
    """Writes the CPU seconds of every phase of every test, and those up to the first test as ``collection``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process = os.getpid()
        self._seconds = (0.0, 0.0)

    def pytest_collection_finish(self) -> None:
        """Write the seconds of imports and collection."""
        self._write("", "collection")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the seconds since the phase before."""
        self._write(report.nodeid, str(report.when))

    def pytest_sessionfinish(self) -> None:
        """Write the seconds after the last test."""
        self._write("", "end")

    def _write(self, test: str, phase: str) -> None:
        if os.getpid() != self._process:  # a fork that leaves a test by an exception
            return
        now = _seconds()
        own, children = (after - before for after, before in zip(now, self._seconds, strict=True))
        self._seconds = now
        with self._path.open("a") as file:
            file.write(json.dumps({"test": test, "phase": phase, "own": own, "children": children}) + "\n")


def _seconds() -> tuple[float, float]:
    """Return the CPU seconds of this process and of the children it has reaped."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own, children = (usage.ru_utime + usage.ru_stime for usage in usages)
    return own, children


def main(path: Path, shown: int = 40) -> None:
    """Print the sum, the seconds per module and the heaviest tests."""
    modules: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        row = json.loads(line)
        name = row["test"] or row["phase"]
        modules[name.split("::")[0]] += row["own"] + row["children"]
        functions[name.split("[")[0]] += row["own"] + row["children"]
    print(f"{modules.total() / 60:.1f} CPU minutes")
    for title, counter in (("modules", modules), ("functions", functions)):
        print(f"\n{title}")
        for name, seconds in counter.most_common(shown):
            print(f"{seconds:8.1f} {name}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
