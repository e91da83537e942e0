"""Checks of Python, the distribution of Trencadís and its requirements: installed, in tested versions."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import shutil
from collections.abc import Iterator
from typing import Any

from trencadis.api import last_start, start_in_words
from trencadis_tools.doctor.findings import Findings

__all__ = ["check_installation"]

_OURS = "trencadis"


def check_installation(found: Findings) -> None:
    """Check Python, required packages, extras, and the build of torch."""
    try:
        texts = importlib.metadata.requires(_OURS) or []
    except importlib.metadata.PackageNotFoundError:
        found.fail(
            "trencadis is importable, but no distribution of that name is installed: its plugins cannot be found",
            "Run pip install -e . in the folder of its pyproject.toml, or pip install trencadis.",
        )
        return
    _check_python(found)
    _check_packages(found, texts)
    _check_extras(found, texts)
    _check_torch(found)
    _show_last_start(found)


def _show_last_start(found: Findings) -> None:
    """Report the model and duration of this user's last start."""
    last = last_start()
    if last is not None:
        model, entries = last
        found.ok(f"the last start, of {model}, took {start_in_words(entries)}")


def _check_python(found: Findings) -> None:
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    wanted = ", ".join(importlib.metadata.metadata(_OURS).get_all("Requires-Python") or [])
    if SpecifierSet(wanted).contains(version, prereleases=True):
        found.ok(f"Python {version} on {platform.system()} {platform.machine()}")
    else:
        found.fail(f"Python {version}; needed is {wanted}", f"Make an environment with a Python {wanted}.")


def _check_packages(found: Findings, texts: list[str]) -> None:
    """Check every requirement that holds without an extra."""
    num_good = 0
    for requirement in _requirements(texts, extra=""):
        complaint = _complaint(requirement)
        if complaint is None:
            num_good += 1
        elif complaint.startswith("newer"):
            found.warn(
                f"{requirement.name} {complaint} than what Trencadís was tested with ({requirement.specifier})",
                f"If something misbehaves: pip install '{requirement.name}{requirement.specifier}'.",
            )
        else:
            found.fail(
                f"{requirement.name} {complaint}; needed is {requirement.specifier}",
                f"Run pip install '{requirement.name}{requirement.specifier}'.",
            )
    ours = importlib.metadata.version(_OURS)
    found.ok(f"trencadis {ours}, {num_good} required packages in tested versions")


def _check_extras(found: Findings, texts: list[str]) -> None:
    extras = importlib.metadata.metadata(_OURS).get_all("Provides-Extra") or []
    for extra in extras:
        missing = [item.name for item in _requirements(texts, extra=extra) if _complaint(item) == "is not installed"]
        if missing:
            found.ok(
                f"extra {extra}: not installed ({', '.join(missing)}); pip install '{_OURS}[{extra}]' if you need it"
            )
        else:
            found.ok(f"extra {extra}: installed")


def _requirements(texts: list[str], *, extra: str) -> Iterator[Any]:
    """Yield the requirements of an extra, or those without one, whose markers match this system."""
    from packaging.requirements import Requirement

    for text in texts:
        requirement = Requirement(text)
        of_an_extra = requirement.marker is not None and "extra" in str(requirement.marker)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if applies and of_an_extra == bool(extra):
            yield requirement


def _complaint(requirement: Any) -> str | None:
    """Return what is wrong with the installed version, or None."""
    from packaging.version import Version

    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
    # A local version part, such as +cpu, only names the builder.
    public = Version(Version(version).public)
    if requirement.specifier.contains(public, prereleases=True):
        return None
    floors = [item for item in requirement.specifier if item.operator in {">=", ">", "==", "~="}]
    return f"newer: {version}" if all(item.contains(public, prereleases=True) for item in floors) else f"is {version}"


def _check_torch(found: Findings) -> None:
    """Import torch and report the devices that it can use."""
    # Imported by name, since core does not import a tensor library.
    try:
        torch: Any = importlib.import_module("torch")
    except Exception as error:
        found.fail(f"torch cannot be imported: {type(error).__name__}: {error}", "Reinstall torch for this machine.")
        return
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        found.ok(f"torch {torch.__version__}, CUDA devices: {', '.join(names)}")
    elif torch.version.cuda:
        found.warn(
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda}, but no CUDA device can be used",
            "On a machine without one, the CPU build is several GB smaller; else check the driver with nvidia-smi.",
        )
    elif shutil.which("nvidia-smi"):
        found.warn(
            f"torch {torch.__version__} is a build for the CPU, but this machine seems to have an NVIDIA device",
            "Install a CUDA build of torch: see https://pytorch.org/get-started.",
        )
    else:
        found.ok(f"torch {torch.__version__}, CPU only")
