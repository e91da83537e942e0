"""Freeze the options of stable components: names, types and defaults, in tests/plugins/stable_options.json.

`python tools/stable_options.py` adds what is new; it changes and removes nothing, since that is what a stable component promises.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import attrs

from trencadis.config.attribution import demand
from trencadis.config.convert import describe_type
from trencadis.config.dump import dump_options
from trencadis.config.settings import settings_of_table
from trencadis.registry import Registry

FILE = Path(__file__).resolve().parents[1] / "tests" / "plugins" / "stable_options.json"

Options = dict[str, dict[str, Any]]
"""Type, default and choices of each option by its key; a required one has no default, and one that takes any value no choices."""


def options_of(config: type[Any]) -> Options:
    """Return the options of a config class as the file has them."""
    found: Options = {}
    for setting in settings_of_table("x", config):
        option: dict[str, Any] = {"type": describe_type(setting.type)}
        if setting.default is not attrs.NOTHING:
            option["default"] = dump_options({"default": setting.default})["default"]
        wanted = demand(setting.attribute.validator)
        if wanted.startswith("one of: "):
            option["choices"] = wanted.removeprefix("one of: ").split(", ")
        found[setting.path.removeprefix("x.")] = option
    return dict(json.loads(json.dumps(found)))


def broken_promises(frozen: Options, present: Options) -> list[str]:
    """Return in words what a stable component's present options break of its frozen ones; empty: nothing."""
    found = []
    for key, before in frozen.items():
        now = present.get(key)
        if now is None:
            found.append(f"{key} was removed")
            continue
        found += [
            f"{key}: {part} was {before.get(part, 'none')!r} and is {now.get(part, 'none')!r}"
            for part in ("type", "default")
            if before.get(part, "none") != now.get(part, "none")
        ]
        gone = [choice for choice in before.get("choices", ()) if choice not in now.get("choices", (choice,))]
        found += [f"{key} no longer takes {choice!r}" for choice in gone]
        if "choices" in now and "choices" not in before:
            found.append(f"{key} takes only {', '.join(now['choices'])}, and took any {before['type']}")
    required = [key for key, option in present.items() if key not in frozen and "default" not in option]
    return found + [f"{key} is new and has no default" for key in required]


def stable_options(registry: Registry) -> dict[str, Options]:
    """Return the options of every stable component of a registry, by noun and name."""
    return {
        f"{noun}.{name}": options_of(item.component.config)
        for noun in registry.nouns
        for name, item in registry.components(noun).items()
        if item.component.stability == "stable" and item.provenance.distribution == "trencadis"
    }


def main() -> int:
    """Add what is new to the file; returns 0."""
    frozen: dict[str, Options] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    for component, options in stable_options(Registry.discover()).items():
        frozen[component] = options | frozen.get(component, {})
    FILE.write_text(json.dumps(frozen, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
