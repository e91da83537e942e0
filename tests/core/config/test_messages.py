from __future__ import annotations

import enum
import tomllib
from pathlib import Path

import pytest

from trencadis.config.messages import origin, show, spot, with_origin


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    "value", [True, False, 3, -1.5, 'say "hello"', "Trencadís", ["a", "b"], {"a": 1, "b": [True]}, []], ids=repr
)
def test_a_value_is_shown_as_toml_would_write_it(value):
    assert tomllib.loads(f"value = {show(value)}")["value"] == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Colour.RED, '"red"'),
        (Path("a/b"), '"a/b"'),
        (None, "none"),
        (frozenset({"b", "a"}), '["a", "b"]'),
        ((1, 2), "[1, 2]"),
    ],
)
def test_python_values_are_shown_as_the_toml_they_came_from(value, text):
    assert show(value) == text


def test_a_source_is_named_and_a_default_called_so():
    assert origin("serve.toml") == " (from serve.toml)"
    assert origin("default") == " (the default)"
    assert origin("") == ""


def test_a_key_of_the_top_level_has_no_brackets():
    assert spot("server", 80, "") == "server = 80"


def test_a_secret_is_never_shown():
    assert spot("cache.key", "hunter2", "flag --cache.key", secret=True) == "[cache] key = *** (from flag --cache.key)"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ('[bucketing.from_file] path = "a \\"b: c": no such', '[bucketing.from_file] path = "a \\"b: c" (from flag --x): no such'),
        ("[engine] seed = -1, and more", "[engine] seed = -1 (from environment SEED), and more"),
        # said already, set by nobody, not known, and of another form
        ("[engine] seed = 1 (from serve.toml): no", "[engine] seed = 1 (from serve.toml): no"),
        ("[engine] seed = 123 (from serve.toml): no", "[engine] seed = 123 (from serve.toml): no"),
        ("[engine] warmup = true: no", "[engine] warmup = true: no"),
        ("[engine] other = 1: no", "[engine] other = 1: no"),
        ("no: [engine] seed = 1: no", "no: [engine] seed = 1: no"),
        ("[engine] leaves nothing", "[engine] leaves nothing"),
        # two values that contradict each other
        (
            "[engine] seed = 1: not above [engine] warmup = true, which is so",
            "[engine] seed = 1 (from environment SEED): not above [engine] warmup = true (the default), which is so",
        ),
        ("[engine] other = 1: not [engine] another = 2, but", "[engine] other = 1: not [engine] another = 2, but"),
    ],
)  # fmt: skip
def test_source_is_put_behind_a_value_that_somebody_set(message, said):
    sources = {
        "bucketing.from_file.path": "flag --x",
        "engine.seed": "environment SEED",
        "engine.warmup": "default",
    }
    assert with_origin(message, sources) == said
