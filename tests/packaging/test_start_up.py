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

import attrs
import pytest

from trencadis.caches import cache_directory

CODE = """
import json, sys
from trencadis.cli import main
code = main(["generate", "--backend.name", "torch", "--no-stream", "--json", "--max-tokens", "1", "--log.level", "info", "Hello"])
print(json.dumps({"code": code, "modules": sorted({name.partition(".")[0] for name in sys.modules})}))
"""
SERVERS = ("fastapi", "starlette", "uvicorn", "pydantic", "opentelemetry", "zmq")
NOT_CHOSEN = ("redis", "ray", "lmcache", "nixl", "mooncake", "llguidance", "xgrammar", "prometheus_client")
NOT_FOR_TEXT = ("torchvision", "torchaudio", "sklearn", "sentence_transformers", "matplotlib", "pandas", "datasets")
ROUNDED_S = 0.05


@attrs.frozen
class Started:
    """What a process that generated one token had imported, and its log."""

    modules: frozenset[str]
    log: str

    def phases(self, logger: str, what: str) -> tuple[float, Mapping[str, float]]:
        """Return the whole and its parts, seconds, as one line of the log has them."""
        (line,) = re.findall(rf"INFO {re.escape(logger)}: {what} took (.*)\.$", self.log, re.MULTILINE)
        whole, _, parts = line.partition(" s: ")
        pairs = (part.removesuffix(" s").rsplit(" ", 1) for part in parts.split(", "))
        return float(whole), {name: float(took_s) for name, took_s in pairs}


@pytest.fixture(scope="module")
def started() -> Started:
    result = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    last = json.loads(result.stdout.splitlines()[-1])
    assert last["code"] == 0
    return Started(frozenset(last["modules"]), result.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("names", [SERVERS, NOT_CHOSEN, NOT_FOR_TEXT], ids=["servers", "not chosen", "not for text"])
def test_generating_imports_nothing_that_it_does_not_need(started: Started, names: tuple[str, ...]) -> None:
    assert {"torch", "transformers"} <= started.modules
    assert not started.modules & set(names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("logger", "what", "names"),
    [
        (
            "trencadis.torch",
            "Loading",
            ["imports", "weights", "kernels", "check", "packing"],
        ),
        ("trencadis.engine", "The engine", ["components", "backend and model", "strategies", "cache and warm-up"]),
    ],
)
def test_the_log_says_what_start_up_took_without_gaps(
    started: Started, logger: str, what: str, names: list[str]
) -> None:
    whole, parts = started.phases(logger, what)
    assert list(parts) == names
    assert sum(parts.values()) == pytest.approx(whole, abs=ROUNDED_S * (len(parts) + 1) + 1e-9)


def test_loading_is_a_part_of_making_the_engine(started: Started) -> None:
    whole, _ = started.phases("trencadis.torch", "Loading")
    assert 0 < whole <= started.phases("trencadis.engine", "The engine")[1]["backend and model"] + 2 * ROUNDED_S


WATCHED = """
import sys, time
import trencadis.startup as startup
from trencadis.__main__ import main
close = startup.Ledger.close
def closed(ledger):
    was_open = close(ledger)
    if was_open:
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        print(now_s, sum(one.seconds for one in ledger.entries), *(f"{one.phase}={one.cached}" for one in ledger.entries), sep="|")
    return was_open
startup.Ledger.close = closed
sys.argv = ["trencadis", "generate", "--no-stream", "--max-tokens", "1", "--log.level", "info", "Hello"]
main()
"""
PHASES = (
    *(
        "python",
        "command",
        "tokenizer",
        "components",
        "backend and model",
        "imports",
        "weights",
        "kernels",
    ),
    *("check", "packing", "strategies", "cache and warm-up"),
)


def with_kernels(folder: Path) -> Path:
    """Return a cache that has nothing but the kernels that this machine has compiled before."""
    kernels = folder / "cache" / "trencadis" / "native"
    kernels.parent.mkdir(parents=True)
    kernels.symlink_to(cache_directory("native"))
    return folder / "cache"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="Linux says when a process started")
@pytest.mark.parametrize("is_remembered", [False, True])
def test_the_ledger_of_a_start_adds_up_to_the_time_since_the_process_started(
    is_remembered: bool, tmp_path: Path
) -> None:
    variables = os.environ | {"TRENCADIS_CACHE__MODELS": "on" if is_remembered else "off"}
    if is_remembered:
        variables["XDG_CACHE_HOME"] = str(with_kernels(tmp_path))
        subprocess.run([sys.executable, "-c", WATCHED], env=variables, capture_output=True, check=True)
    began_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    result = subprocess.run([sys.executable, "-c", WATCHED], env=variables, capture_output=True, text=True, check=False)
    ended_s, whole_s, *phases = result.stdout.splitlines()[0].split("|")
    took_s = float(ended_s) - began_s
    # To start a process takes a moment, which is none of its own; the system counts in hundredths.
    assert 0.98 * took_s - 0.5 <= float(whole_s) <= took_s + 0.02
    names = tuple(phase.partition("=")[0] for phase in phases)
    cached = [phase for phase in phases if not phase.endswith("=None")]
    if is_remembered:
        assert set(names) == {*PHASES} - {"check", "packing"}
        assert cached == ["tokenizer=True", "kernels=True", "weights=True"]
    else:
        assert names == PHASES
        assert cached in [["tokenizer=False", f"kernels={found}"] for found in (True, False)]
    assert re.search(r"INFO trencadis\.engine: The start took \d+\.\d\d s: python \d", result.stderr)


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
    """Run a command as a user does; return the modules that it imported, in all its processes, and what it printed.

    Args:
        arguments: Of the command.
        cache: The user's.
        notes: A folder, made.
    """
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


@pytest.mark.parametrize("placement", ["thread", "process"])
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
