from __future__ import annotations

from typing import Any

import attrs
import pytest

from trencadis.config import load_config
from trencadis.config.dump import dump_config
from trencadis.errors import ComponentConflictError, ContractError, PluginLoadError, UnknownKeyError
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import ConfigTable, HealthCheck, setting
from trencadis.registry import Registry


@attrs.frozen(kw_only=True)
class ReplayConfig:
    """Table ``[replay]``: how traces are sent."""

    speed: float = setting(1.0, "Times the recorded pace.", unit="ratio")


@attrs.frozen(kw_only=True)
class Refuses:
    speed: float = setting(-1.0, "Refused.", validator=attrs.validators.gt(0))


class Offers:
    """A plugin with tables and health checks."""

    def __init__(self, *tables: object, checks: tuple[object, ...] = ()) -> None:
        self._tables, self._checks = tables, checks

    @hookimpl
    def trencadis_tables(self) -> Any:
        return self._tables

    @hookimpl
    def trencadis_health_checks(self) -> Any:
        return self._checks


class Other(Offers):
    """The same, of another plugin."""


REPLAY = ConfigTable(name="replay", config=ReplayConfig)


def registry_of(*plugins: object) -> Registry:
    return Registry.discover(entry_points=(), extra_plugins=plugins)


def test_a_plugins_table_comes_from_every_source_and_travels() -> None:
    settings = registry_of(Offers(REPLAY)).settings
    resolved = load_config(settings=settings, environ={"TRENCADIS_REPLAY__SPEED": "2"}, flags=[])
    assert resolved.config.table("replay", ReplayConfig) == ReplayConfig(speed=2.0)
    assert resolved.sources["replay.speed"] == "environment TRENCADIS_REPLAY__SPEED"
    flagged = load_config(settings=settings, environ={}, flags=["--replay.speed=3"])
    assert flagged.config.table("replay", ReplayConfig).speed == 3.0
    again = load_config(settings=settings, environ={}, overrides=dump_config(flagged.config))
    assert again.config == flagged.config


def test_a_configuration_made_without_the_plugin_has_the_tables_defaults() -> None:
    config = load_config(environ={}).config
    assert config.table("replay", ReplayConfig) == ReplayConfig()
    with pytest.raises(UnknownKeyError, match="replay"):
        load_config(environ={}, overrides={"replay.speed": 2.0})


@pytest.mark.parametrize(
    ("table", "error", "words"),
    [
        (ConfigTable(name="engine", config=ReplayConfig), ContractError, r"\[engine\].*is one of trencadis itself"),
        (ConfigTable(name="bucketing", config=ReplayConfig), ContractError, "is one of trencadis itself"),
        (ConfigTable(name="tables", config=ReplayConfig), ContractError, "is one of trencadis itself"),
        (ConfigTable(name="replay", config=dict), ContractError, "no attrs class"),
        (ConfigTable(name="replay", config=Refuses), PluginLoadError, "speed"),
        ("replay", ContractError, "ConfigTable is expected"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_with_its_plugin(table: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        registry_of(Offers(table))
    assert "Offers" in str(caught.value)


def test_a_table_is_offered_once() -> None:
    with pytest.raises(ContractError, match="twice"):
        registry_of(Offers(REPLAY, REPLAY))
    with pytest.raises(ComponentConflictError, match=r"\[replay\].*Offers.*Other"):
        registry_of(Offers(REPLAY), Other(REPLAY))


@pytest.mark.parametrize("name", ["Replay", "re-play", "", "re play"])
def test_a_name_that_cannot_be_written_in_the_environment_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="table name"):
        ConfigTable(name=name, config=ReplayConfig)


def test_health_checks_are_those_of_the_plugin() -> None:
    check = HealthCheck(name="replay", run=lambda config: ())
    registry = registry_of(Offers(checks=(check,)), Other(checks=("x",)))
    first, second = registry.plugins
    assert registry.health_checks_of(first) == [check]
    with pytest.raises(ContractError, match="HealthCheck is expected"):
        registry.health_checks_of(second)
