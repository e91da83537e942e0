"""Engines of a group are started, warmed, and take turns at every workload; all but the one that is measured stand still."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from peers import environments
from peers.catalogue import AGAIN, OURS, REFERENCE, WAIT_PASSIVELY, Engine
from peers.models import ModelError, files_of
from peers.process import DriverError, DriverProcess
from peers.shapes import Shape
from peers.texts import scored_texts, token_ids
from peers.workloads import Workload

__all__ = ["Findings", "Phase", "Settings", "measure_group", "open_ceilings", "same_tokens"]

CEILINGS = "ceilings"
READ_BYTES = 512 * 2**20
"""That the ceiling of reading is measured with: far above any cache."""
MATMUL_SIZE = 2048
FIRST_TOKENS = 8
LOAD_TIMEOUT_S = 900.0
RUN_TIMEOUT_S = 600.0
BLOCK = 128  # room for a sequence is made in such steps, tokens
FIRST = Workload(name="first", num_requests=1, prompt_len=16, output_len=1)
WARM_UP = (
    Workload(name="warm", num_requests=1, prompt_len=32, output_len=8),
    Workload(name="warm", num_requests=4, prompt_len=64, output_len=8),
)
"""What is done once before anything is measured: memory is touched, code imported or compiled."""
SCORED = {"num_texts": 8, "length": 128}
SCORED_QUICKLY = {"num_texts": 2, "length": 48}
"""What each engine is to tell the probability of."""
LONGEST_SCORED = Workload(name="scored", num_requests=1, prompt_len=SCORED["length"] + 8, output_len=1)
DRIVERS = Path(__file__).parent / "drivers"


@attrs.frozen(kw_only=True)
class Settings:
    """What holds for all engines.

    Attributes:
        cache: Where environments and models are.
        threads: Of each engine.
        rounds: At most.
        until_s: No round starts that would not be over by then (``time.monotonic``).
        options: By engine, settings of its own.
        env: For all, as that which masks instructions.
        is_quick: Less text is scored.
        say: Tells the user what goes on.
    """

    cache: Path
    threads: int
    rounds: int
    until_s: float
    options: Mapping[str, Mapping[str, Any]]
    env: Mapping[str, str]
    is_quick: bool = False
    say: Callable[[str], None]


@attrs.frozen(kw_only=True)
class Phase:
    """What the engines of one group are run on.

    Attributes:
        shape: The model.
        precision: ``fp32``, ``bf16``, ``int8``, ``int4``, or that of a published file.
        group: Which of the groups that fit the memory, from 0; ratios stay within one.
        workloads: In the order in which they are run.
        beginning: Token ids that the model expects before any text.
        text: That prompts are passages of, token ids; empty: they are drawn at random.
    """

    shape: Shape
    precision: str
    group: int
    workloads: Sequence[Workload]
    beginning: Sequence[int] = ()
    text: Sequence[int] = ()

    @property
    def about(self) -> dict[str, Any]:
        """What every record of this phase says of it."""
        return {"model": self.shape.name, "precision": self.precision, "group": self.group}

    @property
    def sizes(self) -> dict[str, int]:
        """What engines must have room for."""
        return {
            "max_num_seqs": max(one.num_requests for one in (*self.workloads, *WARM_UP)),
            "max_model_len": max(_room(one) for one in (*self.workloads, *WARM_UP, LONGEST_SCORED)),
            "max_num_tokens": max(one.num_requests * _room(one) for one in (*self.workloads, *WARM_UP)),
        }


@attrs.define
class Findings:
    """Plain records, as they go into the JSON; of scores what follows from them.

    Attributes:
        reference: By model, workload and round the tokens that others are held against: those of our fp32, where transformers is not beside.
    """

    starts: list[dict[str, Any]] = attrs.field(factory=list)
    runs: list[dict[str, Any]] = attrs.field(factory=list)
    ceilings: list[dict[str, Any]] = attrs.field(factory=list)
    unavailable: list[dict[str, Any]] = attrs.field(factory=list)
    commands: list[dict[str, Any]] = attrs.field(factory=list)
    scores: list[dict[str, Any]] = attrs.field(factory=list)
    reference: dict[tuple[str, str, int], list[list[int]]] = attrs.field(factory=dict)


def same_tokens(tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return how far the tokens of requests are those of a reference.

    Returns:
        The share of requests whose first tokens (eight, or as many as there are) are equal; the share of all tokens that come before
        the first difference.
    """
    leading = [
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(row, other, strict=True)))
        for row, other in zip(tokens, reference, strict=True)
    ]
    length = len(reference[0])
    return {
        "first_ratio": sum(count >= min(FIRST_TOKENS, length) for count in leading) / len(leading),
        "leading_ratio": sum(leading) / (length * len(leading)),
    }


