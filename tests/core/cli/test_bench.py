"""``trencadis bench``: each kind has every measure in its JSON, a row for each component, and words for what cannot be measured."""

from __future__ import annotations

import argparse
import json
import types
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from support.step_records import TRUE, shapes, steps_of, write_steps
from trencadis.cli import main
from trencadis.errors import ConfigError, ConfigValueError, InvalidRequestError, PluginError
from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, NoConfig
from trencadis.records import StepShape, StepTime
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_testing.doubles import LoopConnector, ScriptedSpeculator
from trencadis_tools.bench import (
    EvictionResult,
    KVResult,
    ScheduleResult,
    ScheduleWorkload,
    SpeculationResult,
    ThroughputResult,
    ThroughputWorkload,
)
from trencadis_tools.commands import bench as bench_command
from trencadis_tools.simulation.step_times import load_step_times

SERVE = "trencadis_testing.engines:ServeInOrder"
OLDEST = "trencadis_testing.engines:OldestFirst"
STORES_SEEN: list[str] = []


@attrs.frozen(kw_only=True)
class InDirectory:
    path: str = ""


def make_loop(config, context):
    if config.path == "nowhere":
        raise ConfigValueError("there is no such place")
    STORES_SEEN.append(config.path)
    assert Path(config.path).parent.is_dir()
    return LoopConnector().pair()


def connectors() -> types.ModuleType:
    parts = {
        "trencadis_kv_connectors": ("mine", make_loop, InDirectory),
        "trencadis_kv_policies": ("always", lambda config, context: KVPolicy(), NoConfig),
        "trencadis_kv_codecs": ("none", lambda config, context: IdentityCodec(), NoConfig),
    }
    plugin = types.ModuleType("connectors")
    for hook, (name, factory, config) in parts.items():
        one = Component(name=name, factory=factory, config=config, summary="One.", interface_version=1)
        setattr(plugin, hook, hookimpl(specname=hook)(lambda one=one: [one]))
    return plugin


@pytest.fixture
def bench(fake_house, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a kind of benchmark on a fake backend and returns what it printed."""

    def run(kind: str, *arguments: str, path: str = "", **tables: str) -> str:
        parser = argparse.ArgumentParser()
        bench_command.add_arguments(parser)
        drafts = {"speculator": lambda: ScriptedSpeculator(lambda tokens: [1, 2, 3])} if kind == "speculation" else {}
        config, registry = fake_house(**drafts)
        if kind == "kv":
            registry.register(connectors())
            config = attrs.evolve(
                config, kv_connector=attrs.evolve(config.kv_connector, components={"mine": InDirectory(path=path)})
            )
        for noun, name in tables.items():
            config = attrs.evolve(config, **{noun: attrs.evolve(getattr(config, noun), name=name)})
        STORES_SEEN.clear()
        assert bench_command.run(parser.parse_args([kind, *arguments]), config, registry) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Traces and records, by the word that stands for each in arguments."""
    rows = [f"2023-11-16 18:15:{second:02}.5000000,{20 + second},{3 + second % 5}" for second in range(12)]
    (tmp_path / "trace.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    blocks = [[0, 1, 2], [5, 6], [0, 1, 2], [7, 8], [5, 6]]
    lines = [json.dumps({"timestamp": 1000 * second, "hash_ids": ids}) for second, ids in enumerate(blocks)]
    (tmp_path / "blocks.jsonl").write_text("\n".join(lines))
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"turns": [f"question {i}"]}) for i in range(6)))
    records = write_steps(steps_of(TRUE, shapes(500), noise=0.02), tmp_path / "steps.jsonl")
    places = {name: str(tmp_path / file) for name, file in (("TRACE", "trace.csv"), ("BLOCKS", "blocks.jsonl"))}
    return {**places, "PROMPTS": str(tmp_path / "prompts.jsonl"), "RECORDS": records}


KV = ("--num-tokens", "20", "--pairs", "2")
LONE = ("--num-requests", "3", "--input-len", "9", "--output-len", "5", "--seed", "7")
EVICTION = ("--trace", "BLOCKS", "--policies", OLDEST, "--capacity", "4,4,9", "--from-s", "2", "--until-s", "4")
SCHEDULE = ("--workload", "TRACE", "--policies", SERVE, "--rate", "3", "--max-requests", "8", "--seed", "5")


