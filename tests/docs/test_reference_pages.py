"""The generated pages are current, and have in them what they promise."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import attrs
import pytest
import torch

from docs_pages import PAGES
from docs_pages.markdown import code_spans, table
from docs_pages.records import with_records
from support.nouns import ALL_NOUNS
from trencadis import errors, hookspecs, interfaces, records
from trencadis.cli.main import all_commands
from trencadis.interfaces import (
    ComponentContext,
    KVSchedulerSide,
    KVWorkerSide,
    LogitsProcessor,
    SampledLogprobs,
    Sampler,
)
from trencadis.interfaces.block_store import BlockStore
from trencadis.records import SamplingParams
from trencadis.registry.manager import PluginLoader

ROOT = Path(__file__).parents[2]


@pytest.mark.representatives(1000)
@pytest.mark.parametrize("name", PAGES)
def test_page_is_current(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert PAGES[name]() == page, "refresh: python tools/write_docs.py"


def section_of(page: str, heading: str) -> str:
    return PAGES[page]().partition(heading)[2].partition("\n#")[0]


def test_every_error_hook_command_and_endpoint_has_a_section_with_what_it_promises() -> None:
    for error in (one for name in errors.__all__ if isinstance(one := getattr(errors, name), type)):
        promised = f"Exit code {error.exit_code}, HTTP status {error.http_status}"
        assert promised in section_of("errors.md", f" `{error.__name__}`\n"), error
    for name in (name for name, one in vars(hookspecs).items() if name.startswith("trencadis_") and callable(one)):
        assert "*Called:*" in section_of("hooks.md", f"### `{name}("), name
    for name in all_commands(PluginLoader.of_installed()).commands:
        assert f"## `trencadis {name}`" in PAGES["commands.md"]()
    for route in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"):
        section = PAGES["http-api.md"]().partition(f"### POST {route}\n")[2].partition("\n### ")[0]
        assert section.count("\n| `") >= 2, route


@pytest.mark.representatives(9)
@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("errors.md", "**Cause:** A misspelt key, flag or environment variable.\n\n**Fix:** Use the suggested name"),
        ("commands.md", "| `--num-requests N` | 32 | requests, all queued at the start |"),
        ("metrics.md", "| `trencadis_time_to_first_token_seconds` | histogram |"),
        ("metrics.md", "| `trencadis_transfer_ended_loads_total` | counter | `end` | "),
        ("python.md", "| `max_tokens` | `16` | "),
        (
            "python.md",
            "### `generate(prompts, sampling_params=None, *, on_refusal='ignore', use_progress=None, priorities=",
        ),
        ("python.md", "| `ttft_targets_s` | Seconds within which"),
        ("python.md", "| `PluginError` | A component cannot be chosen, built or combined with the others. |"),
    ],
)
def test_a_page_has_what_code_and_docstrings_say(page: str, text: str) -> None:
    assert text in PAGES[page]()
    assert not {"Example::", ":meth:"} & set(PAGES["python.md"]().split())


def test_docstrings_become_markdown() -> None:
    assert code_spans("a ``b``\n  of :class:`~x.Y`") == "a `b` of `x.Y`"
    assert table(("a", "b"), [("1|2", "3")]) == "| a | b |\n|---|---|\n| 1\\|2 | 3 |\n"


def records_in(contract: type) -> set[type]:
    """Return the records that a contract's methods take and return."""
    names = {**vars(interfaces), **vars(records), "torch": torch}
    found: set[type] = set()

    def collect(hint: Any) -> None:
        fields = attrs.has(hint) or (isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"))
        if fields and hint is not SamplingParams:  # the page of the Python API has it
            found.add(hint)
        for part in get_args(hint):
            collect(part) if not isinstance(part, list) else [collect(one) for one in part]

    for _, member in inspect.getmembers_static(contract):
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function):
            hints = get_type_hints(function, {**names, **function.__globals__}, include_extras=False)
            for hint in hints.values():
                collect(hint)
    return found


