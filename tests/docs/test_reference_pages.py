"""The generated pages are current, and have in them what they promise."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
import pytest

from trencadis import errors, hookspecs
from trencadis.cli.main import COMMANDS
from trencadis.interfaces import Sampled, SampledLogprobs, SamplingContext
from trencadis.records import RowStart

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from docs_pages import PAGES  # noqa: E402  (tools/ is no package; its folder has to be on the path first)
from docs_pages.markdown import code_spans, table  # noqa: E402
from docs_pages.records import with_records  # noqa: E402


@pytest.mark.parametrize("name", PAGES)
def test_page_is_current(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert PAGES[name]() == page, "refresh: python tools/write_docs.py"


def test_every_error_has_a_section_with_its_codes() -> None:
    page = PAGES["errors.md"]()
    for name in errors.__all__:
        error = getattr(errors, name)
        if isinstance(error, type):
            section = page.partition(f" `{name}`\n")[2].partition("\n#")[0]
            assert f"Exit code {error.exit_code}, HTTP status {error.http_status}" in section, name


def test_errors_tell_cause_and_fix() -> None:
    page = PAGES["errors.md"]()
    assert "**Cause:** A misspelt key, flag or environment variable.\n\n**Fix:** Use the suggested name" in page


def test_every_hook_has_a_section_that_says_when_it_is_called() -> None:
    page = PAGES["hooks.md"]()
    for name, value in vars(hookspecs).items():
        if name.startswith("trencadis_") and callable(value):
            section = page.partition(f"### `{name}(")[2].partition("\n#")[0]
            assert "*Called:*" in section, name


def test_every_command_has_a_section() -> None:
    page = PAGES["commands.md"]()
    for name in COMMANDS:
        assert f"## `trencadis {name}`" in page
    assert "| `--num-requests N` | 32 | requests, all queued at the start |" in page


def test_metrics_have_kind_labels_and_meaning() -> None:
    page = PAGES["metrics.md"]()
    assert "| `trencadis_output_tokens_total` | counter |" in page
    assert "| `trencadis_finished_sequences_total` | counter | " in page
    assert "`finish_reason`" in page
    assert "| `trencadis_time_to_first_token_seconds` | histogram |" in page
    assert "| `trencadis_transfer_ended_loads_total` | counter | `end` | " in page
    assert "| `trencadis_transfer_held_blocks` | gauge |" in page


def test_docstrings_become_markdown() -> None:
    assert code_spans("a ``b``\n  of :class:`~x.Y`") == "a `b` of `x.Y`"
    assert table(("a", "b"), [("1|2", "3")]) == "| a | b |\n|---|---|\n| 1\\|2 | 3 |\n"


def test_python_page_has_parameters_with_their_defaults_and_methods_with_their_arguments() -> None:
    page = PAGES["python.md"]()
    assert "| `max_tokens` | `16` | " in page
    assert "### `generate(prompts, sampling_params=None, *, priorities=None" in page
    assert "| `PluginError` | A component cannot be chosen, built or combined with the others. |" in page
    assert "Example::" not in page
    assert ":meth:" not in page


@pytest.mark.parametrize("record", [RowStart, SamplingContext, Sampled, SampledLogprobs])
def test_fields_of_what_a_sampler_is_given_and_returns_are_on_its_page(record: type) -> None:
    section = PAGES["plugins/sampling.md"]().partition(f"### `{record.__name__}`\n")[2].partition("\n#")[0]
    assert [field.name for field in attrs.fields(record) if f"| `{field.name}` | " not in section] == []


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


def test_every_endpoint_has_its_fields() -> None:
    page = PAGES["http-api.md"]()
    for route in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize"):
        section = page.partition(f"### POST {route}\n")[2].partition("\n### ")[0]
        assert section.count("\n| `") >= 2, route
