from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import attrs
import msgspec
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis.config import load_config
from trencadis.config.dump import dump_config
from trencadis.config.schema import setting
from trencadis.config.settings import settings_of


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@attrs.frozen(kw_only=True)
class Inner:
    depth: int = 3


@attrs.frozen(kw_only=True)
class Odd:
    """Every shape of value that a component's table may hold."""

    needed: int
    colour: Colour = Colour.RED
    place: Path = Path("/tmp")
    maybe: int | None = 4
    many: tuple[str, ...] = ("a",)
    table: dict[str, int] = attrs.field(factory=dict)
    secret: str = setting("", "Hush.", secret=True)
    inner: Inner = attrs.field(factory=Inner)


@attrs.frozen(kw_only=True)
class Replay:
    """A table of a plugin's own."""

    api_keys: tuple[str, ...] = ()


COMPONENTS: Any = {"replay": Replay, "scheduling": {"odd": Odd, "plain": Inner}, "observer": {"plain": Inner}}
TEXT = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8)

INTEGERS = st.integers(-(2**63), 2**64 - 1)  # what msgpack, and TOML, can hold


def reloaded(config: Any) -> Any:
    tables = msgspec.msgpack.decode(msgspec.msgpack.encode(dump_config(config)))  # as it travels
    return load_config(components=COMPONENTS, environ={}, overrides=tables).config


ODD = st.fixed_dictionaries(
    {"needed": st.integers(-5, 5)},
    optional={
        "colour": st.sampled_from(["red", "blue"]),
        "place": TEXT,
        "maybe": st.none() | INTEGERS,
        "many": st.lists(TEXT, max_size=3),
        "table": st.dictionaries(TEXT, st.integers(-(2**60), 2**60), max_size=2),
        "secret": TEXT,
        "inner": st.fixed_dictionaries({}, optional={"depth": st.integers(0, 9)}),
    },
)
OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "model": st.fixed_dictionaries({}, optional={"path": TEXT.filter(str.strip), "trust_remote_code": st.booleans()}),
        "engine": st.fixed_dictionaries({}, optional={"max_wait_s": st.floats(0.1, 1e9), "seed": st.integers(0, 2**60)}),
        "cache": st.fixed_dictionaries({}, optional={"key": TEXT, "memory_fraction": st.floats(0.01, 1)}),
        "replay": st.fixed_dictionaries({}, optional={"api_keys": st.lists(TEXT, max_size=3)}),
        "plugins": st.fixed_dictionaries({}, optional={"blocked": st.lists(TEXT, max_size=3)}),
        "observer": st.fixed_dictionaries({}, optional={"names": st.lists(st.sampled_from(["plain", "log"]))}),
        "scheduling": st.one_of(
            st.fixed_dictionaries({"name": st.just("odd"), "odd": ODD}),
            st.fixed_dictionaries({"name": st.just("plain"), "plain": st.fixed_dictionaries({"depth": INTEGERS})}),
            st.fixed_dictionaries({
                "name": st.just("pack.module:Policy"),
                "options": st.dictionaries(st.sampled_from(["a", "b"]), INTEGERS | TEXT | st.lists(INTEGERS)),
            }),
        ),
    },
)  # fmt: skip


@settings(phases=[Phase.explicit, Phase.generate], max_examples=150)
@given(overrides=OVERRIDES)
def test_a_dumped_configuration_loads_as_an_equal_one(overrides: dict[str, Any]) -> None:
    config = load_config(components=COMPONENTS, environ={}, overrides=overrides).config
    assert reloaded(config) == config


def test_every_setting_is_dumped_secrets_included() -> None:
    tables = dump_config(load_config(environ={}, overrides={"cache.key": "hush"}).config)
    for one in settings_of():
        assert one.key in tables[one.table], one.path
    assert tables["cache"]["key"] == "hush"


def test_a_component_without_a_required_value_stays_left_out() -> None:
    config = load_config(components=COMPONENTS, environ={}, overrides={}).config
    assert "odd" not in dump_config(config)["scheduling"]
    assert reloaded(config) == config
