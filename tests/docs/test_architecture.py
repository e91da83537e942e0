"""The page of architecture names modules that exist, and leaves out no package."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/why/architecture.md").read_text(encoding="utf-8")
MODULES = sorted(set(re.findall(r"`(trencadis(?:_\w+)?(?:\.\w+)*)`", PAGE)))
ROOMS = [
    path.parent for room in ("core", "plugins", "backends") for path in sorted((ROOT / room).glob("*/__init__.py"))
]


def test_the_modules_of_the_page_can_be_imported_and_every_room_is_among_them() -> None:
    assert len(MODULES) > 40
    for name in MODULES:
        importlib.import_module(name)
    assert [room.name for room in ROOMS if room.name not in MODULES] == []


@pytest.mark.parametrize("package", ["core/trencadis", "core/trencadis/engine"])
def test_every_package_inside_is_on_the_page(package: str) -> None:
    folder = ROOT / package
    inside = [path.parent.relative_to(ROOT / "core") for path in sorted(folder.glob("*/__init__.py"))]
    assert inside
    assert [str(path) for path in inside if str(path).replace("/", ".") not in MODULES] == []
