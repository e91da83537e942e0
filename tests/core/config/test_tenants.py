from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trencadis.config import load_config
from trencadis.config.dump import dump_config
from trencadis.config.explain import explain
from trencadis.config.schema import TenantConfig
from trencadis.errors import ConfigError


def tenants(file: Path | None = None, **sources: Any) -> Any:
    return load_config(file=file, environ=sources.pop("environ", {}), **sources).config.scheduling.tenants


def test_tables_by_tenant_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        "[scheduling.tenants.alice]\nweight = 2\nmax_waiting = 100\n"
        '[scheduling.tenants."team-1"]\npriority = -5\n[scheduling.tenants.default]\nmax_waiting_tokens = 7\n'
    )
    assert tenants(file) == {
        "alice": TenantConfig(weight=2.0, max_waiting=100),
        "team-1": TenantConfig(priority=-5),
        "default": TenantConfig(max_waiting_tokens=7),
    }


def test_they_are_read_from_flags_environment_and_python_too() -> None:
    expected = {"alice": TenantConfig(weight=2.5)}
    assert tenants(flags=["--scheduling.tenants", "{alice = {weight = 2.5}}"]) == expected
    assert tenants(environ={"TRENCADIS_SCHEDULING__TENANTS": "{alice = {weight = 2.5}}"}) == expected
    assert tenants(overrides={"scheduling": {"tenants": {"alice": {"weight": 2.5}}}}) == expected


def test_they_are_shown_as_toml_would_write_them() -> None:
    shown = "{a = {weight = 2.0, priority = 0, max_waiting = 0, max_waiting_tokens = 0}}"
    resolved = load_config(environ={}, overrides={"scheduling": {"tenants": {"a": {"weight": 2}}}})
    assert [row.value for row in explain(resolved) if row.path == "scheduling.tenants"] == [shown]


def test_another_process_gets_the_same() -> None:
    config = load_config(environ={}, overrides={"scheduling": {"tenants": {"a": {"weight": 2.0}}}}).config
    assert load_config(environ={}, overrides=dump_config(config)).config == config


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"weight": 0}, ["tenants", "alice", "weight", "> 0"]),
        ({"weight": "2"}, ["alice", "weight", "must be a number"]),
        ({"wieght": 2}, ["alice", "wieght", "weight"]),
        ({"max_waiting": -1}, ["alice", "max_waiting", ">= 0"]),
        (3, ["alice = 3 must be a table"]),
    ],
)
def test_a_wrong_entry_is_refused_with_tenant_key_and_what_it_must_be(entry: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        tenants(overrides={"scheduling": {"tenants": {"alice": entry}}})
    for word in words:
        assert word in str(caught.value)
