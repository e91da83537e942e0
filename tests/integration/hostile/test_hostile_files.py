"""Hostile and damaged files: every command that reads one says in words what is wrong with which file."""

from __future__ import annotations

import contextlib
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trencadis.cli.main import main
from trencadis.errors import TrencadisError
from trencadis.files import MAX_DEPTH, parse_json, parse_toml, read_bytes
from trencadis_gaudi.fp8.measurements import read_measurements
from trencadis_gaudi.fp8.methods import read_quant_config
from trencadis_kv.codecs.key import read_key
from trencadis_plugins.bucketing.from_file import read_bucket_file
from trencadis_server.batch.files import read_output
from trencadis_tools.compare.record import read_record
from trencadis_tools.layout.model import read_plan_file
from trencadis_tools.lock import read_lock
from trencadis_tools.simulation import load_drafts
from trencadis_tools.simulation.events import read_events
from trencadis_tools.simulation.step_times import load_step_times, read_records
from trencadis_tools.workloads import load_workload
from trencadis_torch.parallel import placement, plan

MANY = 100_000
STEPS = (
    '{"format": "trencadis steps 1"}\n'
    '{"now_s": 1, "wall_s": 1, "device_s": 1, "plan_s": 0, "commit_s": 0, "buckets": [], "num_compilations": 0}\n'
)

ANYWHERE: dict[str, bytes] = {
    "nothing": b"",
    "NUL": bytes(100),
    "invalid UTF-8": b"\xff\xfe{}\xc3",
    "half of UTF-8": b'a = "\xc3',
    "a zip": b"PK\x03\x04" + bytes(60),
    "xz of nothing": lzma.compress(b"")[:-5],
    "a number": b"3",
    "a text": b'"x"',
    "a null": b"null",
    "a list": b"[]",
    "an empty object": b"{}",
    "nested lists": b"[" * MANY + b"]" * MANY,
    "nested objects": b'{"a": ' * MANY + b"1" + b"}" * MANY,
    "nested lists in an object": b'{"a": ' + b"[" * MANY + b"]" * MANY + b"}",
    "lists as deep as Python goes": b"[" * 900 + b"]" * 900,
    "nested lists of TOML": b"a = " + b"[" * MANY + b"]" * MANY,
    "a deep key of TOML": b".".join([b"a"] * 5000) + b" = 1",
    "a deep table of TOML": b"[" + b".".join([b"a"] * 5000) + b"]\nx = 1",
    "NaN": b'{"a": NaN}',
    "an infinite number": b'{"a": 1e999}',
    "an integer of 5,000 digits": b'{"a": ' + b"9" * 5000 + b"}",
    "an integer of 400 digits": b"a = " + b"9" * 400,
    "half a character": b'{"a": "\\ud800"}',
    "a line without an end": b"x" * 10**6,
}


def json_of(value: Any) -> bytes:
    return json.dumps(value).encode()


LOCK = {
    "format": 1,
    "plan_hash": "x",
    "versions": {},
    "plugins": {},
    "files": {},
    "components": {},
    "settings": {},
    "model": {},
    "tokenizer": {},
}
TIMES = {"format": "trencadis step times 1", "kind": "linear", "coefficients": {}}
ARRIVAL = {"timestamp": 0, "input_length": 10, "output_length": 10, "hash_ids": [1]}
WRONG: tuple[Any, ...] = (None, True, -1, 0, 10**400, 1.5, float("nan"), float("inf"), "x", "", [], [[]], {}, {"a": {}})


def changed(table: dict[str, Any]) -> Iterator[bytes]:
    """Yield the file once for each key and each value that is wrong or odd there."""
    for key in table:
        yield json_of({name: value for name, value in table.items() if name != key})
        for value in WRONG:
            yield json_of({**table, key: value})


def entries(noun: str, *values: Any) -> Iterator[bytes]:
    for value in values:
        yield json_of({**LOCK, noun: value})