SIDES = {"kv_connector": (KVSchedulerSide, KVWorkerSide), "sampling": (Sampler, LogitsProcessor)}


@pytest.mark.parametrize("noun", ALL_NOUNS)
def test_every_field_of_what_a_contract_s_methods_carry_is_on_a_page_of_plugins(noun: str) -> None:
    pages = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "plugins").glob("*.md")}
    carried = set().union(*map(records_in, SIDES.get(noun, (ALL_NOUNS[noun].contract,))))
    for record in {*carried, ComponentContext, SampledLogprobs}:
        name = record.__name__
        homes = [page for page in pages.values() if f"\n### `{name}`\n" in page]
        assert len(homes) == 1, f"{name} of {noun}: no page, or several, have it"
        section = homes[0].partition(f"\n### `{name}`\n")[2].partition("\n#")[0]
        if "same fields as" not in section:
            fields = (
                [
                    field.name
                    for field in attrs.fields(record)
                    if not (field.inherited and "It has the fields of" in section)
                ]
                if attrs.has(record)
                else list(record._fields)
            )
            assert [field for field in fields if f"| `{field}` | " not in section] == [], name


def test_the_records_that_contracts_carry_are_found() -> None:
    for noun, names in (
        ("scheduling", {"SchedulerView", "Request", "TokenSplit"}),
        ("observer", {"StepStats", "FinishedSequence"}),
        ("draft_length", {"LengthView", "VerifiedStep"}),
    ):
        assert {item.__name__ for item in records_in(ALL_NOUNS[noun].contract)} >= names
    sampling = {item.__name__ for side in SIDES["sampling"] for item in records_in(side)}
    assert sampling >= {"RowStart", "SamplingContext", "Sampled"}


def test_what_new_packages_and_the_pages_import_is_what_the_page_allows() -> None:
    lines = (ROOT / "docs" / "plugins" / "index.md").read_text(encoding="utf-8").splitlines()
    rule = next(line for line in lines if line.startswith("A plugin uses "))
    allowed = {*re.findall(r"`(trencadis[\w.]*)`", rule), "trencadis"}
    sources = [
        *(ROOT / "plugins/trencadis_tools/new_plugin/templates").glob("*.tmpl"),
        # What measures is an application, not a plugin.
        *(path for path in (ROOT / "examples").rglob("*.py") if path.name != "measure.py"),
    ]
    imported = {
        (path.name, module)
        for path in sources
        for module in re.findall(
            r"^\s*(?:from|import) (trencadis[\w.]*)", path.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert len(imported) > 40
    below = ("trencadis_bucketing_fibonacci", "trencadis_token_cap", *(f"{one}." for one in allowed - {"trencadis"}))
    assert {one for one in imported if one[1] not in allowed and not one[1].startswith(below)} == set()


def test_number_of_methods_of_a_store_is_as_its_page_says() -> None:
    words = {5: "five", 6: "six", 7: "seven", 8: "eight"}
    page = (ROOT / "docs" / "plugins" / "kv_connector.md").read_text(encoding="utf-8")
    assert (
        f"`trencadis.interfaces.block_store.BlockStore` has {words[len(BlockStore.__abstractmethods__)]} methods"
        in page
    )


def test_only_the_marked_part_of_a_page_is_made(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Mine\n\n<!-- records of trencadis.records: RowStart; made -->\nold\n<!-- end of records -->\n\nMine too.\n"
    )
    made = with_records(page)
    assert made.startswith("# Mine\n\n<!-- records of trencadis.records: RowStart; made -->\n\n### `RowStart`\n")
    assert made.endswith("|\n\n<!-- end of records -->\n\nMine too.\n")
    assert "old" not in made
    page.write_text(made)
    assert with_records(page) == made


def test_a_page_without_a_marked_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("# Mine\n")
    with pytest.raises(ValueError, match=r"page\.md has no comment '<!-- records of"):
        with_records(tmp_path / "page.md")
