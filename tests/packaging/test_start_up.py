from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping

import attrs
import pytest

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
            ["imports", "weights", "inspection", "check", "packing"],
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