OWN: dict[str, list[bytes]] = {
    "lock": [
        *changed(LOCK),
        *entries("components", {"a": 1}, {"a": {}}, {"a": {"component": 1}}, {"a": {"component": "x", "noun": None}}),
        *entries("plugins", {"a": []}, {"a": {"module": 3}}, {"a": {"distribution": "", "version": ""}}),
        *entries("versions", {"Python": 3}, ["Python"]),
    ],
    "step times": [
        *changed(TIMES),
        *(
            json_of({**TIMES, "coefficients": {"step_s": value}})
            for value in (float("nan"), float("inf"), -1, "x", None, [], 10**400)
        ),
        json_of({**TIMES, "kind": "buckets", "buckets": [[1]], "lines": {"decode": 3}}),
        json_of({**TIMES, "kind": "buckets", "buckets": {"a": 1}, "lines": []}),
    ],
    "trace": [*changed(ARRIVAL), b"TIMESTAMP,ContextTokens,GeneratedTokens\nnan,1,1\n", b"a,b\n1\n", b"," * MANY],
    "written workload": [
        json_of({"workload": value, "block_tokens": value, "seed": value}) + b"\n" + json_of({"arrival_s": value})
        for value in WRONG
    ],
    "workload file": [
        b"[arrivals]\nrate = nan",
        b"[arrivals]\nrate = inf",
        b"num_requests = 1" + b"0" * 30,
        b"num_requests = -1",
        b'base = "bad.file"',
        b"base = 3",
        b"[trace]\nfile = 3",
        b'[trace]\nfile = "\\u0000"',
        b'[trace]\nfile = "."',
        b"arrivals = 3",
        b"prompts = []",
        b'name = ["x"]',
    ],
    "drafts": [
        b"ngram = 3",
        b"[ngram]\nacceptance = nan",
        b'[ngram]\nacceptance = "x"',
        b"[ngram]\nacceptance = [[]]",
        b"[ngram]\nacceptance = 2",
        b"[ngram]\nx = 1",
        b"[ngram]\nacceptance = 0.5\nspread = inf",
        b"[ngram]\nacceptance = 0.5\nstep_s = nan",
    ],
    "events": [
        b"event = 3",
        b"[[event]]",
        b'[[event]]\ntime_s = nan\nreplica = 0\nkind = "fail"',
        b'[[event]]\ntime_s = inf\nreplica = 0\nkind = "fail"',
        b'[[event]]\ntime_s = "x"\nreplica = 0\nkind = "fail"',
        b'[[event]]\ntime_s = 1\nreplica = 1.5\nkind = "fail"',
        b'[[event]]\ntime_s = 1\nreplica = []\nkind = "fail"',
        b"[[event]]\ntime_s = 1\nreplica = 0\nkind = []",
        b"event = [3]",
    ],
    "records": [
        STEPS.encode(),
        b'{"format": "trencadis steps 1"}\n[]\n{}\n',
        b'{"format": "trencadis steps 1"}\n' + b"[" * MANY + b"\n{}\n",
        b'{"format": []}\n',
        b"[]\n",
    ],
    "configuration": [
        b"engine = 3",
        b"[engine]\nseed = nan",
        b"[engine]\nseed = []",
        b"[engine]\nseed = 1" + b"0" * 30,
        b"[scheduling]\nname = []",
        b"[scheduling]\nname = 3",
        b"[scheduling.tenants]\nann = 3",
        b"[scheduling.tenants.ann]\nweight = nan",
        b"[scheduling.tenants.ann]\nweight = [[]]",
        b"[server]\napi_keys = 3",
        b"[server]\napi_keys = [[]]",
        b"[plugins]\nblocked = 3",
        b"[plugins]\nblocked = [[3]]",
        b"[model]\npath = 3",
        b"[observer]\nnames = {}",
    ],
    "record of a comparison": [
        json_of({"format": "trencadis comparison 1", **more})
        for more in (
            {},
            {"comparison": 3},
            {"comparison": {"arguments": 3, "points": []}},
            {"comparison": {"arguments": {"configs": [["a", {}]], "workload": 3}, "points": []}},
            {"comparison": {"arguments": {"configs": [[1, 2]], "workload": "poisson"}, "points": []}},
            {"comparison": {"arguments": {"configs": [], "workload": "poisson"}, "points": 3}},
            {
                "comparison": {
                    "arguments": {"configs": [["a", {"engine": 3}], ["b", {"": 3}]], "workload": "poisson"},
                    "points": [],
                }
            },
            {"comparison": {"arguments": {"configs": [["a", {"x.y": 3}]], "workload": "poisson"}, "points": []}},
            {"comparison": {"arguments": {"configs": [], "workload": "poisson", "rates": ["x"]}, "points": []}},
        )
    ],
    "flight record": [
        b"TRENCADIS-FLIGHT ",
        b"TRENCADIS-FLIGHT 2\n",
        b"TRENCADIS-FLIGHT 99999999999999999999\n",
        b"TRENCADIS-FLIGHT \xb2\n",
    ],
    "bucket file": [b"(1, 1, 1" * MANY, b"(range(0, 10**9), 1, 1)", b"((((1))))", b"1" * MANY],
    "page": [b'trencadis_torch_expert_tokens_total{layer="x",expert="y"} z', b"{" * MANY],
}

