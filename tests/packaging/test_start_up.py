from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from trencadis.caches import cache_directory

WATCHED = """
import json, sys, time
import trencadis.startup as startup
from trencadis.__main__ import main
close = startup.Ledger.close
def closed(ledger):
    was_open = close(ledger)
    if was_open:
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        entries = [(one.phase, one.seconds, one.cached) for one in ledger.entries]
        print(json.dumps([now_s, entries, sorted({name.partition(".")[0] for name in sys.modules})]))
    return was_open
startup.Ledger.close = closed
sys.argv = ["trencadis", "generate", "--no-stream", "--max-tokens", "1", "--log.level", "info", "Hello"]
main()
"""
SERVERS = ("fastapi", "starlette", "uvicorn", "pydantic", "opentelemetry")
NOT_CHOSEN = ("redis", "ray", "lmcache", "nixl", "mooncake", "llguidance", "xgrammar", "prometheus_client")
NOT_FOR_TEXT = ("torchvision", "torchaudio", "sklearn", "sentence_transformers", "matplotlib", "pandas", "datasets")
ROUNDED_S = 0.05
PHASES = [
    *("python", "command", "tokenizer", "components", "backend and model", "imports", "weights", "kernels"),
    *("check", "packing", "strategies", "cache and warm-up"),
]
PARTS = {
    ("trencadis.torch", "Loading"): ["imports", "weights", "kernels", "check", "packing"],
    ("trencadis.engine", "The engine"): ["components", "backend and model", "strategies", "cache and warm-up"],
}


def with_kernels(folder: Path) -> Path:
    """Return a cache that has nothing but the kernels that this machine has compiled before."""
    kernels = folder / "cache" / "trencadis" / "native"
    kernels.parent.mkdir(parents=True)
    kernels.symlink_to(cache_directory("native"))
    return folder / "cache"


def started(variables: dict[str, str]) -> tuple[list[tuple[str, float, bool | None]], set[str], str]:
    """Start a command; return the phases of its ledger, which add up to the time since then, modules it imported, and its log."""
    began_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    command = [sys.executable, "-c", WATCHED]
    result = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    ended_s, phases, modules = json.loads(result.stdout.splitlines()[0])
    took_s, whole_s = ended_s - began_s, sum(seconds for _, seconds, _ in phases)
    # To start a process takes a moment, which is none of its own; the system counts in hundredths.
    assert 0.98 * took_s - 0.5 <= whole_s <= took_s + 0.02
    assert re.search(r"INFO trencadis\.engine: The start took \d+\.\d\d s: python \d", result.stderr)
    return phases, set(modules), result.stderr


def parts_of(log: str, logger: str, what: str) -> tuple[float, Mapping[str, float]]:
    """Return the whole and its parts, seconds, as one line of the log has them."""
    (line,) = re.findall(rf"INFO {re.escape(logger)}: {what} took (.*)\.$", log, re.MULTILINE)
    whole, _, parts = line.partition(" s: ")
    pairs = (part.removesuffix(" s").rsplit(" ", 1) for part in parts.split(", "))
    return float(whole), {name: float(took_s) for name, took_s in pairs}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="Linux says when a process started")
def test_a_start_imports_nothing_that_it_does_not_need_and_says_what_it_took_without_gaps() -> None:
    phases, modules, log = started({"TRENCADIS_CACHE__MODELS": "off"})
    assert {"torch", "transformers"} <= modules
    assert not modules & {*SERVERS, *NOT_CHOSEN, *NOT_FOR_TEXT}
    assert [name for name, *_ in phases] == PHASES
    assert [name for name, _, cached in phases if cached is not None] == ["tokenizer", "kernels"]
    for (logger, what), names in PARTS.items():
        whole, parts = parts_of(log, logger, what)
        assert list(parts) == names
        assert sum(parts.values()) == pytest.approx(whole, abs=ROUNDED_S * (len(parts) + 1) + 1e-9)
    loading_s, _ = parts_of(log, "trencadis.torch", "Loading")
    assert 0 < loading_s <= parts_of(log, "trencadis.engine", "The engine")[1]["backend and model"] + 2 * ROUNDED_S


@pytest.mark.nightly
@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="Linux says when a process started")
def test_the_second_start_of_a_model_says_what_was_remembered(tmp_path: Path) -> None:
    variables = {"TRENCADIS_CACHE__MODELS": "on", "XDG_CACHE_HOME": str(with_kernels(tmp_path))}
    started(variables)
    phases, _, _ = started(variables)
    assert {name for name, *_ in phases} == {*PHASES} - {"check", "packing"}
    assert {name: cached for name, _, cached in phases if cached is not None} == {
        "tokenizer": True,
        "kernels": True,
        "weights": True,
    }


# --------------------------------------------------------------------------------------- what commands do not import

PLAIN = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "sympy",
    "scipy.optimize",
)
"""What training, compiling and other kinds of models need, and a decoder on a CPU does not."""
GENERATE = ["generate", "--no-stream", "--max-tokens", "4", "--backend.torch.device", "cpu", "Hello"]


NOTES = """
import atexit, os, sys
def note():
    names = [name for name, one in list(sys.modules.items()) if type(one).__name__ != "Placeholder"]
    with open(os.path.join(NOTED, str(os.getpid())), "w") as file:
        file.write("\\n".join(names))
atexit.register(note)
"""


