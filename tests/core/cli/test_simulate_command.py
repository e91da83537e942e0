from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from trencadis.cli.main import main

SMALL = ["--model.path", "demo", "--workload", "poisson", "--max-requests", "40", "--rate", "8"]


def simulated(capsys, *arguments: str) -> str:
    assert main(["simulate", *SMALL, *arguments]) == 0
    return capsys.readouterr().out


def test_a_table_says_what_came_of_the_workload(capsys) -> None:
    out = simulated(capsys, "--replicas", "2", "--router.name", "least_loaded")
    assert "requests answered" in out
    assert "40 of 40" in out
    for measure in ("TTFT", "TPOT", "prompt tokens from caches", "saturated", "were skipped", "engine seconds"):
        assert measure in out


def test_equal_commands_print_equal_json_and_flags_count(capsys) -> None:
    first = simulated(capsys, "--replicas", "2", "--json")
    assert simulated(capsys, "--replicas", "2", "--json") == first
    told = json.loads(first)
    assert (told["num_replicas"], told["num_answered"], told["num_moved"]) == (2, 40, 0)
    fewer = json.loads(simulated(capsys, "--replicas", "2", "--json", "--engine.max_num_seqs", "1"))
    assert fewer["ttft_s"]["mean"] > 2 * told["ttft_s"]["mean"]


def test_a_run_of_one_seed_says_so_and_a_recorded_trace_has_none(capsys, tmp_path: Path) -> None:
    words = "One seed: requests were drawn from seed 3 alone; others give other numbers. Run others with --seed"
    assert words in simulated(capsys, "--seed", "3", "--max-requests", "8")
    assert words in json.loads(simulated(capsys, "--seed", "3", "--max-requests", "8", "--json"))["notes"][0]
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,20,4\n2023-11-16 18:15:50.99,30,5\n"
    )
    assert "One seed" not in simulated(capsys, "--workload", str(trace))
    drafts = ("--speculation.name", "ngram", "--drafts", "0.5")
    assert "One seed: which drafts are right were drawn" in simulated(capsys, "--workload", str(trace), *drafts)


def test_events_come_from_a_file_and_a_wrong_one_is_refused_in_words(capsys, tmp_path: Path) -> None:
    file = tmp_path / "events.toml"
    file.write_text('[[event]]\ntime_s = 1.0\nreplica = 1\nkind = "drain"\n')
    told = json.loads(simulated(capsys, "--replicas", "2", "--json", "--events", str(file)))
    assert told["request_imbalance"] > 1.4
    file.write_text('[[event]]\ntime_s = 1.0\nreplica = 1\nkind = "explode"\n')
    assert main(["simulate", *SMALL, "--events", str(file)]) == 2
    assert "which is one of fail, drain, join" in capsys.readouterr().err


def test_drafts_count_and_a_speculator_that_nothing_is_known_of_is_refused_in_words(capsys, tmp_path: Path) -> None:
    ngram = ("--max-requests", "8", "--speculation.name", "ngram")
    assert main(["simulate", *SMALL, *ngram]) == 2
    assert "nothing says how often its drafts are right" in capsys.readouterr().err
    file = tmp_path / "drafts.toml"
    file.write_text("[ngram]\nacceptance_by_position = [0.8, 0.6]\nfound = 0.9\nstep_s = 1e-4\n")
    told = json.loads(simulated(capsys, *ngram, "--json", "--drafts", str(file)))
    plain = json.loads(simulated(capsys, "--max-requests", "8", "--json"))
    assert told["num_draft_tokens"] > told["num_accepted_tokens"] > 200
    assert told["tpot_s"]["mean"] < 0.8 * plain["tpot_s"]["mean"]


def test_requests_that_are_too_long_are_counted_and_the_first_says_why(capsys) -> None:
    out = simulated(capsys, "--cache.num_blocks", "40")
    assert "requests have no answer; the first: request" in out


@pytest.mark.parametrize("missing", [["--workload", "nowhere.toml"], ["--step-times", "nothing"]])
def test_a_workload_or_model_that_is_none_is_refused(capsys, missing) -> None:
    assert main(["simulate", *SMALL, *missing]) == 2
    assert missing[1] in capsys.readouterr().err


def test_times_of_tokens_are_a_column_if_they_are_asked_for(capsys, tmp_path) -> None:
    file = tmp_path / "requests.csv"
    simulated(capsys, "--requests", str(file))
    without = list(csv.DictReader(file.read_text().splitlines()))
    simulated(capsys, "--requests", str(file), "--token-times")
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [{**row, "token_times_s": "", "max_itl_s": ""} for row in rows] == [
        {**row, "token_times_s": ""} for row in without
    ]
    for row in rows:
        times_s = [float(word) for word in row["token_times_s"].split()]
        assert len(times_s) == int(row["num_output_tokens"])
        assert (times_s[0], times_s[-1]) == (float(row["first_token_s"]), float(row["finished_s"]))


def test_a_kv_store_is_simulated_and_a_connector_that_moves_bytes_is_named_as_left_out(capsys) -> None:
    store = ["--plugins.experimental", "--kv-connector.name", "simulated_store", "--kv-policy.name", "always"]
    out = simulated(capsys, *store, "--replicas", "2")
    assert "KV loaded" in out
    assert "links to KV stores" in out
    told = json.loads(simulated(capsys, *store, "--json"))
    assert told["kv"]["num_tokens_saved"] > 0
    assert not [note for note in told["notes"] if "moves bytes" in note]
    out = simulated(capsys, "--kv-connector.name", "host_offload")
    assert 'name = "host_offload" moves bytes' in out
    assert "KV loaded" not in out


def test_an_experimental_store_has_to_be_asked_for(capsys) -> None:
    assert main(["simulate", *SMALL, "--kv-connector.name", "simulated_store"]) == 2
    assert "--plugins.experimental" in capsys.readouterr().err
