"""The text of ``trencadis --help``, kept from the last time: to make it, every plugin is imported, which takes half a second.

It is read again only if nothing that it was made from has changed: the folders of installed packages, the files that were imported,
the width of the terminal. Where a variable ``TRENCADIS_...`` is set, which may block plugins, it is made anew.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trencadis.caches import cache_directory

__all__ = ["keep", "saved"]


def saved(environ: Mapping[str, str] = os.environ) -> str:
    """Return the text, if one is kept that is still right; else an empty string."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        file = _file(environ)
        facts = os.stat(file)
        kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        is_right = facts.st_uid == os.geteuid() and not _has_variables(environ) and kept["place"] == _place()
        if is_right and all(_stamp(path) == stamp for path, stamp in kept["files"].items()):
            return str(kept["text"])
    return ""


def keep(text: str, environ: Mapping[str, str] = os.environ) -> None:
    """Keep a text that was just made; where it cannot be, it is made anew next time."""
    if _has_variables(environ):
        return
    with suppress(OSError):
        file = _file(environ)
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        whole = json.dumps({"place": _place(), "files": {path: _stamp(path) for path in _sources()}, "text": text})
        room = file.with_name(f"{file.name}.{os.getpid()}")
        room.write_text(whole, encoding="utf-8")
        os.replace(room, file)


def _file(environ: Mapping[str, str]) -> Path:
    """Return the file: one for each environment of Python."""
    name = "".join(char if char.isalnum() else "-" for char in sys.prefix)
    return cache_directory("help", environ) / f"{name}.json"


def _has_variables(environ: Mapping[str, str]) -> bool:
    return any(name.startswith("TRENCADIS_") for name in environ)


def _place() -> list[Any]:
    """Return what the text depends on beside files: which Python, and how wide it is shown."""
    return [sys.version, sys.path[1:], shutil.get_terminal_size().columns]


def _sources() -> list[str]:
    """Return folders where packages are installed, and the files of all modules that are imported but Python's own."""
    folders = [path for path in sys.path[1:] if path.endswith("-packages")]
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    own = [
        file for file in files if file.endswith(".py") and not file.startswith(os.path.dirname(os.__file__) + os.sep)
    ]
    return sorted(path for path in {*folders, *own, os.path.dirname(__file__)} if os.path.exists(path))


def _stamp(path: str) -> list[int]:
    facts = os.stat(path)
    return [facts.st_mtime_ns, facts.st_size]