SIMULATE = ("simulate", "--workload", "poisson", "--max-requests", "2")
BUCKETS = ("buckets", "--bucketing.name", "from_file", "--bucketing.from_file.strict", "true")
COMMANDS: dict[str, tuple[str, str, list[str]]] = {
    "config": ("configuration", ".toml", ["config", "--config", "FILE"]),
    "plugins": ("configuration", ".toml", ["plugins", "--config", "FILE"]),
    "locked": ("lock", ".lock", ["plugins", "--locked=FILE"]),
    "lock": ("lock", ".lock", ["lock", "--check", "--out", "FILE"]),
    "replay": ("flight record", ".flight", ["replay", "FILE", "--show"]),
    "verify": ("record of a comparison", ".json", ["compare", "--verify", "FILE"]),
    "workload of TOML": ("workload file", ".toml", ["workload", "FILE"]),
    "workload of lines": ("written workload", ".jsonl", ["workload", "FILE"]),
    "trace": ("trace", ".jsonl", ["simulate", "--workload", "FILE", "--max-requests", "2"]),
    "step times": ("step times", ".json", [*SIMULATE, "--step-times", "FILE"]),
    "drafts": ("drafts", ".toml", [*SIMULATE, "--speculation.name", "ngram", "--drafts", "FILE"]),
    "events": ("events", ".toml", [*SIMULATE, "--replicas", "2", "--events", "FILE"]),
    "fit": ("records", ".jsonl", ["bench", "fit", "--records", "FILE"]),
    "blocks": ("trace", ".jsonl", ["bench", "eviction", "--trace", "FILE"]),
    "buckets": ("bucket file", ".txt", [*BUCKETS, "--bucketing.from_file.path", "FILE"]),
    "expert-loads": ("page", ".txt", ["expert-loads", "FILE"]),
}
"""Kind of file, its ending, and the command line."""


def outcome(arguments: list[str], file: str, capsys: pytest.CaptureFixture[str]) -> int:
    """Run a command; whatever it makes of the file, it ends without a traceback, and what it refuses it says in words."""
    capsys.readouterr()
    code = main([file if one == "FILE" else one.replace("=FILE", f"={file}") for one in arguments])
    said = capsys.readouterr().err
    assert "Traceback" not in said, said[-1500:]
    assert code in (0, 1, 2)
    if code == 2:
        assert "error: " in said
        assert len(said) < 20_000
        assert Path(file).stem in said or str(Path(file).parent) in said
    return code


