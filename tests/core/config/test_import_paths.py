"""Import paths: followed where the operator wrote them, refused where anybody else did."""

from __future__ import annotations

from typing import Any

import pytest

from trencadis.config import ConfigFile
from trencadis.config.import_paths import import_paths_in
from trencadis.errors import ImportPathRefusedError, TrencadisError
from trencadis.registry import load_with_plugins

TABLES: tuple[dict[str, Any], ...] = (
    {"scheduling": {"name": "os:system"}},
    {"scheduling": {"fallback": "os:system"}},
    {"scheduling": {"shadow": "os:system"}},
    {"scheduling": {"name": "fair_share", "fair_share": {"inner": "os:system"}}},
    {"scheduling": {"name": "shortest_first", "shortest_first": {"predictor": "os:system"}}},
    {"scheduling": {"name": "os:system", "options": {"command": "true"}}},
    {"observer": {"names": ["stderr", "os:system"]}},
    {"sampling": {"standard": {"processors": ["os:system"]}}},
    {"sampling": {"standard": {"chain": ["temperature", "os.path:join"]}}},
    {"kv_connector": {"name": "no-identifier:but still named"}},
    {"kv_connector": {"tiered": {"children": ["host_offload", "os:system"]}}},
    {"eviction": {"name": "os:system"}},
    {"backend": {"name": "os:system"}},
    {"executor": {"name": "os:system"}},
    {"router": {"name": "os:system"}},
)


@pytest.mark.parametrize("tables", TABLES, ids=str)
def test_of_somebody_else_they_are_refused_before_anything_is_imported(tables):
    with pytest.raises(ImportPathRefusedError) as caught:
        load_with_plugins(file=ConfigFile(tables, name="a.flight"), environ={})
    assert "(from a.flight): it would import " in str(caught.value)


@pytest.mark.parametrize("tables", TABLES, ids=str)
def test_of_the_operator_they_are_taken_wherever_they_stand(tables, tmp_path):
    for given in ({"file": ConfigFile(tables, name="serve.toml", may_import=True)}, {"overrides": tables}):
        found = None
        try:
            load_with_plugins(environ={}, **given)
        except TrencadisError as error:
            found = error
        assert not isinstance(found, ImportPathRefusedError)


def test_of_flags_and_the_environment_they_are_the_operators():
    path = "trencadis_testing.engines:ServeInOrder"
    by_flag, _ = load_with_plugins(environ={}, flags=[f"--scheduling.name={path}"])
    by_variable, _ = load_with_plugins(environ={"TRENCADIS_SCHEDULING__NAME": path})
    assert by_flag.config.scheduling.name == by_variable.config.scheduling.name == path


@pytest.mark.parametrize("text", ["127.0.0.1:8000", "redis://host:6379/0", "a: b c", "C:/models", "10:30", "", "plain"])
def test_an_address_or_a_sentence_in_an_option_is_no_import_path(text):
    assert not list(import_paths_in([text, {"key": text}]))


@pytest.mark.parametrize("text", ["os:system", " os : system ", "a.b.c:D.e", "Ünïcode:Klasse"])
def test_what_python_could_import_is_one_however_deep_it_lies(text):
    assert list(import_paths_in({"a": [({"b": {text: 1}},)]})) == [text]
