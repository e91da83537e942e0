"""CPU time per output token through each door to the same engine: what a process of its own, or a thread, costs.

Doors: ``LLM`` in this process (offline, nobody reads before the end), ``LLM`` streaming, ``LLM`` with the engine in its own process,
``AsyncLLM`` on a thread, ``AsyncLLM`` with the engine in its own process; the last two stream every token to one coroutine per
request, on the event loop that the server uses. CPU time is of this process and of the engine's, all threads. Rounds are interleaved, in
changing order; a ratio is the median over rounds of ``door / offline`` in the same round. The A/A floor is the same ratio of the offline
door to itself, measured as if it were another door.

    python benchmarks/serve/doors.py --rounds 9 > benchmarks/results/doors.json
    python benchmarks/serve/doors.py --model random_26m --doors offline async_process > benchmarks/results/doors_26m.json
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.resources
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import uvloop

from trencadis import LLM, AsyncLLM, SamplingParams

RANDOM = "random_26m"
TEXT = "The old man looked at the sea and the boat was far away from him when he"


def cpu_s(pid: int) -> float:
    """CPU time of a process with all its threads (Linux: the clock id of a process, see clock_getcpuclockid(3))."""
    return time.process_time() if pid == 0 else time.clock_gettime((~pid << 3) | 2)


class Offline:
    """``LLM`` in this process."""

    def __init__(self, model: str, placement: str = "thread") -> None:
        self.llm = LLM(model, engine={"placement": placement}, observer={"names": ()})
        self.pid = self.llm._frontend.engine._transport._peer.pid if placement == "process" else 0  # type: ignore[attr-defined]

    def run(self, prompts: list[str], params: SamplingParams) -> int:
        outputs = self.llm.generate(prompts, params, use_progress=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def close(self) -> None:
        self.llm.close()


class OfflineStreams(Offline):
    """``LLM`` in this process, every request streaming."""

    def run(self, prompts: list[str], params: SamplingParams) -> int:
        streams = [self.llm.stream(prompt, params) for prompt in prompts]
        total = 0
        while streams:
            for stream in tuple(streams):
                output = next(stream)
                if output.finished:
                    total += len(output.outputs[0].token_ids)
                    streams.remove(stream)
        return total


class Online:
    """``AsyncLLM`` with the engine where ``placement`` says."""

    def __init__(self, model: str, placement: str) -> None:
        self.loop = uvloop.new_event_loop()
        self.llm = AsyncLLM(model, engine={"placement": placement}, observer={"names": ()})
        self.pid = 0
        if placement == "process":
            self.pid = self.llm._runner.frontend.engine._transport._peer.pid  # type: ignore[attr-defined]

    def run(self, prompts: list[str], params: SamplingParams) -> int:
        return self.loop.run_until_complete(self._all(prompts, params))

    async def _all(self, prompts: list[str], params: SamplingParams) -> int:
        return sum(await asyncio.gather(*(self._one(prompt, params) for prompt in prompts)))

    async def _one(self, prompt: str, params: SamplingParams) -> int:
        num_characters = 0
        async for output in self.llm.generate(prompt, params):
            num_characters = len(output.outputs[0].text)  # a client that shows text as it comes
        return len(output.outputs[0].token_ids) if num_characters else 0

    def close(self) -> None:
        self.loop.run_until_complete(self.llm.close())
        self.loop.close()


def measure(door: Any, prompts: list[str], params: SamplingParams) -> dict[str, float]:
    start, start_self, start_child = time.perf_counter(), cpu_s(0), cpu_s(door.pid) if door.pid else 0.0
    num_tokens = door.run(prompts, params)
    wall = time.perf_counter() - start
    own, child = cpu_s(0) - start_self, (cpu_s(door.pid) - start_child) if door.pid else 0.0
    return {
        "cpu_us_per_token": 1e6 * (own + child) / num_tokens,
        "client_us_per_token": 1e6 * own / num_tokens if door.pid else 0.0,
        "wall_us_per_token": 1e6 * wall / num_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo", help=f"{RANDOM}: a random Llama of 26 M parameters, made for this")
    parser.add_argument("--doors", nargs="*", metavar="NAME", help="some of them only; offline is always among them")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if args.model == RANDOM:
            make_random_model(directory)
        print(json.dumps(summary(args, compare(args, directory if args.model == RANDOM else args.model)), indent=2))


def make_random_model(directory: str) -> None:
    """Write a Llama with random weights that reads and writes the tokens of the demo model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(str(importlib.resources.files("trencadis") / "demo" / "target"), directory, dirs_exist_ok=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(directory)


def compare(args: argparse.Namespace, model: str) -> dict[str, list[dict[str, float]]]:
    """Return the measurements of every round, by door."""
    makers: dict[str, Callable[[], Any]] = {
        "offline": lambda: Offline(model),
        "offline_streams": lambda: OfflineStreams(model),
        "offline_process": lambda: Offline(model, "process"),
        "async_thread": lambda: Online(model, "thread"),
        "async_process": lambda: Online(model, "process"),
    }
    wanted = makers if args.doors is None else ["offline", *args.doors]
    doors = {name: makers[name]() for name in makers if name in wanted}
    doors["offline_again"] = doors["offline"]
    prompts = [f"{TEXT[4 * (i % 7) :]} {i}" for i in range(args.requests)]
    params = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in doors}
    for door in doors.values():
        door.run(prompts, params)  # warm: caches, lazily imported code
    for number in range(args.rounds):
        names = list(doors)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            results[name].append(measure(doors[name], prompts, params))
    for name, door in doors.items():
        if name != "offline_again":
            door.close()
    return results


def summary(args: argparse.Namespace, results: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    reference = [one["cpu_us_per_token"] for one in results["offline"]]
    found: dict[str, Any] = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "settings": vars(args) | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")},
        "doors": {},
    }
    for name, rounds in results.items():
        ratios = sorted(one["cpu_us_per_token"] / base for one, base in zip(rounds, reference, strict=True))
        found["doors"][name] = {
            **{key: round(statistics.median(one[key] for one in rounds), 1) for key in rounds[0]},
            "cpu_ratio_to_offline": round(statistics.median(ratios), 4),
            "cpu_ratio_quartiles": [round(ratios[len(ratios) // 4], 4), round(ratios[-1 - len(ratios) // 4], 4)],
        }
    return found


if __name__ == "__main__":
    main()
