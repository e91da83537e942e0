from __future__ import annotations

import logging

import attrs
import pytest

from trencadis.config import load_config
from trencadis.config.settings import settings_of
from trencadis.config.unknown_variables import unknown_variables
from trencadis.errors import UnknownKeyError

SHAPE = "Settings are named TRENCADIS_TABLE__KEY, with two underscores between table and key."


@attrs.frozen(kw_only=True)
class OtherConfig:
    """Table ``[bucketing.other]``: a table with a key of another one's name, and a name of other software like ours."""

    limit: int = attrs.field(default=0, metadata={"aliases": "TRENCADIS_OLD_LIMIT"})
    port: int = 0


@attrs.frozen(kw_only=True)
class ServerTable:
    """Table ``[server]``, of a plugin's own."""

    port: int = 0
    api_keys: tuple[str, ...] = ()


@pytest.fixture
def settings(components):
    return settings_of(
        {**components, "server": ServerTable, "bucketing": {**components["bucketing"], "other": OtherConfig}}
    )


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("TRENCADIS_API_KEYS", 'Did you mean "TRENCADIS_SERVER__API_KEYS"?'),
        ("TRENCADIS_PORT", 'Did you mean "TRENCADIS_SERVER__PORT"?'),
        ("TRENCADIS_MODEL", 'Did you mean "TRENCADIS_MODEL__PATH"?'),
        ("TRENCADIS_CONFG", 'Did you mean "TRENCADIS_CONFIG"?'),
        # Two tables have it, neither further out.
        ("TRENCADIS_LIMIT", SHAPE),
        ("TRENCADIS_HOME", SHAPE),
    ],
)
def test_a_variable_that_belongs_to_nothing_is_found_with_what_may_be_meant(settings, name, advice):
    assert unknown_variables({name: "x", "HOME": "/root"}, settings) == {name: advice}


@pytest.mark.parametrize(
    "name",
    [
        "TRENCADIS_CONFIG",
        "TRENCADIS_BLOCKED_PLUGINS",
        "TRENCADIS_SERVER__PORT",
        "TRENCADIS_OLD_LIMIT",
        # An error, which is not told twice.
        "TRENCADIS_SERVER_PORT",
    ],
)
def test_variables_that_mean_something_are_no_strangers(settings, name):
    assert unknown_variables({name: "x"}, settings) == {}


def test_loading_warns_once_of_each_and_keeps_its_value_untold(caplog):
    with caplog.at_level(logging.WARNING, "trencadis"):
        load_config(
            components={"server": ServerTable},
            environ={"TRENCADIS_API_KEYS": "s3cret", "TRENCADIS_PORT": "tcp://10.0.0.7:8000"},
        )
    assert caplog.messages == [
        'environment TRENCADIS_API_KEYS has no effect. Did you mean "TRENCADIS_SERVER__API_KEYS"?',
        'environment TRENCADIS_PORT has no effect. Did you mean "TRENCADIS_SERVER__PORT"?',
    ]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("TRENCADIS_SCHEDULING", "TRENCADIS_SCHEDULING__NAME"),
        ("TRENCADIS_LOG", "TRENCADIS_LOG__KEY"),
        ("TRENCADIS_ENGINE", "TRENCADIS_ENGINE__KEY"),
    ],
)
def test_a_variable_that_names_a_whole_table_is_refused(name, meant):
    with pytest.raises(UnknownKeyError, match=rf'environment {name}: .* is a table .* Did you mean "{meant}"\?'):
        load_config(environ={name: "mlfq"})
