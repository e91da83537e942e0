from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest

from trencadis.cli import main
from trencadis_tools.bench import EvictionResult

TRACE = [[0, 1, 2], [5, 6], [0, 1, 2], [7, 8], [5, 6]]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    file = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1000 * second, "hash_ids": ids} for second, ids in enumerate(TRACE)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def bench(trace: str, capsys: pytest.CaptureFixture[str]):
    def run(*flags: str) -> str:
        assert main(["bench", "eviction", "--trace", trace, *flags]) == 0
        return capsys.readouterr().out

    return run


def test_table_has_a_row_for_each_policy_and_a_column_for_each_capacity(bench) -> None:
    rows = [line.split() for line in bench("--policies", "lru,two_queue", "--capacity", "4,100").splitlines()]
    assert rows[0] == ["hit", "ratio", "4", "blocks", "100", "blocks"]
    assert [row[:-2] for row in rows[1:]] == [["lru"], ["two_queue"], ["unlimited", "cache"]]
    assert rows[1][-2:] == [f"{2 / 12:.4f}", f"{5 / 12:.4f}"]
    assert rows[3][-2:] == [f"{5 / 12:.4f}"] * 2


def test_every_installed_policy_is_measured_by_default(bench) -> None:
    shown = {line.split()[0] for line in bench("--capacity", "4").splitlines()[1:]}
    assert {"lru", "lfu", "slru", "two_queue", "s3_fifo", "arc", "cost_aware", "ttl"} <= shown


def test_json_has_every_measure_and_what_was_asked_for(bench) -> None:
    printed = json.loads(bench("--policies", "lru", "--capacity", "4,4,9", "--from-s", "2", "--until-s", "4", "--json"))
    assert (printed["from_s"], printed["until_s"], printed["free_order"], printed["chain_order"]) == (
        2.0,
        4.0,
        "tail_first",
        False,
    )
    assert [result["capacity"] for result in printed["results"]] == [4, 9]
    assert set(printed["results"][0]) == {field.name for field in attrs.fields(EvictionResult)}
    assert printed["results"][1]["num_references"] == 3 + 2
    assert printed["unlimited"] == 3 / 5


def test_orders_reach_the_measurement(bench) -> None:
    def hits(*flags: str) -> int:
        printed = json.loads(bench("--policies", "lru", "--capacity", "4", "--json", *flags))
        return printed["results"][0]["num_hits"], printed["results"][0]["num_evictions"]

    tail, head, chained = (
        hits(),
        hits("--free-order", "head_first"),
        hits("--free-order", "head_first", "--chain-order"),
    )
    assert len({tail, head, chained}) == 3


def test_options_of_policies_come_from_the_configuration(bench, tmp_path: Path) -> None:
    """Block 0 is protected by its second use, but not if it takes five."""
    file = tmp_path / "single.jsonl"
    file.write_text("".join(f'{{"timestamp": 0, "hash_ids": [{block}]}}\n' for block in (0, 0, 1, 2, 0)))
    flags = ("--trace", str(file), "--policies", "slru", "--capacity", "2", "--json")
    hits = [
        json.loads(bench(*flags, *more))["results"][0]["num_hits"]
        for more in ((), ("--eviction.slru.protected_uses", "5"))
    ]
    assert hits == [2, 1]


def test_policy_by_import_path_is_measured(bench) -> None:
    assert "trencadis_testing.engines:OldestFirst" in bench("--policies", "trencadis_testing.engines:OldestFirst")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--capacity", "10,x"), "flag --capacity '10,x'"),
        (("--capacity", "0"), "flag --capacity '0'"),
        (("--policies", "lruu"), 'Did you mean "lru"?'),
        (("--from-s", "99"), "no request with blocks from 99 s to inf s"),
        (("--trace", "/nowhere/trace.jsonl"), "no such trace file"),
    ],
)
def test_flags_that_make_no_sense_are_refused_in_words(
    trace: str, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert main(["bench", "eviction", "--trace", trace, *flags]) == 2
    assert message in capsys.readouterr().err


def test_missing_trace_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "eviction"]) == 2
    assert "--trace is missing" in capsys.readouterr().err
