"""Each process of a served model is killed and stopped, in each call and between: who is answered, after how long, and what is left.

    python benchmarks/faults/kill_ranks.py [--json FILE] [--rounds 3] [--only submit,template] [--seed 0]

`trencadis serve` with the demo model on two ranks, and `LLM` in a process of its own. Requests are in flight each time; their texts are
compared with those of the undisturbed server. A request is told if it ends with 503 and Retry-After. Seconds count from the signal to the
last answer. Then a probe is sent until it is answered, and what no live process of the server has, but one before it had, is left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "soak"))

from processes import Server, command_of, family  # noqa: E402

KINDS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
PROMPTS = ("The ship sails", "Once upon a time", "In the morning", "A captain")
MOST_S = 10.0
PATIENCE_S = 120.0
FLAGS = (
    "--executor.name=processes", "--parallel.tensor=2", "--executor.processes.max_restarts=1000", "--server.max_engine_restarts=1000",
    "--server.restart_window_s=1",
    "--cache.num_blocks=44", "--engine.preemption=swap", "--engine.max_num_seqs=8",
)  # fmt: skip
"""So few blocks that sequences are swapped out."""


@dataclass
class Run:
    """One signal and what came of it.

    Attributes:
        victim: ``rank 0``, ``rank 1``, ``template``, ``engine`` or ``front end``.
        where: The call it was in, or what else was going on.
        kind: ``kill`` or ``stop``.
        outcomes: How requests in flight ended: ``answered``, ``503``, ``cut off`` or what else.
        seconds: From the signal to the last of their answers.
        back_s: From the signal until a probe was answered.
        left: What was left behind.
        load: Average of the machine in the minute before.
    """

    victim: str
    where: str
    kind: str
    outcomes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    back_s: float = 0.0
    left: list[str] = field(default_factory=list)
    load: float = 0.0

    @property
    def is_well(self) -> bool:
        """Whether every request was answered or ended with 503, in time, and nothing is left; with a killed front end connections break."""
        allowed = {"answered", "503"} | ({"cut off"} if self.victim == "front end" else set())
        return set(self.outcomes) <= allowed and self.seconds < MOST_S and not self.left


class Bench:
    """A server, its processes, and the requests that are in flight."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = Path(tempfile.mkdtemp(prefix="kills-"))
        self.order = self.folder / "order"
        os.environ["KILL_ORDER"] = str(self.order)
        os.environ["OMP_NUM_THREADS"] = "1"
        # The hook first; the server's processes take the path over.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE / "hook"), *filter(None, sys.path)])
        self.pool = ThreadPoolExecutor(8)
        self.texts: dict[int, str] = {}
        self.known: set[int] = set()
        self.server = Server(*FLAGS).wait()
        self.files = self._files()
        self.texts = dict(enumerate(one.result()[1] for one in self._requests()))

    # ---------------------------------------------------------------------------------------------- processes

    def engine(self) -> int:
        """Return the engine's process, once there is one."""
        return self._until(self.server.engine_pid)

    def template(self) -> int:
        """Return the process that ranks are forked from; if it has ended, the ranks are killed, and come from another."""
        if self._process("template") is None:
            os.kill(self.rank(0), signal.SIGKILL)
        return self._until(lambda: self._process("template"))

    def rank(self, number: int) -> int:
        """Return a rank's process, once it makes its backend."""
        return self._until(lambda: self._process(str(number)))

    def _process(self, role: str) -> int | None:
        try:
            pid = int(self.order.with_name(f"order.{role}").read_text())
        except OSError:
            return None
        return pid if _is_alive(pid) else None

    def _alive(self) -> set[int]:
        """Return the processes that belong to the server; ranks whose template has ended are not its children any more."""
        roles = [self._process(role) for role in ("template", "0", "1")]
        return {self.server.pid, *family(self.server.pid), *(pid for pid in roles if pid is not None)}

    @staticmethod
    def _until(find: Callable[[], int | None]) -> int:
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            found = find()
            if found is not None:
                return found
            time.sleep(0.01)
        raise TimeoutError("the process is not there")

    # ----------------------------------------------------------------------------------------------- requests

    def _post(self, path: str, body: dict[str, Any] | None) -> tuple[str, str, float]:
        """Return how a request ended, its text, and when."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "connection": "close"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.server.port}{path}", data, headers)
        text = ""
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                content = answer.read()
            outcome = "answered"
            if path == "/v1/completions":
                text = json.loads(content)["choices"][0]["text"]
        except urllib.error.HTTPError as error:
            error.read()
            outcome = (
                str(error.code) if error.code != 503 or error.headers["Retry-After"] else "503 without Retry-After"
            )
        except TimeoutError:
            outcome = "never answered"
        except (OSError, ValueError):
            outcome = "cut off"
        return outcome, text, time.time()

    def _requests(self) -> list[Future[tuple[str, str, float]]]:
        return [
            self.pool.submit(
                self._post,
                "/v1/completions",
                {"model": "demo", "prompt": prompt, "max_tokens": 200, "temperature": 0, "ignore_eos": True},
            )
            for prompt in PROMPTS
        ]

    # --------------------------------------------------------------------------------------------------- runs

    def run(self, victim: str, where: str, kind: str) -> Run:
        """Do one and return what came of it."""
        self.order.unlink(missing_ok=True)
        done = self.order.with_suffix(".done")
        done.unlink(missing_ok=True)
        made = Run(victim, where, kind, load=os.getloadavg()[0])
        self.known.update(self._alive())
        requests = self._requests()
        time.sleep(self.rng.uniform(0.1, 0.5))
        if victim == "template":
            self.template()
        sent_s = time.time()
        if victim.startswith("rank"):
            self._signal_rank(int(victim[-1]), where, KINDS[kind], requests)
            if where != "between":
                self._until(lambda: 1 if done.exists() else None)
                if where in ("submit", "swap_blocks", "embed", "metrics"):
                    sent_s = done.stat().st_ctime
        else:
            self._signal_other(victim, where, KINDS[kind])
        ends = [one.result() for one in requests]
        same = [ends[index][1] == text for index, text in self.texts.items()]
        outcomes = [one[0] for one in ends]
        for index, is_same in enumerate(same):
            if outcomes[index] == "answered" and not is_same:
                outcomes[index] = "another text"
        made.outcomes = dict(Counter(outcomes))
        made.seconds = max(0.0, *(end_s - sent_s for _, _, end_s in ends))
        if victim == "front end":
            made.left = self._after_front_end()
            made.back_s = time.time() - sent_s
            return made
        while self._post("/v1/completions", {"model": "demo", "prompt": "A", "max_tokens": 2})[0] != "answered":
            time.sleep(0.1)
        made.back_s = time.time() - sent_s
        made.left = self._left(self._alive())
        return made

    def _signal_rank(self, rank: int, where: str, number: int, requests: list[Future[Any]]) -> None:
        if where == "between":
            os.kill(self.rank(rank), number)
            return
        other = self.rank(1 - rank)
        self.order.with_suffix(".new").write_text(f"{rank} {where} {number}")
        self.order.with_suffix(".new").rename(self.order)
        if where == "embed":
            requests.append(self.pool.submit(self._post, "/v1/embeddings", {"model": "demo", "input": "a text"}))
        elif where == "metrics":
            self.pool.submit(self._post, "/metrics", None)
        elif where not in ("submit", "swap_blocks"):
            os.kill(other, signal.SIGKILL)  # the call is one of the start that follows

    def _signal_other(self, victim: str, where: str, number: int) -> None:
        if victim == "front end":
            os.kill(self.server.pid, number)
            return
        if where == "while ranks start":
            os.kill(self.rank(self.rng.randrange(2)), signal.SIGKILL)
            time.sleep(self.rng.uniform(0.05, 0.6))
        elif where == "while it loads":
            os.kill(before := self.engine(), signal.SIGKILL)
            self._until(lambda: pid if (pid := self.server.engine_pid()) not in (None, before) else None)
            time.sleep(self.rng.uniform(0.0, 3.0))
        os.kill(self.engine() if victim == "engine" else self.template(), number)

    def _after_front_end(self) -> list[str]:
        """Return what is left of a server whose front end was killed, and start another."""
        left = [line for line in self.server.close(kill=True) if not line.startswith("in the temporary")]
        self.known.clear()
        self.server = Server(*FLAGS).wait()
        self.files = self._files()
        return left

    def _left(self, alive: set[int]) -> list[str]:
        end_s = time.monotonic() + 5.0
        while True:
            gone = self.known - alive - {self.server.pid}
            found = [f"process {pid}: {command_of(pid)[:60]}" for pid in gone if _is_alive(pid)]
            files = self._files()
            found += sorted(set(files) - set(self.files)) if len(files) > len(self.files) else []
            if not found or time.monotonic() > end_s:
                return found
            time.sleep(0.05)

    def _files(self) -> list[str]:
        """Return the server's files in /dev/shm and the temporary directory, sockets included."""
        shared = [str(path) for path in Path("/dev/shm").glob("trencadis-*") if self._is_ours(path.name)]
        return shared + [str(path) for path in self.server.temporary.iterdir() if "torchinductor" not in path.name]

    def _is_ours(self, name: str) -> bool:
        pids = self.known | self._alive()
        return any(f"-{pid}-" in name for pid in pids)

    def close(self) -> list[str]:
        """End the server in order; returns what it leaves."""
        self.pool.shutdown()
        return self.server.close()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -------------------------------------------------------------------------------------------------------- offline


