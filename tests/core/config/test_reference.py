"""The reference of settings, and the list of flags, which is also kept as a file that must match.

Refresh it with ``python -m trencadis config --flags > tests/core/config/flags.txt``.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import attrs
import pytest

from trencadis.config import settings_of
from trencadis.config.reference import describe, flag_names, reference_page, tables_reference
from trencadis.registry import Registry

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def built_in():
    """Settings with the tables of the plugins of this distribution only, whatever else is installed."""
    return Registry.discover(
        entry_points=[point for point in entry_points(group="trencadis") if point.dist.name == "trencadis"]
    ).settings


def test_flags_are_frozen(built_in):
    frozen = (ROOT / "tests/core/config/flags.txt").read_text(encoding="utf-8").splitlines()
    assert flag_names(built_in) == frozen, "refresh: python -m trencadis config --flags > tests/core/config/flags.txt"


def test_the_page_has_every_key_in_its_table(components):
    page = reference_page(settings_of(components))
    assert "| `limit` | a whole number >= 0 | `0` | tiles | Most tiles. |" in page
    assert "### `[bucketing.tiles]`\n\nHow tiles are cut.\n" in page
    assert "| `url` | text | required |  | Where. |" in page


def test_the_page_ends_with_the_names_of_other_software(components):
    names = reference_page(settings_of(components)).split("## Names of ")[1]
    assert "| `OTHER_TRIES` | `kv_connector.store.tries` |" in names


def test_a_component_with_nothing_to_set_says_so():
    from trencadis.interfaces import NoConfig

    assert "### `[eviction.plain]`\n\nNothing to set.\n" in reference_page(
        settings_of({"eviction": {"plain": NoConfig}})
    )


def test_a_class_whose_docstring_names_no_table_is_taken_whole():
    @attrs.frozen(kw_only=True)
    class Plain:
        """how it is done."""

        where: str = attrs.field(
            default=attrs.Factory(lambda self: "here", takes_self=True), metadata={"help": "a | b"}
        )

    page = reference_page(settings_of({"eviction": {"plain": Plain}}))
    assert "How it is done." in page
    assert "| `where` | text | `derived` |  | a \\| b |" in page


def test_choices_are_listed():
    setting = settings_of().get("model.dtype")
    assert setting is not None
    assert describe(setting) == "one of: auto, float32, bfloat16, float16"


def test_tables_of_one_noun_can_be_shown_alone(components):
    text = tables_reference(settings_of(components), nouns={"bucketing"})
    assert text.startswith("## `[bucketing]`\n")
    assert "### `[bucketing.tiles]`" in text
    assert "`[engine]`" not in text
