from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
HOMES = {
    "core/trencadis": "tests/core",
    "plugins/trencadis_plugins": "tests/plugins/trencadis_plugins",
    "backends/trencadis_torch": "tests/backends/trencadis_torch",
    "backends/trencadis_gaudi": "tests/backends/trencadis_gaudi",
}


def test_every_test_file_in_a_mirrored_folder_names_a_source_file_or_package() -> None:
    strays = []
    for room, home in HOMES.items():
        for path in (ROOT / home).rglob("test_*.py"):
            source = ROOT / room / path.relative_to(ROOT / home).parent
            name = path.stem.removeprefix("test_")
            known = {p.stem for p in source.glob("*.py")} | {p.name for p in source.glob("*/")} | {"init", "invariants"}
            if name not in known and source.name != name and not any(name.startswith(f"{k}_") for k in known):
                strays.append(str(path.relative_to(ROOT)))
    assert not strays
