"""Measure the size of the source, and how many calls and modules one decode step, one generated token and one chat request take.

Example: `python tools/house.py`; `--json` prints the figures as JSON.

A call is an entry into a Python function that is defined in one of the source rooms. The chat request is counted on every thread of the
server's process; its engine has a process of its own, which is not counted. Nothing is timed here: `benchmarks/micro/engine_overhead.py`
does that.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import json
import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE_ROOTS = ("core", "plugins", "backends")
KIT = "trencadis_testing"


def python_files(*places: Path) -> list[Path]:
    """Return the Python files below the places that exist."""
    return sorted(file for place in places for file in place.rglob("*.py"))


def num_lines(files: list[Path]) -> int:
    """Return the number of lines of files."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def sizes() -> dict[str, str]:
    """Return lines and files of the core, of the engine, of all source and of the tests."""
    core, engine = ROOT / "core/trencadis", ROOT / "core/trencadis/engine"
    source = [ROOT / root for root in SOURCE_ROOTS]
    rows = {
        "core/trencadis, lines / files": python_files(core),
        "of these the engine, lines / files": python_files(engine),
        "source with the kit, lines / modules": python_files(*source),
        "tests, lines / files": python_files(ROOT / "tests"),
    }
    return {name: f"{num_lines(files):,} / {len(files)}" for name, files in rows.items()}


class Calls:
    """Calls into the source rooms while it is active.

    Attributes:
        is_counting: Whether events are counted now.
        num_calls: Entries into functions.
        modules: Files of these functions.
    """

    def __init__(self) -> None:
        self.is_counting = True
        self.num_calls = 0
        self.modules: set[str] = set()
        self._is_ours: dict[str, bool] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count one event of the profiler."""
        if not self.is_counting or event != "call" or frame.f_code.co_name == "<module>":
            return
        name = frame.f_code.co_filename
        ours = self._is_ours.get(name)
        if ours is None:
            ours = self._is_ours[name] = any(f"{ROOT}/{root}/" in name for root in SOURCE_ROOTS) and KIT not in name
        if ours:
            self.num_calls += 1
            self.modules.add(name)

    @contextmanager
    def counting(self, *, every_thread: bool = False) -> Iterator[None]:
        """Count during the block: on this thread, or also on threads started in it."""
        if every_thread:
            threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def decode_step() -> str:
    """Return calls and modules of one decode step of one sequence with a backend that does nothing."""
    from trencadis.clock import SystemClock
    from trencadis.records import Request, SamplingParams
    from trencadis_testing.engines import make_engine
    from trencadis_testing.fakes import FakeBackend

    engine = make_engine(backend=FakeBackend(strict=False, eos=-1), clock=SystemClock(), num_blocks=64, max_num_seqs=4)
    params = SamplingParams(max_tokens=200, temperature=0)
    engine.add(Request(request_id="one", prompt_token_ids=tuple(range(1, 9)), params=params))
    for _ in range(20):
        engine.step()
    calls = Calls()
    with calls.counting():
        engine.step()
    return f"{calls.num_calls} / {len(calls.modules)}"


def one_token() -> str:
    """Return calls and modules of `LLM.generate` with one token, after one that is not counted."""
    from trencadis import LLM, SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0)
    with LLM("demo", log={"level": "error"}) as llm:
        llm.generate("The sea", params)
        calls = Calls()
        with calls.counting():
            llm.generate("The old man", params)
    modules = {name for name in calls.modules if "/backends/" not in name}
    return f"{calls.num_calls} / {len(calls.modules)} ({len(modules)} without the backend)"


def chat_request() -> str:
    """Return calls and modules of a chat request of one token in the server's process, after one that is not counted."""
    from trencadis.cli import main as run_command

    calls = Calls()
    calls.is_counting = False
    body = {"model": "demo", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 1}

    def ask(address: str) -> None:
        request = urllib.request.Request(
            f"{address}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()

    class Output(io.StringIO):
        """Starts the client when the server says where it listens."""

        def write(self, text: str) -> int:
            if text.startswith("Ready: ") or "Listening at" in text:
                self.lines = getattr(self, "lines", "") + text
            if text.startswith("Ready: "):
                threading.Thread(target=client, args=(self.lines.split("Listening at ")[1].split()[0],)).start()
            return len(text)

    def client(address: str) -> None:
        try:
            ask(address)
            calls.is_counting = True
            ask(address)
            calls.is_counting = False
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    with calls.counting(every_thread=True), contextlib.redirect_stdout(Output()):
        run_command(["serve", "--model.path", "demo", "--server.port", "0", "--log.level", "error"])
    return f"{calls.num_calls} / {len(calls.modules)}"


def widest_contract() -> str:
    """Return the contract class with the most public methods and their number."""
    widest = ("", 0)
    for file in python_files(ROOT / "core/trencadis/interfaces"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                methods = [one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))]
                public = [one for one in methods if not one.name.startswith("_")]
                widest = max(widest, (node.name, len(public)), key=lambda pair: pair[1])
    return f"{widest[1]} ({widest[0]})"


def measure() -> dict[str, str]:
    """Return every figure by its name."""
    figures: dict[str, Callable[[], str]] = {
        "decode step, everything special off: calls / modules": decode_step,
        "LLM.generate, 1 token: calls / modules": one_token,
        "chat request, 1 token: calls / modules": chat_request,
        "abstract or default methods of the widest contract": widest_contract,
    }
    return {**sizes(), **{name: figure() for name, figure in figures.items()}}


def main() -> None:
    """Print the figures as a table or as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true")
    as_json: bool = parser.parse_args().json
    figures = measure()
    if as_json:
        print(json.dumps(figures, indent=1))
        return
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {value}")


if __name__ == "__main__":
    main()
