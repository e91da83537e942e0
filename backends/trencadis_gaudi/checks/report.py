"""The report of a run as Markdown or JSON."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

from trencadis_gaudi.checks.records import Result, Status
from trencadis_gaudi.environment import DISTRIBUTION
from trencadis_gaudi.health_check import run_smi

__all__ = ["EMULATED", "Report", "facts_of_machine", "vendor_environment"]

EMULATED = "The device is emulated: this proves that the command works, and nothing about a Gaudi."
_DISTRIBUTIONS = ("trencadis", DISTRIBUTION, "torch", "transformers", "numpy")
_PREFIXES = (
    "PT_",
    "HABANA_",
    "HLS_",
    "HCCL_",
    "GC_",
    "ENABLE_",
    "EXPERIMENTAL_",
    "FUSER_",
    "RUNTIME_",
    "TORCH_",
    "VLLM_",
)
_SECRET = re.compile("KEY|SECRET|PASSWORD|TOKEN", re.IGNORECASE)


def facts_of_machine() -> dict[str, str]:
    """Return the machine's and the software's names and versions."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "system": platform.platform(),
        "processors": f"{os.cpu_count()} x {platform.machine()}",
        "memory": f"{memory_bytes / 2**30:.1f} GiB",
        "Python": platform.python_version(),
    }
    for name in _DISTRIBUTIONS:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    try:
        lines = (run_smi() or "no such command").splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        lines = [f"fails: {error}"]
    return facts | {"hl-smi": "; ".join(line.strip() for line in lines if line.strip()) or "finds no device"}


def vendor_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the Gaudi software, PyTorch and the vendor's plugin, without secrets. Pure."""
    return {name: environ[name] for name in sorted(environ) if name.startswith(_PREFIXES) and not _SECRET.search(name)}


@attrs.define(kw_only=True)
class Report:
    """Results of one run.

    Attributes:
        is_emulated: Whether the device is emulated.
        options: Table ``[backend.gaudi]``.
        machine: Names and versions of machine and software.
        environ: Environment variables of the software.
        results: Results in the order of the run.
    """

    is_emulated: bool
    options: Mapping[str, Any]
    machine: Mapping[str, str]
    environ: Mapping[str, str]
    results: list[Result] = attrs.field(factory=list)

    @property
    def num_failed(self) -> int:
        """Number of vital checks whose fact does not hold."""
        return sum(result.status is Status.FAIL for result in self.results)

    def counts(self) -> str:
        """Return the number of results of each status, in words. Pure."""
        counts = Counter(result.status for result in self.results)
        names = {Status.OK: "ok", Status.WARN: "doubtful", Status.FAIL: "failed", Status.SKIP: "not tested"}
        return ", ".join(f"{counts[status]} {name}" for status, name in names.items())

    def write(self, path: Path) -> None:
        """Write the report, as JSON if the suffix is .json, else as Markdown."""
        path.write_text(self.as_json() if path.suffix == ".json" else self.as_markdown(), encoding="utf-8")

    def as_json(self) -> str:
        """Return the report as JSON. Pure."""
        fields = {
            "emulated": self.is_emulated,
            "counts": {status.value: sum(one.status is status for one in self.results) for status in Status},
            "machine": dict(self.machine),
            "environment": dict(self.environ),
            "backend.gaudi": dict(self.options),
            "checks": [result.fields() for result in self.results],
        }
        return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"

    def as_markdown(self) -> str:
        """Return the report as Markdown. Pure."""
        lines = ["# trencadis gaudi-check", "", f"{self.counts()}."]
        if self.is_emulated:
            lines.append(EMULATED)
        wrong = [result for result in self.results if result.is_wrong]
        if wrong:
            lines += ["", "## What does not hold", ""]
            lines += [f"* {title(one)}: {one.found}. {one.check.means}" for one in wrong]
        lines += ["", "## Checks", "", *_table(("process", "check", "", "found", "expected", "how", "s"), self._rows())]
        for name, facts in (("Machine", self.machine), ("Environment", self.environ)):
            lines += ["", f"## {name}", "", *_table(("name", "value"), facts.items())]
        lines += ["", "## [backend.gaudi]", "", *_table(("key", "value"), self.options.items())]
        return "\n".join(lines) + "\n"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                one.group,
                one.check.name,
                one.status.value,
                one.found,
                one.check.expects,
                one.check.does,
                f"{one.seconds:.1f}",
            )
            for one in self.results
        ]


def title(result: Result) -> str:
    """Return the group and the name of a result. Pure."""
    return f"{result.group}: {result.check.name}"


def _table(names: Sequence[str], rows: Any) -> list[str]:
    cells = [[str(value).replace("|", "\\|") for value in row] for row in rows]
    return [_row(names), _row(["---"] * len(names)), *map(_row, cells)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