@pytest.mark.representatives(2, ci=len(COMMANDS))
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.nightly)])  # of readers alone, all: below
def test_a_bad_file_is_named_and_described(command, every, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kind, ending, arguments = COMMANDS[command]
    file = tmp_path / f"bad{ending}"
    for content in [*OWN[kind], *ANYWHERE.values()][::every]:
        file.write_bytes(content)
        outcome(arguments, str(file), capsys)


def directory(folder: Path) -> Path:
    (folder / "bad.dir").mkdir()
    return folder / "bad.dir"


def circle(folder: Path) -> Path:
    (folder / "bad.a").symlink_to(folder / "bad.b")
    (folder / "bad.b").symlink_to(folder / "bad.a")
    return folder / "bad.a"


PLACES: dict[str, Callable[[Path], Path]] = {
    "a directory": directory,
    "a circle of links": circle,
    "nothing": lambda folder: folder / "bad.none",
    "a file as a folder": lambda folder: Path(__file__) / "bad.x",
    "a name that is too long": lambda folder: folder / ("bad" * 200),
    "a device without an end": lambda _: Path("/dev/zero"),
    "a device that is full": lambda _: Path("/dev/full"),
}


@pytest.mark.representatives(8, ci=2 * len(COMMANDS))
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_file_is_named_and_described(command, place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, _, arguments = COMMANDS[command]
    assert outcome(arguments, str(PLACES[place](tmp_path)), capsys) == 2


READERS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "plan of layout": (".toml", lambda path: read_plan_file(str(path), "tensor_plan"), ""),
    "plan of layout in JSON": (".json", lambda path: read_plan_file(str(path), "tensor_plan"), ""),
    "plan of torch": (".toml", lambda path: plan.read_plan_file(str(path)), ""),
    "loads of experts": (".json", lambda path: placement.read_loads(str(path)), ""),
    "quantiser of Gaudi": (".json", lambda path: read_quant_config(str(path)), ""),
    "measurements of Gaudi": (".json", lambda path: read_measurements(str(path)), ""),
    "key": (".txt", lambda path: read_key(file=str(path)), ""),
    "output of a batch": (".jsonl", read_output, ""),
    "lock": (".lock", read_lock, "lock"),
    "step times": (".json", load_step_times, "step times"),
    "trace": (".jsonl", lambda path: load_workload(str(path)), "trace"),
    "workload of TOML": (".toml", lambda path: load_workload(str(path)), "workload file"),
    "workload of lines": (".jsonl", lambda path: load_workload(str(path)), "written workload"),
    "drafts": (".toml", lambda path: load_drafts(str(path)), "drafts"),
    "events": (".toml", read_events, "events"),
    "records": (".jsonl", read_records, "records"),
    "record of a comparison": (".json", read_record, "record of a comparison"),
    "buckets": (".txt", lambda path: read_bucket_file(path, strict=True), "bucket file"),
}
"""Files by the function that reads them, with their ending and the kind of files that are wrong for it alone."""


@pytest.mark.representatives(len(READERS))
@pytest.mark.parametrize("name", READERS)
def test_a_reader_raises_nothing_but_an_error_in_words(name, tmp_path):
    ending, read, kind = READERS[name]
    file = tmp_path / f"bad{ending}"
    for content in (*ANYWHERE.values(), *OWN.get(kind, ())):
        file.write_bytes(content)
        with contextlib.suppress(TrencadisError):
            read(file)
    for place in PLACES.values():
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        with contextlib.suppress(TrencadisError):
            read(place(folder))


@pytest.mark.parametrize(
    "text",
    [
        "[" * MANY,
        '{"a":' * MANY,
        "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2),
        "NaN",
        "[1e999]",
        "1" + "0" * 25,
        '"\\udc00"',
    ],
)
def test_the_door_refuses_json_that_no_caller_expects(text):
    with pytest.raises(ValueError, match=r"deep|number|64 bits|character|Expecting|Exceeds"):
        parse_json(text)


@pytest.mark.parametrize(
    "text", ["a = " + "[" * MANY, ".".join("a" * 100) + " = 1", "a = nan", "a = 1" + "0" * 25, "a = 1" + "0" * 5000]
)
def test_the_door_refuses_toml_that_no_caller_expects(text):
    with pytest.raises(ValueError, match=r"deep|number|64 bits|Exceeds|Invalid"):
        parse_toml(text)


def test_the_door_passes_what_is_well_formed():
    value = {
        "a": [1, -2, 1.5e300, "ü\\n", None, True],
        "b": {"c": 2**64, "d": "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")},
    }
    assert parse_json(json.dumps(value)) == value
    assert parse_json("[Infinity]", allows_infinity=True) == [float("inf")]
    assert parse_toml("a = inf\n[b]\nc = [[1]]") == {"a": float("inf"), "b": {"c": [[1]]}}


def test_the_door_reads_no_more_than_it_was_told(tmp_path):
    file = tmp_path / "x"
    file.write_bytes(bytes(11))
    assert len(read_bytes(file, max_bytes=11)) == 11
    with pytest.raises(ValueError, match="more than 10 bytes"):
        read_bytes(file, max_bytes=10)