def measure_group(
    phase: Phase, engines: Sequence[Engine], ceilings: DriverProcess, settings: Settings, findings: Findings
) -> None:
    """Run all rounds of some engines that fit the memory together; adds to ``findings``.

    Args:
        phase: What they are run on.
        engines: That do.
        ceilings: Of :func:`open_ceilings`.
        settings: For all of them.
        findings: Get the records.
    """
    with _processes() as processes:
        if phase.shape.is_trained:
            kind = "published" if phase.shape.is_published else "hf"
            beginning, text = token_ids(files_of(phase.shape, kind, phase.precision, settings.cache))
            phase = attrs.evolve(phase, beginning=beginning, text=text)
        for engine in engines:
            settings.say(f"starting {engine.label}, {phase.shape.name}, {phase.precision}")
            _start(engine, phase, settings, findings, processes)
        last_s = 0.0
        if not processes:
            return
        for number in range(settings.rounds):
            start_s = time.monotonic()
            if number and start_s + last_s > settings.until_s:
                settings.say(f"no time for round {number + 1} of {settings.rounds}")
                break
            settings.say(f"round {number + 1}: {', '.join(processes)}")
            ceilings.resume()
            rates = ceilings.ask("measure", timeout_s=RUN_TIMEOUT_S)["ceilings"]
            ceilings.pause()
            findings.ceilings.append({**phase.about, "round": number, **rates})
            for place, workload in enumerate(phase.workloads):
                if (number or place) and time.monotonic() > settings.until_s:
                    settings.say(f"no time for {workload.title}")
                    continue
                _turns(workload, phase, number, processes, findings, settings)
            last_s = time.monotonic() - start_s


@contextmanager
def _processes() -> Iterator[dict[str, DriverProcess]]:
    found: dict[str, DriverProcess] = {}
    try:
        yield found
    finally:
        for process in found.values():
            process.close()


def _start(
    engine: Engine, phase: Phase, settings: Settings, findings: Findings, processes: dict[str, DriverProcess]
) -> None:
    """Start an engine up to its first token, let it score and stop it there; one that cannot start is recorded."""
    try:
        model = files_of(phase.shape, engine.files[phase.precision], phase.precision, settings.cache)
        if phase.shape.is_published:
            with tempfile.TemporaryDirectory() as empty:
                _drop_pages(model)
                _opened(
                    engine,
                    phase,
                    model,
                    attrs.evolve(settings, env={**settings.env, "XDG_CACHE_HOME": empty}),
                    findings,
                    "cold",
                ).close()
        _read_pages(model)
        process = processes[engine.name] = _opened(engine, phase, model, settings, findings, "warm")
    except (DriverError, ModelError, OSError) as error:
        findings.unavailable.append({**phase.about, "engine": engine.name, "reason": str(error)})
        settings.say(f"{engine.label} is not available: {error}")
        return
    try:
        for warm in WARM_UP:
            _ask_run(process, warm, phase, seed=0)
    except DriverError as error:
        findings.unavailable.append({**phase.about, "engine": engine.name, "reason": f"warm-up: {error}"})
        processes.pop(engine.name).close()
        return
    if engine.name != AGAIN:  # its probabilities are ours
        _score(engine, phase, settings, findings, process)
    process.pause()


def _opened(
    engine: Engine, phase: Phase, model: Path, settings: Settings, findings: Findings, files: str
) -> DriverProcess:
    """Return an engine that has made its first token, in a fresh process; adds what that took.

    Args:
        engine: Which.
        phase: Of which model.
        model: Its files.
        settings: For all engines.
        findings: Gets the start.
        files: ``warm`` or ``cold``, for the record.

    Raises:
        DriverError: It cannot start.
    """
    start_s = time.monotonic()
    process = open_driver(engine, settings)
    try:
        loaded = process.ask(
            "load",
            timeout_s=LOAD_TIMEOUT_S,
            model=str(model),
            precision=phase.precision,
            threads=settings.threads,
            options={**engine.options, **settings.options.get(engine.name, settings.options.get(engine.driver, {}))},
            **phase.sizes,
        )
        _ask_run(process, FIRST, phase, seed=0)
        wall_s, cpu_s = time.monotonic() - start_s, process.cpu_s() + process.ended_cpu_s()
        took = {"wall_s": wall_s, "cpu_s": cpu_s, **process.memory_bytes()}
    except BaseException:
        process.close()
        raise
    about = {**phase.about, "engine": engine.name, "files": files}
    findings.starts.append({**about, **took, "versions": loaded["versions"]})
    return process


def _score(engine: Engine, phase: Phase, settings: Settings, findings: Findings, process: DriverProcess) -> None:
    """Ask for the probabilities of some texts; an engine that cannot tell them goes on without."""
    texts = scored_texts(
        **(SCORED_QUICKLY if settings.is_quick else SCORED),
        vocab_size=phase.shape.vocab_size,
        beginning=phase.beginning,
        text=phase.text,
    )
    try:
        logprobs = process.ask("score", timeout_s=RUN_TIMEOUT_S, texts=texts)["logprobs"]
        if [len(row) for row in logprobs] != [len(text) - 1 for text in texts]:
            raise DriverError("it did not score every token")
    except DriverError as error:
        findings.unavailable.append({**phase.about, "engine": engine.name, "reason": f"quality: {error}"})
        return
    findings.scores.append(
        {**phase.about, "engine": engine.name, "logprobs": logprobs, "is_text": phase.shape.is_trained}
    )


