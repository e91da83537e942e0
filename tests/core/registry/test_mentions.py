from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trencadis.config import ConfigFile, load_config, read_config_file
from trencadis.config.dump import dump_config
from trencadis.registry.mentions import mentions_in

NOTHING = ConfigFile()


@pytest.mark.parametrize(
    "sources",
    [
        {"flags": ["--kv_connector.name", "x"]},
        {"flags": ["--kv-connector.name=x"]},
        {"flags": ["--other=KV_Connector"]},
        {"environ": {"TRENCADIS_KV_CONNECTOR__NAME": "x"}},
        {"environ": {"TRENCADIS_BACKEND__NAME": "kv-connector"}},
        {"overrides": {"kv_connector": {"name": "x"}}},
        {"overrides": {"kv_connector.name": "x"}},
        {"overrides": {"kv_connector": {"no_such_key": 0}}},
        {"overrides": {"backend": {"options": [{"deep": ("kv_connector",)}]}}},
        {"file": ConfigFile({"kv_connector": {"name": "none"}})},
        {"file": ConfigFile({"observer": {"names": ["kv_connector:X"]}})},
    ],
)
def test_a_name_counts_wherever_it_stands(sources: dict[str, Any]) -> None:
    mentions = mentions_in(**{"file": NOTHING, "environ": {}} | sources)
    assert mentions("kv_connector")
    assert not mentions("speculation")


@pytest.mark.parametrize(
    "sources",
    [
        {},
        {"flags": ["generate", "--model.path", "x"]},
        {"environ": {"PATH": "/opt/kv_connector", "KV_CONNECTOR": "x"}},
        {"overrides": {"model": {"path": "demo"}}},
        {"overrides": dump_config(load_config(environ={}).config)},
        {"overrides": {"kv_connector": {"name": "none", "simulated_store": {"shared": True}}}},
    ],
    ids=["nothing", "flags", "variables of others", "Python", "all defaults", "a table of another plugin"],
)
def test_what_does_not_stand_there_does_not_count(sources: dict[str, Any]) -> None:
    assert not mentions_in(**{"file": NOTHING, "environ": {}} | sources)("kv_connector")


def test_a_table_with_another_value_than_the_default_counts() -> None:
    tables = dump_config(load_config(environ={}).config)
    tables["speculation"] = {**tables["speculation"], "name": "ngram"}
    mentions = mentions_in(NOTHING, environ={}, overrides=tables)
    assert mentions("speculation")
    assert not mentions("kv_connector")


def test_the_file_that_a_variable_names_is_read(tmp_path: Path) -> None:
    (tmp_path / "serve.toml").write_text('[router]\nname = "x"\n')
    assert mentions_in(environ={"TRENCADIS_CONFIG": str(tmp_path / "serve.toml")})("router")


def test_with_a_file_that_cannot_be_read_everything_counts(tmp_path: Path) -> None:
    assert mentions_in(read_config_file(tmp_path / "none.toml"), environ={})("router")
