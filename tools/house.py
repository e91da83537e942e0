"""Measure the size of the source, and how many calls and modules one decode step, one generated token and one chat request take.

Example: `python tools/house.py`; `--json` prints the figures as JSON. `python tools/house.py --check` compares each figure that has a
limit with it, and exits with status 1 if one is above its limit or cannot be measured; `--only WORD` checks the rows with that word.
`--circles` prints the circles of imports, and exits with status 1 if there are any.

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
import re
import shlex
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import attrs

from house_source import (
    arrows_up,
    circles,
    feature_lines,
    fragments,
    import_graph,
    largest_class,
    num_lines,
    num_parameters,
    python_files,
)

ROOT = Path(__file__).resolve().parents[1]
SOURCE_ROOTS = ("core", "plugins", "backends")
KIT = "trencadis_testing"


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

    def figures(self) -> tuple[int, int]:
        """Return calls and modules.

        Raises:
            RuntimeError: There were none: what ran is not in this tree.
        """
        if not self.num_calls:
            import trencadis

            raise RuntimeError(f"nothing was traced: trencadis is imported from {trencadis.__file__}, not from {ROOT}")
        return self.num_calls, len(self.modules)


def decode_step() -> tuple[int, int]:
    """Return calls and modules of a decode step of one sequence that begins and fills no block; the backend does nothing."""
    from trencadis.clock import SystemClock
    from trencadis.records import Request, SamplingParams
    from trencadis_testing.engines import make_engine
    from trencadis_testing.fakes import FakeBackend

    engine = make_engine(backend=FakeBackend(strict=False, eos=-1), clock=SystemClock(), num_blocks=64, max_num_seqs=4)
    params = SamplingParams(max_tokens=200, temperature=0)
    engine.add(Request(request_id="one", prompt_token_ids=tuple(range(1, 9)), params=params))
    for _ in range(21):
        engine.step()
    calls = Calls()
    with calls.counting():
        engine.step()
    return calls.figures()


def one_token() -> tuple[int, int]:
    """Return calls and modules of `LLM.generate` with one token, after one that is not counted; the backend counts."""
    from trencadis import LLM, SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0)
    with LLM("demo", log={"level": "error"}) as llm:
        llm.generate("The sea", params)
        calls = Calls()
        with calls.counting():
            llm.generate("The old man", params)
    return calls.figures()


def chat_request() -> tuple[int, int]:
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
    return calls.figures()


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
    traced: dict[str, Callable[[], tuple[int, int]]] = {
        "decode step, everything special off: calls / modules": decode_step,
        "LLM.generate, 1 token: calls / modules": one_token,
        "chat request, 1 token: calls / modules": chat_request,
    }
    shown = {name: " / ".join(map(str, figures())) for name, figures in traced.items()}
    return {**sizes(), **shown, "abstract or default methods of the widest contract": widest_contract()}


# --------------------------------------------------------------------------------------------------------- check


@attrs.frozen
class Row:
    """Figures that have a limit.

    Attributes:
        name: For people, the figures' units after a colon if there are several.
        limits: The most that each may be.
        measure: Returns the figures, in the same order.
        note: Says more of the figures after they were measured.
    """

    name: str
    limits: tuple[int, ...]
    measure: Callable[[], tuple[int, ...]]
    note: Callable[[], str] = lambda: ""

    def line(self) -> tuple[str, bool]:
        """Return the row's line, and whether every limit is kept."""
        most = " / ".join(f"{limit:,}" for limit in self.limits)
        try:
            found = self.measure()
            shown, is_kept = " / ".join(f"{one:,}" for one in found), all(map(int.__le__, found, self.limits))
            note = self.note()
        except Exception as error:
            shown, is_kept, note = "not measured", False, f"{type(error).__name__}: {error}"
        return f"{self.name:<62} {shown:>18} {most:>18}  {'ok' if is_kept else 'missed'}{note and f'  {note}'}", is_kept


def _size(*places: str) -> Callable[[], tuple[int, int]]:
    def measured() -> tuple[int, int]:
        files = python_files(*(ROOT / place for place in places))
        if not files:
            raise RuntimeError(f"no Python file is below {', '.join(places)}")
        return num_lines(files), len(files)

    return measured


def _arrows_and_circles() -> tuple[int, int, int]:
    graph = import_graph(*(ROOT / root for root in SOURCE_ROOTS))
    engine = {name: others for name, others in graph.items() if name.startswith("trencadis.engine")}
    return len(arrows_up(graph, package="trencadis.engine")), len(circles(engine)), len(circles(graph))


def _check_circles() -> int:
    """Print the circles of imports; returns the exit status."""
    found = circles(import_graph(*(ROOT / root for root in SOURCE_ROOTS)))
    for circle in found:
        print(f"These modules import each other: {', '.join(circle)}.")
    return int(bool(found))