@pytest.mark.representatives(10)
@pytest.mark.parametrize(
    ("kind", "arguments", "record", "measured"),
    [
        (
            "throughput",
            LONE,
            ThroughputResult,
            [{"num_requests": 3, "input_len": 9, "seed": 7, "num_output_tokens": 15}],
        ),
        ("schedule", SCHEDULE, ScheduleResult, [{"policy": SERVE, "num_requests": 8}]),
        (
            "kv",
            ("--connectors", "none, mine", *KV),
            KVResult,
            [
                {"connector": name, "num_pairs": 2, "num_same_texts": 2, "num_loaded_tokens": loaded}
                for name, loaded in (("none", 0), ("mine", 16))
            ],
        ),
        ("eviction", EVICTION, EvictionResult, [{"capacity": 4}, {"capacity": 9, "num_references": 3 + 2}]),
        (
            "speculation",
            ("--drafters", "none, fake", "--max-tokens", "6", "--prompts", "PROMPTS", "--max-requests", "4"),
            SpeculationResult,
            [{"drafter": name, "num_prompts": 4, "num_output_tokens": 24} for name in ("none", "fake")],
        ),
    ],
)
def test_json_has_every_measure(bench, files, kind, arguments, record, measured) -> None:
    told = json.loads(bench(kind, *(files.get(word, word) for word in arguments), "--json"))
    results = told if isinstance(told, list) else told.get("results", [told])
    for result, expected in zip(results, measured, strict=True):
        assert set(result) == {field.name for field in attrs.fields(record)}
        assert {name: result[name] for name in expected} == expected
    if kind == "schedule":
        assert told["workload"] == attrs.asdict(ScheduleWorkload(rate=3.0, limit=8, seed=5))
        assert (told["step_time"], told["notes"]) == (attrs.asdict(StepTime()), [])
    if kind == "eviction":
        said = (told["from_s"], told["until_s"], told["free_order"], told["chain_order"], told["unlimited"])
        assert said == (2.0, 4.0, "tail_first", False, 3 / 5)


@pytest.mark.representatives(10)
@pytest.mark.parametrize(
    ("kind", "arguments", "head", "rows"),
    [
        ("schedule", ("--workload", "TRACE", "--policies", f"{SERVE}, fake"), "policy", [SERVE, "fake"]),
        ("schedule", ("--workload", "TRACE"), "policy", ["fake"]),
        ("kv", KV, "connector", ["mine"]),
        ("eviction", ("--trace", "BLOCKS", "--capacity", "4"), "hit ratio", ["fake", "unlimited"]),
        ("eviction", ("--trace", "BLOCKS", "--policies", OLDEST), "hit ratio", [OLDEST, "unlimited"]),
        ("speculation", ("--max-tokens", "6"), "drafter", ["fake"]),
    ],
)
def test_without_json_each_component_has_a_row_and_without_names_all_are_measured(
    bench, files, kind, arguments, head, rows
) -> None:
    first, *lines = bench(kind, *(files.get(word, word) for word in arguments)).splitlines()
    assert first.startswith(head)
    assert [line.split()[0] for line in lines] == rows


@pytest.mark.parametrize(("kind", "workload"), [("throughput", ThroughputWorkload), ("schedule", ScheduleWorkload)])
def test_the_flags_are_the_fields_of_the_workload(kind, workload) -> None:
    parser = argparse.ArgumentParser()
    bench_command.add_arguments(parser)
    args = parser.parse_args([kind])
    names = [field.name for field in attrs.fields(workload) if field.name != "rate"]
    assert workload(**{name: getattr(args, name) for name in names}) == workload()


