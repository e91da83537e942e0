"""The pages for people who come from another engine: every name of ours in their tables exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import attrs
import pytest

import trencadis
from docs_pages import PAGES
from docs_pages.configuration import built_in_settings
from trencadis.cli.main import all_commands
from trencadis.config.reference import describe
from trencadis.config.settings import Setting
from trencadis.registry import Registry
from trencadis.registry.manager import PluginLoader

ROOT = Path(__file__).parents[2]


NONE = "—"


def rows(page: str) -> list[tuple[str, list[str]]]:
    """Return, for each row of the page's tables, the other engine's cell and the names of ours in the next one."""
    found = []
    for line in (ROOT / "docs/do" / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and cells[1] != "Trencadís":
            assert len(cells) == 3, line
            found.append((cells[0], [] if cells[1] == NONE else re.findall(r"`([^`]+)`", cells[1])))
            assert found[-1][1] or cells[1] == NONE, f"{line}: neither a name nor a dash"
    return found


@cache
def listed(page: str) -> set[str]:
    """Return the names in the first column of a generated page's tables, those of fields only if they are honoured."""
    lines = [line for line in PAGES[page]().splitlines() if " refused " not in line and "| ignored |" not in line]
    return {name for line in lines if line.startswith("| `") for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])}


def exists(name: str) -> bool:
    """Return whether a name on a page is one of ours: a setting, a value of one, a metric, a field, a command, a member."""
    settings = built_in_settings()
    path, _, value = name.partition(" = ")
    setting = settings.get(path)
    if setting is not None:
        return not value or is_a_value(setting, value.strip('"'))
    if name.startswith(("trencadis ", "TRENCADIS_")):
        command = name.removeprefix("trencadis ").split()[0]
        return command in all_commands(PluginLoader.of_installed()).commands or name in {
            one.environment for one in settings
        }
    if "." in name and "(" not in name:
        owner, member = name.split(".")
        held = getattr(trencadis, owner)
        return hasattr(held, member) or (attrs.has(held) and member in {field.name for field in attrs.fields(held)})
    if name.startswith("LLM("):
        noun, key = re.findall(r"(\w+)=\{\"(\w+)\"", name)[0]
        return settings.get(f"{noun}.{key}") is not None
    routes = {route.split()[-1] for route in listed("http-api.md")}
    return name in listed("metrics.md") | listed("http-api.md") | routes


def is_a_value(setting: Setting, value: str) -> bool:
    """Return whether a setting may have a value: a component of its noun, one of its choices, or one its help names."""
    noun, _, key = setting.path.partition(".")
    if key == "name":
        return value in Registry.discover(strict=True).components(noun)
    return value in re.findall(r"\w+", f"{describe(setting)} {setting.help}")


@pytest.mark.parametrize("page", ["from-vllm.md", "from-vllm-gaudi.md"])
def test_names_of_ours_exist_and_none_of_theirs_has_two_rows(page: str) -> None:
    table = rows(page)
    assert len(table) > 40
    assert [name for _, names in table for name in names if not exists(name)] == []
    theirs = [cell for cell, _ in table if cell != NONE]
    assert sorted(theirs) == sorted(set(theirs))


@pytest.mark.parametrize(
    "name",
    ["engine.max_num_seq", 'scheduling.name = "fifo"', "vllm:no_such", "tools", "LLM.sleep", "trencadis sleep"],
)
def test_a_wrong_name_would_be_found(name: str) -> None:
    assert not exists(name)


def test_every_variable_that_is_read_is_on_the_page_for_gaudi() -> None:
    """A variable is named whole, or by the pattern of its family."""
    page = (ROOT / "docs/do/from-vllm-gaudi.md").read_text(encoding="utf-8")
    names = {name for name in listed("configuration/other-names.md") if re.fullmatch(r"[A-Z0-9_]+", name)}
    names = {name for name in names if "BUCKET_" not in name and name != "VLLM_LOGGING_LEVEL"}
    assert [name for name in names if f"`{name}" not in page] == []


def test_every_metric_under_vllms_name_is_on_its_page() -> None:
    page = (ROOT / "docs/do/from-vllm.md").read_text(encoding="utf-8")
    ours = {name for name in listed("metrics.md") if name.startswith("vllm:")}
    assert len(ours) > 20
    assert {name for name in ours if f"`{name}`" not in page} == set()
