"""Record what users can see of this version, and compare another version with it: tokens, flags, metrics, messages, the HTTP interface.

Beside it every pass of 250 generated histories, see ``tests/support/machine``: what was scheduled, and how each step was shaped.

    python tools/behaviour.py record FILE      # before a change
    python tools/behaviour.py compare FILE     # after it: names what differs, exit status 1

Tokens are those of the demo model on this machine's CPU: record and compare on the same machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trencadis import LLM, BeamSearchParams, SamplingParams

PROMPTS = ("The old man looked at the sea and", "Once upon a time there was", "The Queen said " * 12, "Who is")
LONG = "It was the best of times, it was the worst of times, it was the age of " * 8

GREEDY: Mapping[str, Any] = {"max_tokens": 40, "temperature": 0}
SEEDED: Mapping[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": 11}

PARAMS: dict[str, Mapping[str, Any]] = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "cut off": {**SEEDED, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalised": {**GREEDY, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "choices": {**SEEDED, "n": 3},
    "log-probabilities": {**GREEDY, "logprobs": 3, "prompt_logprobs": 2},
    "stopped": {**GREEDY, "stop": ["the", "."], "min_tokens": 4},
    "biased": {**SEEDED, "logit_bias": {7: 3.0, 90: -4.0}},
}

SMALL = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "warmup": False}
CACHE = {"cache": {"num_blocks": 40, "block_size": 16}}

ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {
        "engine": SMALL,
        "backend": {"name": "torch", "torch": {"layout": "padded"}},
        "bucketing": {"name": "exponential"},
    },
    "gaudi emulated": {"engine": SMALL, "backend": {"name": "gaudi", "gaudi": {"device": "emulated"}}},
    "n-gram": {"speculation": {"name": "ngram"}},
    "suffix": {"speculation": {"name": "suffix"}},
    "preempted": CACHE,
    "in small chunks": {"engine": {"max_num_batched_tokens": 16}},
    "priority": {"scheduling": {"name": "priority"}},
    "own process": {"engine": {"placement": "process"}},
}


def digest(value: Any) -> str:
    """Return a short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def told(output: Any) -> list[Any]:
    """Return the parts of an output that a user sees, log-probabilities to three digits."""
    choices: list[Any] = []
    for one in output.outputs:
        tokens = [[entry.token_id, round(entry.logprob, 3)] for entry in one.logprobs or ()]
        choices.append([list(one.token_ids), one.text, str(one.finish_reason), one.stop_reason, tokens])
    return choices


def token_digests() -> dict[str, str]:
    """Return digests of outputs: every engine with every set of parameters."""
    found: dict[str, str] = {}
    for engine, tables in ENGINES.items():
        print(engine, file=sys.stderr)
        with LLM({"path": "demo", "max_model_len": 512}, log={"level": "error"}, **tables) as llm:
            for name, params in PARAMS.items():
                outputs = llm.generate([*PROMPTS, LONG], SamplingParams(**params), use_progress=False)
                found[f"{engine}, {name}"] = digest([told(one) for one in outputs])
            outputs = llm.generate([LONG, LONG], SamplingParams(**GREEDY), use_progress=False)
            found[f"{engine}, from the prefix cache"] = digest([told(one) for one in outputs])
            beams = llm.beam_search(list(PROMPTS[:2]), BeamSearchParams(beam_width=3, max_tokens=12))
            found[f"{engine}, beams"] = digest([told(one) for one in beams])
    with tempfile.TemporaryDirectory() as folder:
        store = {"name": "filesystem", "filesystem": {"path": folder}}
        for name in ("saved", "loaded"):
            with LLM({"path": "demo", "max_model_len": 512}, log={"level": "error"}, kv_connector=store) as llm:
                outputs = llm.generate([LONG], SamplingParams(**GREEDY), use_progress=False)
                found[f"filesystem, {name}"] = digest([told(one) for one in outputs])
    return found


def command(*arguments: str) -> str:
    """Return the output of a command of `trencadis`."""
    return subprocess.run(
        [sys.executable, "-m", "trencadis", *arguments], capture_output=True, text=True, check=True
    ).stdout


