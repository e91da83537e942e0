"""Where a plugin comes from: its distribution, version, entry point and module. Every plugin error names it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import json
import os
import sys
import traceback
from collections.abc import Mapping
from importlib.metadata import Distribution, EntryPoint
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any
from urllib.parse import urlsplit

import attrs

__all__ = ["OUR_DISTRIBUTION", "Provenance", "distribution_of", "of_entry_point", "of_import_path", "of_object"]


OUR_DISTRIBUTION = "trencadis"
"""Distribution of all built-in components."""

_KERNEL_SUFFIXES = (".cpp", ".cu", ".h")
_CODE_SUFFIXES = (*importlib.machinery.SOURCE_SUFFIXES, *importlib.machinery.EXTENSION_SUFFIXES, *_KERNEL_SUFFIXES)


@attrs.frozen(kw_only=True)
class Provenance:
    """Where a plugin comes from.

    Attributes:
        plugin: Name under which it is registered and can be blocked.
        module: Module that holds it.
        distribution: Installed distribution; empty for a plugin given in code.
        version: Version of the distribution; empty if there is none.
    """

    plugin: str
    module: str
    distribution: str = ""
    version: str = ""

    def __str__(self) -> str:
        """Return ``fibonacci-buckets 0.2.0 (plugin "fibonacci")``, or the module for a plugin given in code."""
        owner = f"{self.distribution} {self.version}" if self.distribution else f"{self.module}, given in code"
        return f'{owner} (plugin "{self.plugin}")'

    @property
    def code_files(self) -> Mapping[str, str]:
        """SHA-256 of each file of the plugin's code as it lies on disk, by path from the folder that holds the package; sorted.

        The code is all Python and extension modules, and sources of kernels, of the package that an installed plugin is in, editable or
        not, and else the module alone. Read once in a process, when it is first asked for: about 20 ms for a package of 250 files.
        """
        name = self.module.partition(".")[0] if self.distribution else self.module
        return _code_files(name, is_package=bool(self.distribution))

    @property
    def code_digest(self) -> str:
        """BLAKE2b-128 of :attr:`code_files`, 32 hexadecimal digits; empty if there are none."""
        listed = "".join(f"{digest} {name}\n" for name, digest in self.code_files.items())
        return hashlib.blake2b(listed.encode(), digest_size=16).hexdigest() if listed else ""

    @property
    def remedy(self) -> str:
        """What to do if the plugin cannot be used."""
        if not self.distribution:
            return "Correct it, or do not pass it."
        if self.distribution == OUR_DISTRIBUTION:
            return (
                "It comes with Trencadís. If the error does not say what to set, report it with what --traceback shows and trencadis doctor "
                "prints, or choose another component."
            )
        block = f'block it: [plugins] blocked = ["{self.plugin}"].'
        folder = _editable_at(self.distribution)
        if folder:
            return f"It is installed from {folder}: correct it there, or {block}"
        return f"Upgrade or uninstall {self.distribution}, or {block}"

    def line_of(self, error: BaseException) -> str:
        """Return ``file.py:12``, where the code of a plugin installed editably, for its author, raised an error; else nothing."""
        folder = _editable_at(self.distribution) if self.distribution else ""
        frames = traceback.extract_tb(error.__traceback__) if folder and self.distribution != OUR_DISTRIBUTION else ()
        own = [f"{frame.filename}:{frame.lineno}" for frame in frames if Path(frame.filename).is_relative_to(folder)]
        return own[-1] if own else ""


def of_entry_point(entry_point: EntryPoint, *, plugin: str) -> Provenance:
    """Return an entry point's provenance. Pure.

    Args:
        entry_point: The entry point; one made in code has no distribution.
        plugin: The name to register it under.
    """
    name, version = distribution_of(entry_point)
    return Provenance(plugin=plugin, module=entry_point.module, distribution=name, version=version)


@functools.cache
def _editable_at(distribution: str) -> str:
    """Return the folder from which ``pip install -e`` installed a distribution; empty for any other installation."""
    try:
        url = json.loads(importlib.metadata.distribution(distribution).read_text("direct_url.json") or "{}")
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return ""
    from urllib.request import url2pathname  # which imports what HTTP takes

    return url2pathname(urlsplit(url["url"]).path) if url.get("dir_info", {}).get("editable") else ""


def distribution_of(entry_point: EntryPoint) -> tuple[str, str]:
    """Return name and version of an entry point's distribution; empty for one made in code. Pure."""
    return _facts_of(entry_point.dist) if entry_point.dist else ("", "")


def of_object(plugin: Any) -> Provenance:
    """Return the provenance of a module or object given in code; its name is the module's or the class's. Pure."""
    if isinstance(plugin, ModuleType):
        return Provenance(plugin=plugin.__name__, module=plugin.__name__)
    kind = plugin if isinstance(plugin, type) else type(plugin)
    return Provenance(plugin=kind.__qualname__, module=kind.__module__)


def of_import_path(path: str) -> Provenance:
    """Return the provenance of ``package.module:Attribute``; the first call for a module looks through all distributions, some 100 ms."""
    module = path.partition(":")[0]
    distribution, version = _owner_of(module.partition(".")[0])
    return Provenance(plugin=path, module=module, distribution=distribution, version=version)


@functools.cache
def _code_files(name: str, *, is_package: bool) -> Mapping[str, str]:
    # Imported already, wherever it came from; a package of a distribution is, as the parent of the plugin's module.
    found = sys.modules.get(name)
    file = getattr(found, "__file__", None)
    folders = [str(path) for path in getattr(found, "__path__", ())] if is_package else []
    files = {
        Path(name, os.path.relpath(os.path.join(folder, one), root)).as_posix(): Path(folder, one)
        for root in folders
        for folder, _, names in os.walk(root)
        for one in names
        if one.endswith(_CODE_SUFFIXES)
    }
    files = files or ({Path(file).name: Path(file)} if file else {})
    digests = {}
    for place, path in sorted(files.items()):
        with contextlib.suppress(OSError):  # a link to nothing is no code
            digests[place] = hashlib.sha256(path.read_bytes()).hexdigest()
    return MappingProxyType(digests)


@functools.lru_cache(maxsize=64)
def _facts_of(distribution: Distribution) -> tuple[str, str]:
    """Return name and version, for which all of its metadata is read: once, not once for each of its entry points."""
    return distribution.name, distribution.version


@functools.cache
def _owner_of(package: str) -> tuple[str, str]:
    """Return distribution and version of an importable package, which is not exchanged while it is imported."""
    owners = importlib.metadata.packages_distributions().get(package, [])
    return (owners[0], importlib.metadata.version(owners[0])) if owners else ("", "")
