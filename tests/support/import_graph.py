"""Says which modules cannot be imported first, without importing each of hundreds first: ``python import_graph.py PREFIX MODULE ...``.

All are imported once, one behind the other, and every import that runs while a module is loaded is noted. Where these lead back to no
module they came from, whatever is imported first finds all it needs complete, so that the one order that was tried stands for
all. What is left is tried for real, each with everything of ours forgotten:

* modules on a circle of imports: who is first matters,
* modules that say ``import a.b``, and may so use what somebody else has imported beside it.

Prints a line for each module that fails.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any


class ImportGraph:
    """Notes imports.

    Args:
        prefix: How names of our modules begin.

    Attributes:
        needs: What each of our modules imports of ours while it is loaded.
        plain: Those that say ``import a.b`` of ours.
    """

    def __init__(self, prefix: str) -> None:
        self.needs: dict[str, set[str]] = {}
        self.plain: set[str] = set()
        self._prefix = prefix
        self._import = builtins.__import__
        self._import_module = importlib.import_module

    def load(self, names: Iterable[str]) -> None:
        """Import modules."""
        builtins.__import__, importlib.import_module = self._noting, self._noting_module
        try:
            for name in names:
                self.needs.setdefault(name, set())
                try:
                    self._import(name)
                except BaseException as error:
                    sys.stdout.write(f"{name} {error!r}\n")
        finally:
            builtins.__import__, importlib.import_module = self._import, self._import_module

    def circles(self) -> set[str]:
        """Return the modules that lead back to themselves."""
        return {name for name in self.needs if name in set(self._reached(name))}

    def _reached(self, name: str) -> Iterator[str]:
        seen: set[str] = set()
        todo = list(self.needs.get(name, ()))
        while todo:
            one = todo.pop()
            if one not in seen:
                seen.add(one)
                yield one
                todo += self.needs.get(one, ())

    def _noting(self, name: str, *given: Any, **named: Any) -> Any:
        importer = self._loading(sys._getframe(1))
        found = self._import(name, *given, **named)
        names = ("globals", "locals", "fromlist", "level")
        arguments = {**dict(zip(names, given, strict=False)), **named}
        fromlist, level = arguments.get("fromlist") or (), arguments.get("level", 0)
        full = name if not level else found.__name__
        if importer and full.startswith(self._prefix):
            subs = [f"{full}.{one}" for one in fromlist if f"{full}.{one}" in sys.modules]
            self._note(importer, [full, *subs])
            if not fromlist and "." in full:
                self.plain.add(importer)
        return found

    def _noting_module(self, name: str, package: str | None = None) -> Any:
        importer = self._loading(sys._getframe(1))
        found = self._import_module(name, package)
        if importer and found.__name__.startswith(self._prefix):
            self._note(importer, [found.__name__])
        return found

    def _note(self, importer: str, names: Iterable[str]) -> None:
        """Note modules and the packages that are loaded for them, but for those that the importer lies in."""
        needs = self.needs.setdefault(importer, set())
        for name in names:
            parts = name.split(".")
            packages = [".".join(parts[:count]) for count in range(1, len(parts))]
            needs.update(one for one in packages if not importer.startswith(f"{one}.") and one != importer)
            if name != importer:
                needs.add(name)

    def _loading(self, frame: FrameType | None) -> str:
        """Return which module of ours is being loaded, however deep in calls; empty for none."""
        while frame is not None:
            if frame.f_code.co_name == "<module>":
                name = str(frame.f_globals.get("__name__", ""))
                return name if name.startswith(self._prefix) else ""
            frame = frame.f_back
        return ""


def forget(prefix: str) -> None:
    """Forget what belongs to us, so that the next import is the first."""
    for known in [name for name in sys.modules if name.startswith(prefix)]:
        del sys.modules[known]


def main(prefix: str, names: list[str]) -> None:
    """Import all, and those first of which that may matter."""
    graph = ImportGraph(prefix)
    graph.load(names)
    for name in sorted((graph.circles() | graph.plain) & set(names)):
        forget(prefix)
        try:
            importlib.import_module(name)
        except BaseException as error:
            sys.stdout.write(f"{name} {error!r}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