def over_http() -> dict[str, Any]:
    """Return digests of answers over HTTP, the metrics' names and the OpenAPI document's digests by path and schema."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trencadis", "serve", "--model.path", "demo", "--server.port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        base = ""
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("Listening at "):
                base = line.split()[2].removesuffix("/v1")
            if line.startswith("Ready: "):
                break

        def ask(path: str, body: Any = None) -> str:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(base + path, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                text: str = answer.read().decode()
            text = re.sub(r'"id":"[^"]*"', '"id":""', text)
            return re.sub(r'"(created|system_fingerprint)":("[^"]*"|\d+)', r'"\1":0', text)

        messages = [{"role": "user", "content": "Who is there?"}]
        chat = {"model": "demo", "messages": messages, "max_tokens": 24, "temperature": 0}
        text = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 24, "seed": 3, "logprobs": 2}
        answers = {
            "chat": ask("/v1/chat/completions", chat),
            "chat stream": "".join(
                re.findall(r'"content":"((?:[^"\\]|\\.)*)"', ask("/v1/chat/completions", {**chat, "stream": True}))
            ),
            "chat grammar": ask("/v1/chat/completions", {**chat, "guided_regex": "[a-z]{5,9}"}),
            "completion": ask("/v1/completions", {**text, "temperature": 0}),
            "tokenize": ask("/tokenize", {"model": "demo", "prompt": PROMPTS[0]}),
            "models": ask("/v1/models"),
        }
        page = ask("/metrics")
        document = json.loads(ask("/openapi.json"))
        return {
            "answers": {name: digest(re.sub(r'"logprob":-?[\d.e-]+', "", one)) for name, one in answers.items()},
            "metrics": {line.split()[2]: line.split()[3] for line in page.splitlines() if line.startswith("# TYPE")},
            "paths": {name: digest(one) for name, one in document["paths"].items()},
            "schemas": {name: digest(one) for name, one in document["components"]["schemas"].items()},
        }
    finally:
        process.terminate()
        process.wait()


NUM_HISTORIES = 250


def history_digests() -> dict[str, str]:
    """Return digests of every pass of generated histories, the same ones each time, and of how their requests ended."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.stateful import run_state_machine_as_test

    from support.machine.history import History

    found: dict[str, str] = {}

    class Recorded(History):
        """Keeps what was run."""

        def teardown(self) -> None:
            super().teardown()
            if self.is_built:
                totals = self.engine.totals
                counts = [totals.num_emitted_tokens, totals.num_preempted, totals.num_finished, totals.num_failed_steps]
                found[f"history {len(found):03}"] = digest([self.chaos.trace, counts])

    once = settings(
        max_examples=NUM_HISTORIES,
        stateful_step_count=20,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
        deadline=None,
    )
    run_state_machine_as_test(Recorded, settings=once)
    return found


WRONG: tuple[tuple[str, ...], ...] = (
    ("--engine.max_num_seqs", "0"),
    ("--engine.max_num_seq", "4"),
    ("--engine.preemption", "swop"),
    ("--scheduling.name", "fcsf"),
    ("--scheduling.shadow", "nobody"),
    ("--eviction.name", "lur"),
    ("--bucketing.name", "nobody.at:all"),
    ("--speculation.name", "engram"),
    ("--kv_connector.name", "p3p"),
    ("--cache.memory_fraction", "1.5"),
    ("--cache.num_blocks", "many"),
    ("--parallel.attention", "data"),
    ("--engine.role", "prefill"),
    ("--model.path", "/nowhere/at/all"),
)
"""Arguments that commands refuse."""

BAD_PARAMS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 0},
    {"temperature": -1},
    {"top_p": 0.0},
    {"n": 0},
    {"best_of": 1, "n": 2},
    {"stop": [""]},
    {"logprobs": 99},
    {"min_tokens": 9, "max_tokens": 3},
    {"nonsense": 1},
)
"""Sampling parameters that are refused."""


def messages() -> dict[str, str]:
    """Return what commands and requests are refused with, word for word."""
    found: dict[str, str] = {}
    for arguments in WRONG:
        words = [sys.executable, "-m", "trencadis", "generate", "--model.path", "demo", *arguments, "x"]
        made = subprocess.run(words, capture_output=True, text=True, check=False)
        found[" ".join(arguments)] = f"{made.returncode} {made.stderr.strip()[-600:]}"
    for params in BAD_PARAMS:
        try:
            SamplingParams(**params)
        except Exception as error:
            found[str(params)] = f"{type(error).__name__}: {error}"
    return found


def behaviour() -> dict[str, Any]:
    """Return all that is recorded."""
    parts: dict[str, Callable[[], Any]] = {
        "tokens": token_digests,
        "flags": lambda: dict.fromkeys(command("config", "--flags").split(), ""),
        "plugins": lambda: digest(command("plugins")),
        "messages": messages,
        "histories": history_digests,
    }
    found = {name: part() for name, part in parts.items()}
    return {**found, **over_http()}


def differences(before: Any, after: Any, place: str = "") -> list[str]:
    """Return every place at which two records differ. Pure."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in sorted({*before, *after})
            for line in differences(before.get(key, "absent"), after.get(key, "absent"), f"{place} > {key}")
        ]
    return [] if before == after else [f"{place.removeprefix(' > ')}: {before!r} -> {after!r}"]


def main() -> int:
    """Record or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    args = parser.parse_args()
    found = behaviour()
    if args.action == "record":
        args.file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    lines = differences(json.loads(args.file.read_text(encoding="utf-8")), found)
    print("\n".join(lines) or f"as in {args.file}: {sum(len(part) for part in found.values())} entries")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
