from __future__ import annotations

import importlib.metadata
import json
import re
import types
from importlib.metadata import EntryPoint

import pytest

import trencadis_kv
from support.nouns import ALL_NOUNS
from support.only_installed import only_installed
from trencadis.cli import main
from trencadis.hookspecs import PROCESSOR_GROUP

pytestmark = pytest.mark.usefixtures("installed")


def _components(capsys, *flags):
    assert main(["plugins", "--json", *flags]) == 0
    listed = json.loads(capsys.readouterr().out)
    return {(row["noun"], row["name"]): row for row in listed["components"]}, listed["plan_hash"]


def test_every_component_is_listed_with_its_role(capsys):
    rows, _ = _components(capsys)
    assert {key: row["role"] for key, row in rows.items()} == {
        ("bucketing", "exact"): "by layout",
        ("bucketing", "exponential"): "by layout",
        ("scheduling", "fair_share"): "active",
        ("scheduling", "fcfs"): "fallback",
        ("scheduling", "other"): "",
        ("eviction", "lru"): "active",
        ("sampling", "standard"): "active",
        ("draft_length", "goodput"): "",
        ("acceptance", "match"): "",
        ("kv_connector", "simulated_store"): "",
        ("kv_codec", "none"): "",
        ("kv_policy", "cost_aware"): "",
        ("router", "prefix_affinity"): "",
        ("backend", "torch"): "active",
        ("executor", "inline"): "active",
        ("observer", "log"): "active",
    }
    assert [key for key, row in rows.items() if row["active"]] == [
        key for key, row in rows.items() if row["role"] == "active"
    ]


def test_the_configuration_decides_what_is_active(capsys):
    rows, _ = _components(capsys, "--scheduling.name", "other", "--bucketing.name=exponential", "--observer.names=")
    assert rows["scheduling", "other"]["active"]
    assert rows["scheduling", "fcfs"]["role"] == "fallback"
    assert rows["bucketing", "exact"]["role"] == "fallback"
    assert rows["observer", "log"]["role"] == ""


def test_capabilities_and_provenance_are_shown(capsys):
    row = _components(capsys)[0]["backend", "torch"]
    assert (row["provides"], row["requires"]) == (["backend.graphs"], [])
    assert (row["distribution"], row["version"], row["plugin"]) == ("", "", "house")
    assert row["summary"] == "The torch one."


def test_the_table_has_one_line_for_each_component(capsys):
    assert main(["plugins"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["noun", "name", "state", "summary"]
    assert lines[0].split() == ["bucketing", "exact", "by", "layout", "The", "exact", "one."]
    assert len(lines) == 20
    assert lines[-1].startswith("flight_recorder  ")
    assert lines[-4] == "no component installed: speculation"


def test_the_wide_table_has_everything(capsys):
    assert main(["plugins", "--wide"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "noun", "name", "state", "default", "stability", "distribution", "version", "requires", "provides", "summary",
    ]  # fmt: skip
    assert re.split(" {2,}", lines[0]) == [
        "bucketing",
        "exact",
        "by layout",
        "yes",
        "provisional",
        "(in code)",
        "The exact one.",
    ]
    assert lines[-6] == "no component installed: speculation"
    assert re.split(" {2,}", lines[-3])[:2] == ["flight_recorder", "defragmenter, swap, transfer"]
    assert lines[-2].startswith("stable contracts: bucketing 1, scheduling 1, eviction 1, ")
    assert lines[-1].startswith("provisional contracts: kv_connector 1, ")


def test_one_noun_is_listed_alone(capsys):
    assert main(["plugins", "scheduling"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "state", "summary"]
    assert [line.split()[0] for line in lines] == ["fair_share", "fcfs", "other"]


def test_an_unknown_noun_is_refused_with_a_suggestion(capsys):
    assert main(["plugins", "schedulin"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        'error: plugins: there is no noun "schedulin". Did you mean "scheduling"? Choose one of: bucketing, '
    )


def test_every_noun_is_listed_even_without_a_component(capsys) -> None:
    assert main(["plugins", "--json"]) == 0
    nouns = json.loads(capsys.readouterr().out)["nouns"]
    assert set(nouns) == set(ALL_NOUNS)
    assert "fcfs" in nouns["scheduling"]
    assert main(["plugins"]) == 0
    printed = capsys.readouterr().out
    assert all(noun in printed for noun in ALL_NOUNS)


def test_a_broken_plugin_is_listed_with_its_reason(capsys, monkeypatch, plugin) -> None:
    broken = types.ModuleType("broken")
    broken.trencadis_bucketings = lambda: ()
    only_installed(monkeypatch, [plugin, broken, trencadis_kv], name="house")
    assert main(["plugins", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["broken"]
    assert row["plugin"] == "broken"
    assert "without @hookimpl" in row["error"]
    assert main(["plugins"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(
        'broken: broken, given in code (plugin "broken") defines trencadis_bucketings without @hookimpl'
    )


def test_installed_logits_processors_are_listed(capsys, monkeypatch) -> None:
    usual = importlib.metadata.entry_points
    point = EntryPoint(name="mine", value="my_package:Mine", group=PROCESSOR_GROUP)
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda *, group: [point] if group == PROCESSOR_GROUP else usual(group=group)
    )
    assert main(["plugins", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["logits_processors"]
    assert (row["name"], row["value"], row["role"]) == ("mine", "my_package:Mine", "")
    assert main(["plugins"]) == 0
    assert "logits processor: mine my_package:Mine of" in capsys.readouterr().out
