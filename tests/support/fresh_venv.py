"""A virtual environment as README's first command makes it: Trencadís, what it requires, and nothing else.

What it requires is linked from this environment, for a second copy of torch takes minutes. What it may install later comes as wheels,
packed anew from this environment, which pip finds instead of an index::

    requirements of trencadis ─▶ distributions, and theirs ─▶ a link of each in site-packages ─▶ pip install -e .
    what may be asked for     ─▶ distributions, and theirs ─▶ wheels in a folder              ─▶ pip install -e ".[test]"
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, distribution
from pathlib import Path

import attrs
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["FreshVenv", "required_by"]

ROOT = Path(__file__).resolve().parents[2]
_NOT_OF_A_WHEEL = {"INSTALLER", "REQUESTED", "direct_url.json"}


@attrs.frozen
class FreshVenv:
    """The environment: its folder, and the variables of its processes."""

    folder: Path
    environment: Mapping[str, str]

    @classmethod
    def make(cls, folder: Path, *, extras: Iterable[str] = ()) -> FreshVenv:
        """Make the environment, and install this tree in it with ``pip install -e .``; pip can install ``extras`` later."""
        venv.create(folder, symlinks=True)
        site = folder / "lib" / f"python{'.'.join(map(str, sys.version_info[:2]))}" / "site-packages"
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        linked = required_by(*project["dependencies"], "pip")
        for name in linked:
            _link(distribution(name), site)
        wheels = folder / "wheels"
        wheels.mkdir()
        later = [requirement for extra in extras for requirement in project["optional-dependencies"][extra]]
        for name in required_by(*later) - linked:
            _pack(distribution(name), wheels)
        builders = folder / "builders"
        for name in required_by("hatchling"):
            _link(distribution(name), builders)
        made = cls(folder, _environment(folder, wheels))
        pip = folder / "bin" / "pip"
        # What builds packages is seen by pip alone, as in the environment that it makes for a build where there is an index.
        pip.write_text(f'#!/bin/sh\nPYTHONPATH={builders} exec {folder}/bin/python -m pip "$@"\n')
        pip.chmod(0o755)
        made.run("pip install --quiet -e .", cwd=ROOT)
        return made

    def run(self, command: str, *, cwd: Path, limit_s: float = 600.0) -> str:
        """Run a command line as typed with the environment activated; return its output and errors."""
        done = self.attempt(command, cwd=cwd, limit_s=limit_s)
        assert done.returncode == 0, f"$ {command}\n{done.stdout[-6000:]}"
        return done.stdout

    def attempt(self, command: str, *, cwd: Path, limit_s: float = 600.0) -> subprocess.CompletedProcess[str]:
        """Run a command line that may fail; output and errors are one text."""
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=cwd,
            env=dict(self.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=limit_s,
        )

    def installed(self) -> set[str]:
        """Return the names of all distributions that its Python finds."""
        code = "import importlib.metadata as m; print(*{one.name for one in m.distributions()})"
        return {canonicalize_name(name) for name in self.run(f"python -c '{code}'", cwd=self.folder).split()}


def required_by(*requirements: str) -> set[str]:
    """Return the names of the distributions that requirements ask for, with all that these require, on this machine."""
    found: set[str] = set()
    asked = [Requirement(text) for text in requirements]
    done: set[tuple[str, frozenset[str]]] = set()
    while asked:
        one = asked.pop()
        name, extras = canonicalize_name(one.name), frozenset(one.extras)
        if (name, extras) in done:
            continue
        done.add((name, extras))
        found.add(name)
        for requirement in map(Requirement, distribution(name).requires or ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                asked.append(requirement)
    return found


def _link(installed: Distribution, site: Path) -> None:
    """Link what a distribution has in site-packages; within a namespace, what is in that."""
    for path in _places(installed):
        target = site / path
        if not target.is_symlink():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(installed.locate_file(path))


def _places(installed: Distribution) -> Iterator[Path]:
    """Yield the modules and packages of a distribution, each once."""
    files = [Path(str(file)) for file in installed.files or ()]
    packages = {file.parts[0] for file in files if len(file.parts) == 2 and file.name == "__init__.py"}
    for file in files:
        first = file.parts[0]
        if first in ("..", "__pycache__"):
            continue
        whole = len(file.parts) == 1 or first in packages or first.endswith((".dist-info", ".libs"))
        yield Path(first) if whole else Path(*file.parts[:2])


def _pack(installed: Distribution, folder: Path) -> None:
    """Write the wheel that a distribution was installed from, without the commands, which pip makes again."""
    tags = [
        line.removeprefix("Tag: ") for line in installed.read_text("WHEEL").splitlines() if line.startswith("Tag: ")
    ]
    # Those for Pythons, ABIs and platforms, each part with all its values.
    tag = "-".join(".".join(dict.fromkeys(values)) for values in zip(*(tag.split("-") for tag in tags), strict=True))
    name = canonicalize_name(installed.name).replace("-", "_")
    with zipfile.ZipFile(folder / f"{name}-{installed.version}-{tag}.whl", "w") as archive:
        for file in installed.files or ():
            path = Path(str(file))
            if ".." not in path.parts and path.suffix != ".pyc" and path.name not in _NOT_OF_A_WHEEL:
                archive.write(installed.locate_file(file), str(file))


def _environment(folder: Path, wheels: Path) -> dict[str, str]:
    """Return the variables of a shell in which the environment is activated."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PIP_", "PYTEST_", "TRENCADIS_")) and key not in ("PYTHONPATH", "PYTHONHOME")
    }
    return kept | {
        "VIRTUAL_ENV": str(folder),
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # so pip is told not to isolate
        "PIP_FIND_LINKS": str(wheels),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