def _files(model: Path) -> list[Path]:
    return [file for file in model.rglob("*") if file.is_file()] if model.is_dir() else [model]


def _read_pages(model: Path) -> None:
    """Have all files of a model in memory, as after an earlier start."""
    for file in _files(model):
        with file.open("rb", buffering=0) as opened:
            while opened.read(1 << 24):
                pass


def _drop_pages(model: Path) -> None:
    """Have none of them there, as after a start of the machine. Source: posix_fadvise(2)."""
    for file in _files(model):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def open_driver(engine: Engine, settings: Settings) -> DriverProcess:
    """Start the process of an engine, with threads that sleep when they wait.

    Raises:
        DriverError: Its environment is not there.
    """
    threads = str(settings.threads)
    env = {
        **os.environ,
        **WAIT_PASSIVELY,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(settings.cache / "vllm"),
        **engine.env,
        **settings.env,
    }
    home, program = DRIVERS.parents[1], sys.executable
    if engine.home:
        prepared = environments.find(engine.home, settings.cache)
        if prepared.reason:
            raise DriverError(prepared.reason)
        home, program = prepared.directory, str(prepared.python)
        env.pop("PYTHONPATH", None)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(DRIVERS.parents[1]), env.get("PYTHONPATH", "")]))
    command = [program, "-m", f"peers.drivers.{engine.driver}"]
    logs = settings.cache / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{engine.name}.log"
    log.unlink(missing_ok=True)
    return DriverProcess(command, env=env, log=log, directory=home)


@contextmanager
def open_ceilings(settings: Settings) -> Iterator[DriverProcess]:
    """Yield the process that measures the machine itself, standing still."""
    process = open_driver(Engine(name=CEILINGS, label="", driver=CEILINGS, files={}), settings)
    try:
        sizes = {"read_bytes": READ_BYTES, "matmul_size": MATMUL_SIZE}
        process.ask("load", timeout_s=LOAD_TIMEOUT_S, threads=settings.threads, **sizes)
        process.pause()
        yield process
    finally:
        process.close()


def _turns(
    workload: Workload,
    phase: Phase,
    number: int,
    processes: dict[str, DriverProcess],
    findings: Findings,
    settings: Settings,
) -> None:
    """Let every engine do one workload, in an order that moves on from round to round; one that fails is out from then on."""
    about = {**phase.about, "round": number}
    names = list(processes)
    turn = number % len(names) if names else 0
    tokens: dict[str, list[list[int]]] = {}
    made: list[dict[str, Any]] = []
    for name in names[turn:] + names[:turn]:
        process = processes[name]
        process.resume()
        try:
            record, tokens[name] = _measure(process, workload, phase, seed=number + 1)
            made.append({**about, "workload": workload.name, "engine": name, **record})
        except DriverError as error:
            reason = f"{workload.title}: {error}"
            findings.unavailable.append({**about, "engine": name, "reason": reason})
            settings.say(f"{name} is out: {reason}")
            processes.pop(name).close()
        else:
            process.pause()
    key = (phase.shape.name, workload.name, number)
    if phase.precision == "fp32" and OURS in tokens:
        findings.reference[key] = tokens[OURS]
    reference = tokens.get(REFERENCE, findings.reference.get(key))
    for record in made:
        found = tokens[record["engine"]]
        findings.runs.append(
            record if reference is None or found is reference else {**record, **same_tokens(found, reference)}
        )


def _measure(
    process: DriverProcess, workload: Workload, phase: Phase, *, seed: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Run a workload up to its first tokens, then with other prompts to its end."""
    first = None
    if not workload.is_prefill:
        first = _ask_run(process, attrs.evolve(workload, output_len=1), phase, seed=-seed)
    run = _ask_run(process, workload, phase, seed=seed)
    first = first or run
    record = {
        "wall_s": run["wall_s"],
        "cpu_s": run["cpu_s"],
        "first_wall_s": first["wall_s"],
        "first_cpu_s": first["cpu_s"],
        "peak_rss": process.memory_bytes()["peak_rss"],
    }
    return record, run["tokens"]


def _ask_run(process: DriverProcess, asked: Workload, phase: Phase, *, seed: int) -> dict[str, Any]:
    """Ask for a run, and see that it has all the tokens that were asked for.

    Raises:
        DriverError: It has not.
    """
    prompts = asked.prompts(seed=seed, vocab_size=phase.shape.vocab_size, text=phase.text)
    run = process.ask("run", timeout_s=RUN_TIMEOUT_S, prompts=prompts, output_len=asked.output_len)
    lengths = [len(row) for row in run["tokens"]]
    if lengths != [asked.output_len] * asked.num_requests:
        raise DriverError(
            f"{sum(lengths)} tokens for {len(lengths)} requests, not {asked.output_len} for each of {asked.num_requests}"
        )
    return run


def _room(workload: Workload) -> int:
    return -(-(workload.prompt_len + workload.output_len) // BLOCK) * BLOCK