def _limited_feature_lines() -> tuple[int]:
    found = feature_lines(ROOT / "core/trencadis/engine")
    return (sum(lines for lines, _ in found.values()),)


def _features() -> str:
    found = feature_lines(ROOT / "core/trencadis/engine")
    return ", ".join(f"{name} {lines} in {files}" for name, (lines, files) in found.items())


def commands() -> list[str]:
    """Return the marker expressions of the commands that run tests: that of `.ci/run`, and `nightly`.

    Raises:
        RuntimeError: `.ci/run` runs no tests.
    """
    line = re.search(r"^pytest .*$", (ROOT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    if line is None:
        raise RuntimeError(".ci/run runs no tests")
    words = shlex.split(line.group())
    return [words[words.index("-m") + 1] if "-m" in words else "", "nightly"]


class _Markers:
    """Plugin of pytest that keeps the markers of every test that is collected."""

    def __init__(self) -> None:
        self.by_test: dict[str, set[str]] = {}

    def pytest_collection_finish(self, session: Any) -> None:
        """Keep them; tiers are marked by now."""
        self.by_test = {one.nodeid: {mark.name for mark in one.iter_markers()} for one in session.items}


def cases_in_no_command(arguments: Sequence[str] = ()) -> int:
    """Return how many cases of the tests none of :func:`commands` runs.

    Args:
        arguments: Of pytest, beside those that have everything collected.

    Raises:
        RuntimeError: The tests cannot be collected.
    """
    import pytest
    from _pytest.mark.expression import Expression

    plugin, output = _Markers(), io.StringIO()
    every = ["--collect-only", "-n", "0", "-m", "", "--rootdir", str(ROOT), *arguments]
    with contextlib.redirect_stdout(output), contextlib.chdir(ROOT):
        status = pytest.main(every, plugins=[plugin])
    if status or not plugin.by_test:
        raise RuntimeError(f"the tests cannot be collected: {output.getvalue()[-500:]}")
    expressions = [Expression.compile(one) for one in commands()]

    def runs(names: set[str]) -> bool:
        def has(name: str, /, **_: object) -> bool:
            return name in names

        return any(expression.evaluate(has) for expression in expressions)

    return sum(not runs(names) for names in plugin.by_test.values())


def rows() -> list[Row]:
    """Return all rows, in the order in which they are shown."""
    core, engine = "core/trencadis", ROOT / "core/trencadis/engine"
    return [
        Row("core/trencadis: lines / files", (18_000, 130), _size(core)),
        Row("engine: lines / files", (6_500, 28), _size(f"{core}/engine")),
        Row("engine: arrows up / circles; circles in all source", (0, 0, 0), _arrows_and_circles),
        Row("engine: lines of features outside their files", (40,), _limited_feature_lines, _features),
        Row("source with kit: lines / modules", (128_000, 770), _size(*SOURCE_ROOTS)),
        Row("tests: lines", (85_000,), lambda: _size("tests")()[:1]),
        Row("tests: cases that no command runs", (0,), lambda: (cases_in_no_command(),)),
        Row("decode step: calls / modules", (35, 14), decode_step),
        Row("LLM.generate of a token: calls / modules", (330, 50), one_token),
        Row(
            "core: members of the largest class",
            (25,),
            lambda: largest_class(python_files(ROOT / core))[:1],
            lambda: largest_class(python_files(ROOT / core))[1],
        ),
        Row("engine/build.py: lines", (450,), lambda: (num_lines([engine / "build.py"]),)),
        Row(
            "Engine.__init__: parameters",
            (9,),
            lambda: (num_parameters(engine / "engine.py", function="Engine.__init__"),),
        ),
        Row(
            "argument lines that begin with a fragment",
            (0,),
            lambda: (fragments(python_files(*(ROOT / root for root in SOURCE_ROOTS))),),
        ),
    ]


def check(chosen: list[Row]) -> int:
    """Print rows; returns the exit status, 1 if a limit is missed or there is no row."""
    print(f"{'':<62} {'today':>18} {'at most':>18}")
    are_kept = []
    for row in chosen:
        line, is_kept = row.line()
        print(line, flush=True)
        are_kept.append(is_kept)
    print(f"{are_kept.count(False)} of {len(are_kept)} rows are missed.")
    return int(not are_kept or not all(are_kept))


def main() -> int:
    """Print the figures as a table or as JSON, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--check", action="store_true", help="compare each figure with its limit")
    parser.add_argument("--only", default="", metavar="WORD", help="check only the rows with this word")
    parser.add_argument("--circles", action="store_true", help="check only that there is no circle of imports")
    arguments = parser.parse_args()
    if arguments.circles:
        return _check_circles()
    if arguments.check:
        return check([row for row in rows() if arguments.only in row.name])
    figures = measure()
    if arguments.json:
        print(json.dumps(figures, indent=1))
        return 0
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {value}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