def imported(arguments: list[str], cache: Path, notes: Path) -> tuple[frozenset[str], str]:
    """Run a command as a user does; return the modules that it imported, in all its processes, and what it printed."""
    noted, variables = noting(cache, notes)
    result = subprocess.run(
        [sys.executable, "-m", "trencadis", *arguments], env=variables, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return frozenset(name for file in noted.iterdir() for name in file.read_text().split()), result.stdout


def noting(cache: Path, notes: Path) -> tuple[Path, dict[str, str]]:
    """Return a folder, empty, and an environment in which each process writes a file there of the modules that it has imported."""
    noted = notes / "noted"
    noted.mkdir(parents=True, exist_ok=True)
    for file in noted.iterdir():
        file.unlink()
    program = notes / "sitecustomize.py"
    if not program.exists():
        program.write_text(NOTES.replace("NOTED", repr(str(noted))))
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TRENCADIS_")}
    variables |= {"PYTHONPATH": str(notes), "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    return noted, variables


def test_the_version_is_said_without_importing_anything_of_ours(tmp_path: Path) -> None:
    modules, text = imported(["--version"], tmp_path, tmp_path / "notes")
    assert text.startswith("trencadis ")
    assert {name for name in modules if name.startswith("trencadis")} <= {"trencadis", "trencadis.__main__"}
    assert not modules & {"attrs", "numpy", "pluggy", "importlib.metadata", "argparse"}


def test_help_is_said_the_second_time_without_importing_plugins(tmp_path: Path) -> None:
    first, made = imported(["--help"], tmp_path / "cache", tmp_path / "first")
    second, kept = imported(["--help"], tmp_path / "cache", tmp_path / "first")
    assert "trencadis_torch" in first
    assert made == kept
    assert "usage: trencadis COMMAND" in kept
    ours = {name for name in second if name.startswith("trencadis")}
    assert ours <= {"trencadis", "trencadis.__main__", "trencadis.caches", "trencadis.saved_help"}
    assert not second & {"attrs", "numpy", "pluggy", "importlib.metadata", "argparse"}


@pytest.mark.slow
@pytest.mark.representatives(1)
@pytest.mark.parametrize("placement", ["thread", "process"])
def test_generating_from_a_decoder_imports_no_compiler_and_no_symbols(placement: str, tmp_path: Path) -> None:
    arguments = [*GENERATE, "--engine.placement", placement, "--cache.models", "off"]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    modules, text = imported(arguments, cache, tmp_path / "notes")
    assert sorted(modules & {*NOT_NAMED, "numpy.random"}) == []
    assert {"torch", "transformers.modeling_utils", "transformers.models.llama.modeling_llama"} <= modules
    assert sorted(modules & set(PLAIN)) == []
    code = f"import sys; from trencadis.cli import main; sys.exit(main({arguments!r}))"
    whole = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert text == whole.stdout, "with everything that transformers imports the text is another one"


@pytest.mark.representatives(1)
@pytest.mark.parametrize("placement", ["process", "thread"])
def test_generating_from_a_model_that_is_remembered_imports_nothing_of_transformers(
    placement: str, tmp_path: Path
) -> None:
    arguments = [*GENERATE, "--engine.placement", placement, "--cache.models", "on"]
    cache = with_kernels(tmp_path)
    _, first = imported(arguments, cache, tmp_path / "notes")
    modules, second = imported(arguments, cache, tmp_path / "more")
    assert second == first
    assert "torch" in modules
    others = {
        *("transformers", "huggingface_hub", "httpx", "scipy", "sympy", "torch._dynamo", "torch.distributed.tensor"),
        "trencadis_torch.heads",
    }
    assert sorted(modules & {*NOT_NAMED, *others, "numpy.random"}) == []


NOT_FOR_CLIENTS = (
    *("torch", "transformers", "safetensors", "huggingface_hub", "httpx", "jinja2", "scipy", "sympy", "matplotlib"),
    *("trencadis.engine.engine", "trencadis.engine.state", "trencadis.engine.build", "trencadis_torch.backend"),
)
"""What the process of ``serve`` that speaks HTTP does not need, as it is not the engine's."""
NOT_FOR_ENGINES = ("fastapi", "starlette", "uvicorn", "pydantic", "trencadis_server.app", "trencadis_server.routes")
NOT_NAMED = (
    *("trencadis_gaudi", "trencadis_kv.connectors", "trencadis_kv.codecs", "trencadis_kv.policies"),
    *(
        "trencadis_plugins.speculation",
        "trencadis_plugins.draft_length",
        "trencadis_plugins.acceptance",
        "trencadis_remote.router",
    ),
)
"""Plugins that are there on demand; as in the metadata of an installation that is as new as pyproject.toml."""


def test_a_server_imports_no_model_and_its_engine_no_server(tmp_path: Path) -> None:
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    noted, variables = noting(cache, tmp_path / "notes")
    with subprocess.Popen(
        [sys.executable, "-m", "trencadis", "serve", "--port", "0", "--backend.torch.device", "cpu"],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        ready = [
            line
            for line in iter(server.stdout.readline, "")
            if line.startswith("Ready") and not server.send_signal(signal.SIGINT)
        ]
        _, said = server.communicate()
    assert len(ready) == 1, said[-3000:]
    found = {file.name: frozenset(file.read_text().split()) for file in noted.iterdir()}
    clients = found.pop(str(server.pid))
    (engine,) = found.values()
    assert "fastapi" in clients
    assert sorted(clients & {*NOT_FOR_CLIENTS, *NOT_NAMED}) == []
    assert "torch" in engine
    assert sorted(engine & {*NOT_FOR_ENGINES, *NOT_NAMED, *PLAIN, "numpy.random"}) == []
