from __future__ import annotations

import json

from trencadis.config import load_config
from trencadis.config.explain import as_json, explain


def _rows(components, **arguments):
    return {row.path: row for row in explain(load_config(components=components, environ={}, **arguments))}


def test_a_row_has_value_source_unit_and_meaning(components):
    row = _rows(components, flags=["--bucketing.tiles.limit", "12"])["bucketing.tiles.limit"]
    assert (row.value, row.source, row.unit, row.meaning) == (
        "12",
        "flag --bucketing.tiles.limit",
        "tiles",
        "Most tiles.",
    )


def test_every_setting_has_a_row(components):
    resolved = load_config(components=components, environ={})
    assert [row.path for row in explain(resolved)] == [setting.path for setting in resolved.settings]


def test_a_secret_that_is_set_is_starred_and_one_that_is_not_is_empty(components):
    assert _rows(components, overrides={"cache.key": "hunter2"})["cache.key"].value == "***"
    assert _rows(components)["cache.key"].value == '""'


def test_a_required_value_that_nobody_gave_says_so(components):
    assert _rows(components)["kv_connector.store.url"].value == "(required)"


def test_options_of_a_component_by_import_path_are_explained(components):
    row = _rows(components, overrides={"scheduling": {"name": "a:B", "options": {"limit": 3}}})[
        "scheduling.options.limit"
    ]
    assert (row.value, row.source) == ("3", "argument")


def test_json_holds_the_same_rows(components):
    rows = explain(load_config(components=components, environ={}))
    assert [item["path"] for item in json.loads(as_json(rows))] == [row.path for row in rows]
    assert set(json.loads(as_json(rows))[0]) == {"path", "value", "source", "unit", "meaning"}