@pytest.mark.representatives(100)
@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("throughput", ("--num-requests", "0"), "num_requests"),
        ("throughput", ("--input-len", "0"), "input_len"),
        ("throughput", ("--output-len", "0"), "output_len"),
        ("schedule", (), "--workload is missing"),
        ("schedule", ("--workload", "no/such/file.csv"), "no such workload"),
        ("schedule", ("--workload", "TRACE", "--max-requests", "0"), "limit"),
        ("schedule", ("--workload", "TRACE", "--ttft-target-s", "0"), "ttft_target_s"),
        ("schedule", ("--workload", "TRACE", "--step-base-s", "-1"), "base_s"),
        (
            "schedule",
            ("--workload", "TRACE", "--policies", "nope"),
            r'"nope" \(from flag --policies\): no such component',
        ),
        ("kv", ("--num-tokens", "-1"), "num_tokens"),
        ("kv", ("--pairs", "0"), "num_pairs"),
        ("kv", ("--connectors", "mine,mnie"), 'mnie.*Did you mean "mine"'),
        ("eviction", (), "--trace is missing"),
        ("eviction", ("--trace", "BLOCKS", "--capacity", "10,x"), "flag --capacity '10,x'"),
        ("eviction", ("--trace", "BLOCKS", "--capacity", "0"), "flag --capacity '0'"),
        ("eviction", ("--trace", "BLOCKS", "--policies", "fkae"), 'Did you mean "fake"'),
        ("eviction", ("--trace", "BLOCKS", "--from-s", "99"), "no request with blocks from 99 s to inf s"),
        ("eviction", ("--trace", "/nowhere/trace.jsonl"), "no such trace file"),
        ("speculation", ("--max-tokens", "0"), "max_tokens"),
        ("speculation", ("--streams", "0"), "num_streams"),
        ("speculation", ("--temperature", "-1"), "temperature"),
        ("speculation", ("--prompts", "nowhere.jsonl"), r"nowhere\.jsonl"),
        ("speculation", ("--drafters", "fkae"), "fkae"),
        ("fit", (), "needs one of --records and --requests"),
        ("fit", ("--records", "nowhere.jsonl"), r"nowhere\.jsonl"),
        ("fit", ("--records", "RECORDS", "--warm-up", "-1"), "--warm-up is -1"),
        ("fit", ("--records", "RECORDS", "--warm-up", "480"), "16 steps are too few"),
        ("fit", ("--records", "RECORDS", "--leave-out", "speed"), "no coefficient speed"),
        ("fit", ("--records", "RECORDS", "--out", "/nowhere/times.json"), "cannot be written"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_words(bench, files, kind, arguments, message) -> None:
    with pytest.raises((ConfigError, PluginError, InvalidRequestError), match=message):
        bench(kind, *(files.get(word, word) for word in arguments))
    assert STORES_SEEN == []


def test_what_policies_run_without_is_said(bench, files) -> None:
    for flags in ([], ["--json"]):
        told = bench("schedule", "--workload", files["TRACE"], *flags, speculation="ngram", kv_connector="host_offload")
        assert "The policies run without drafts here" in told
        assert "moves bytes, which simulated replicas do not have" in told


def test_step_times_can_be_said(bench, files) -> None:
    arguments = ("--workload", files["TRACE"], "--json", "--max-requests", "1")
    slow = bench("schedule", *arguments, "--step-base-s", "1", "--step-token-s", "0", "--step-context-token-s", "0")
    assert json.loads(slow)["results"][0]["ttft_mean_s"] == 1.0


def test_a_connector_over_a_directory_gets_one_that_is_gone_afterwards(bench, tmp_path: Path) -> None:
    bench("kv", *KV)
    assert len(set(STORES_SEEN)) == 1
    assert not Path(STORES_SEEN[0]).parent.exists()
    bench("kv", *KV, path=str(tmp_path / "mine"))
    assert set(STORES_SEEN) == {str(tmp_path / "mine")}


def test_a_connector_that_cannot_be_used_is_an_error_only_if_it_was_named(bench, capsys) -> None:
    with pytest.raises(ConfigValueError, match="no such place"):
        bench("kv", *KV, "--connectors", "mine", path="nowhere")
    capsys.readouterr()
    assert bench("kv", *KV, "--json", path="nowhere").strip() == "[]"


def test_orders_and_options_of_eviction_reach_the_measurement(capsys, tmp_path: Path, files) -> None:
    def hits(trace: str, *flags: str) -> tuple[int, int]:
        assert main(["bench", "eviction", "--trace", trace, "--json", *flags]) == 0
        (result,) = json.loads(capsys.readouterr().out)["results"]
        return result["num_hits"], result["num_evictions"]

    lru = (files["BLOCKS"], "--policies", "lru", "--capacity", "4")
    orders = [hits(*lru), hits(*lru, "--free-order", "head_first")]
    assert len({*orders, hits(*lru, "--free-order", "head_first", "--chain-order")}) == 3
    # Block 0 is protected by its second use, but not if it takes five.
    single = tmp_path / "single.jsonl"
    single.write_text("".join(f'{{"timestamp": 0, "hash_ids": [{block}]}}\n' for block in (0, 0, 1, 2, 0)))
    slru = (str(single), "--policies", "slru", "--capacity", "2")
    assert [hits(*slru)[0], hits(*slru, "--eviction.slru.protected_uses", "5")[0]] == [2, 1]


def test_a_fit_prints_coefficients_with_units_and_errors_by_kind(bench, files) -> None:
    lines = bench("fit", "--records", files["RECORDS"]).splitlines()
    assert lines[0].startswith("Llama on a processor: 384 steps")
    assert {line.split()[-1] for line in lines if "_s " in line} == {"ms", "µs", "ns"}
    assert [line.split()[0] for line in lines[-4:]] == ["decode", "prefill", "mixed", "all"]


def test_the_file_that_is_written_predicts_what_was_recorded(bench, files, tmp_path) -> None:
    other = write_steps(steps_of(TRUE, shapes(300, seed=9)), tmp_path / "other.jsonl")
    out = str(tmp_path / "times.json")
    flags = ("--records", files["RECORDS"], "--held-out", other, "--out", out, "--device", "a device", "--json")
    told = json.loads(bench("fit", *flags))
    assert told == json.loads(Path(out).read_text())
    provenance = told["provenance"]
    assert (provenance["device"], provenance["num_steps"], provenance["held_out"]) == ("a device", 480, other)
    assert told["errors"]["all"]["num_steps"] == 280
    assert abs(told["errors"]["all"]["step_sum"]) < 0.01
    shape = StepShape(num_decodes=9, num_decode_tokens=9, num_decode_context=4000)
    assert load_step_times(out).device_s(shape) == pytest.approx(TRUE.device_s(shape), rel=0.01)