def offline_runs(rounds: int, report: Callable[[Run], None], seed: int) -> None:
    """Kill and stop ranks under ``LLM``, passes padded so that buckets are warmed up, in a process of its own."""
    command = [sys.executable, __file__, "--offline", str(rounds), "--seed", str(seed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                report(Run(**json.loads(line)))


OFFLINE = ("between", "submit", "warm_up", "load", "memory", "close")


OFFLINE_CONFIG: dict[str, Any] = {
    "executor.name": "processes", "parallel.tensor": 2, "executor.processes.max_restarts": 1000, "observer.names": [],
    "cache.max_bytes": 64 << 20, "backend.torch.layout": "padded", "engine.max_num_seqs": 4, "engine.max_num_batched_tokens": 64,
    "model.max_model_len": 160, "bucketing.name": "linear", "bucketing.linear.prompt_bs_max": 1, "bucketing.linear.prompt_query_min": 64,
    "bucketing.linear.prompt_ctx_step": 100, "bucketing.linear.decode_bs_min": 4, "bucketing.linear.decode_block_step": 100,
    "bucketing.complete": False,
}  # fmt: skip


def offline_main(rounds: int, seed: int) -> None:
    """Print a line for each run."""
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    order, rng = folder / "order", random.Random(seed)
    os.environ["KILL_ORDER"] = str(order)
    from trencadis import LLM, SamplingParams

    params = SamplingParams(max_tokens=120, ignore_eos=True, temperature=0.0)

    def texts(llm: LLM) -> list[str]:
        return [one.outputs[0].text for one in llm.generate(list(PROMPTS), params)]

    def ranks(llm: LLM) -> list[int]:
        executor: Any = llm._frontend.engine.engine._executor  # type: ignore[attr-defined]
        return [rank.pid for rank in executor._ranks]

    llm = LLM(**OFFLINE_CONFIG)
    expected, done = texts(llm), order.with_suffix(".done")
    for _ in range(rounds):
        for where in OFFLINE:
            for victim in (0, 1):
                for kind, number in KINDS.items():
                    done.unlink(missing_ok=True)
                    made = Run(f"rank {victim}", where, kind, load=os.getloadavg()[0])
                    known, children = set(ranks(llm)), set(family(os.getpid()))
                    if where != "between":
                        order.write_text(f"{victim} {where} {number}")
                    at = victim if where == "between" else 1 - victim
                    first = (
                        []
                        if where in ("submit", "close")
                        else [(ranks(llm)[at], number if at == victim else signal.SIGKILL)]
                    )
                    timer = threading.Timer(
                        rng.uniform(0.05, 0.4), lambda first=first: [os.kill(*one) for one in first]
                    )
                    begin_s = time.time()
                    timer.start()
                    if where == "close":
                        llm.close()
                        known |= children
                        found = expected
                    else:
                        found = texts(llm)
                    timer.join()
                    made.outcomes = {"answered" if found == expected else "another text": len(expected)}
                    made.seconds = made.back_s = time.time() - begin_s
                    made.left = [f"process {pid}" for pid in known if _is_alive(pid) and pid not in family(os.getpid())]
                    made.left += [str(path) for path in Path("/dev/shm").glob(f"trencadis-{os.getpid()}-*")]
                    if where == "close":
                        made.left += [f"process {pid}" for pid in family(os.getpid())]
                        llm = LLM(**OFFLINE_CONFIG)
                    elif where != "between" and not done.exists():
                        made.outcomes = {"not reached": 1}
                    print(json.dumps(asdict(made)), flush=True)
    llm.close()


# ----------------------------------------------------------------------------------------------------------- table


def plan(rounds: int) -> list[tuple[str, str, str]]:
    """Return what is done: victim, where, kind."""
    calls = ("between", "submit", "swap_blocks", "embed", "metrics", "make", "load", "allocate")
    runs = [(f"rank {rank}", call, kind) for call in calls for rank in (0, 1) for kind in KINDS]
    runs += [("template", where, kind) for where in ("between", "while ranks start") for kind in KINDS]
    runs *= rounds
    engine = [("engine", where, kind) for where in ("between", "while ranks start", "while it loads") for kind in KINDS]
    return runs + [*engine, ("front end", "between", "kill")] * rounds


def table(runs: list[Run]) -> str:
    """Return a row for each victim and place."""
    lines = [
        "| victim | where | signal | runs | answered | 503 | other | median, s | worst, s | back, median s | left |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((run.victim, run.where, run.kind) for run in runs):
        same = [run for run in runs if (run.victim, run.where, run.kind) == key]
        outcomes = sum((Counter(run.outcomes) for run in same), Counter())
        answered, told = outcomes.pop("answered", 0), outcomes.pop("503", 0)
        others = ", ".join(f"{number} {name}" for name, number in outcomes.items())
        seconds = [run.seconds for run in same]
        back_s = statistics.median(run.back_s for run in same)
        lines.append(
            f"| {' | '.join(key)} | {len(same)} | {answered} | {told} | {others} | {statistics.median(seconds):.1f} | {max(seconds):.1f} | "
            f"{back_s:.1f} | {sum(map(len, (run.left for run in same)))} |"
        )
    bad = [run for run in runs if not run.is_well]
    lines.append(
        f"\n{len(runs)} runs, {len(bad)} of them not answered or told within {MOST_S:.0f} s with nothing left."
    )
    return "\n".join([*lines, *(f"  {run}" for run in bad)])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="words, one of which is in victim or place; comma-separated")
    parser.add_argument(
        "--niceness", type=int, default=0, help="of everything that is started, on a machine that others use"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--offline", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.offline:
        offline_main(options.offline, options.seed)
        return
    os.nice(options.niceness)
    os.environ["KILL_NICENESS"] = str(options.niceness)
    runs: list[Run] = []

    def report(run: Run) -> None:
        runs.append(run)
        print(f"{len(runs):4d} {'' if run.is_well else 'BAD '}{run}", flush=True)
        if options.json:
            options.json.write_text(json.dumps([asdict(one) for one in runs], indent=1))

    words = [word for word in options.only.split(",") if word]
    chosen = [one for one in plan(options.rounds) if not words or any(word in " ".join(one) for word in words)]
    bench = Bench(options.seed)
    try:
        for one in chosen:
            report(bench.run(*one))
    finally:
        print("Left at the end:", bench.close() or "nothing")
    if not words or "offline" in words:
        offline_runs(options.rounds, report, options.seed)
    print(table(runs))


if __name__ == "__main__":
    main()
