"""Where the CPU seconds of a decode step go: linear layers, attention, norms, what is between them, and what is around the model.

    python benchmarks/micro/decode_step.py --json > benchmarks/results/decode_step.json
    python benchmarks/micro/decode_step.py --model DIR --batch-sizes 8 --variants off auto int8

The parts of a model are timed from inside, each without what it calls; page faults are the process's. Variants run in turns.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
from random_models import LLAMA_110M, save_random_model

from trencadis.clock import SystemClock
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, ModelSource, Pass, Phase
from trencadis_testing.backend import ArgmaxSampler
from trencadis_torch.backend import TorchBackend
from trencadis_torch.config import TorchConfig
from trencadis_torch.linear.decoder_pass import DecoderPasses
from trencadis_torch.verify import MatchingPrefix

BLOCK_SIZE = 16
GRAPHS = {"compile": "buckets", "layout": "padded"}
VARIANTS: dict[str, dict[str, str]] = {
    "off": {"pack": "off"},
    "compiled_off": {"pack": "off", **GRAPHS},
    "compiled_sdpa": {"pack": "off", "attention": "sdpa", **GRAPHS},
    "compiled": GRAPHS,
    "compiled_int8": {"quantization": "int8", **GRAPHS},
    "modules": {},
    "auto": {},
    "int8_modules": {"quantization": "int8"},
    "int8": {"quantization": "int8"},
    "auto_again": {},
}
"""Options of the backend. In ``modules`` the decoder runs layer by layer, through transformers; else in one call, where it can."""


class Stopwatch:
    """CPU time by part, each without the parts it calls."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._stack: list[float] = []

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its own time counted under a name."""

        def timed(*args: Any, **options: Any) -> Any:
            start_s = time.process_time()
            self._stack.append(0.0)
            try:
                return function(*args, **options)
            finally:
                took = time.process_time() - start_s
                self.spent[name] += took - self._stack.pop()
                if self._stack:
                    self._stack[-1] += took

        return timed


def part_of(name: str, module: torch.nn.Module) -> str:
    """Return what a module counts as."""
    kind = type(module).__name__
    if "Linear" in kind:
        return "output projection" if name.endswith("lm_head") else "linear layers"
    if "Norm" in kind:
        return "norms"
    if "MLP" in kind:
        return "activation"
    if "Attention" in kind:
        return "rotation and reshaping"
    if "Rotary" in kind:
        return "rotary angles"
    return "model, the rest"


class Scene:
    """A backend in mid-decode, every row with as many tokens."""

    def __init__(
        self, path: str, options: dict[str, str], *, batch_size: int, context: int, threads: int, by_module: bool
    ) -> None:
        self.backend = TorchBackend(TorchConfig(device="cpu", num_threads=threads, **options), clock=SystemClock())  # type: ignore[arg-type]
        facts = self.backend.load(ModelSource(path=path), sampler=ArgmaxSampler())
        per_row = -(-(context + 1) // BLOCK_SIZE)
        self.backend.allocate(
            AllocationPlan(
                num_blocks=batch_size * per_row,
                block_size=BLOCK_SIZE,
                num_rows=batch_size,
                max_model_len=context + 1,
                max_num_batched_tokens=batch_size,
            )
        )
        rows = self.backend._rows
        rows.tokens.copy_(torch.randint(3, facts.vocab_size, rows.tokens.shape))
        rows.tables[:, :per_row] = torch.randperm(batch_size * per_row).view(batch_size, per_row).int()
        order = np.arange(batch_size, dtype=np.int32)
        self.one = Pass(
            bucket=Bucket(batch_size, 1, batch_size * per_row, Phase.DECODE),
            indices=order,
            rows=order,
            starts=np.full(batch_size, context - 1, np.int32),
            query_lens=np.ones(batch_size, np.int32),
            num_logits=np.ones(batch_size, np.int32),
            num_prompt_logits=np.zeros(batch_size, np.int32),
        )
        if by_module:
            self.backend._runner._decoder = None
        self.stopwatch = Stopwatch()
        self.warm_up: dict[str, float] = {}
        if options.get("compile", "off") != "off":
            self._compile()

    def _compile(self) -> None:
        """Make the graph, and note what that takes; compilers are processes of their own."""
        start_s, cpu_s = time.perf_counter(), _cpu_s()
        report = self.backend.warm_up([self.one.bucket])
        self.warm_up = {
            "warm_up_s": round(time.perf_counter() - start_s, 2),
            "warm_up_cpu_s": round(_cpu_s() - cpu_s, 2),
            "from_disk": report.num_cached,
        }

    def watch(self) -> None:
        """Time the parts from now on."""
        from trencadis_torch.attention import ragged

        for name, module in self.backend._model.named_modules():
            module.forward = self.stopwatch.around(part_of(name, module), module.forward)
        # Whoever watches last is told of attention: scenes are watched one after the other.
        plain = getattr(ragged.RaggedPass.attend, "plain", ragged.RaggedPass.attend)
        attend = self.stopwatch.around("attention", plain)
        attend.plain = plain  # type: ignore[attr-defined]
        ragged.RaggedPass.attend = attend  # type: ignore[method-assign]
        decoder = self.decoder
        if decoder is not None:
            decoder.watch()
            decoder.logits = self.stopwatch.around("model, the rest", decoder.logits)  # type: ignore[method-assign]

    @property
    def decoder(self) -> DecoderPasses | None:
        """What runs it in one call."""
        assert self.backend._runner is not None
        return self.backend._runner._decoder

    @torch.inference_mode()
    def step(self) -> None:
        """Run one decode step."""
        runner = self.backend._runner
        assert runner is not None
        runner.run(self.one, drafts=None, sampler=self.backend._sampler, acceptance=MatchingPrefix())


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def whole_steps(scenes: dict[str, Scene], num_steps: int) -> dict[str, dict[str, float]]:
    """Return median CPU time and page faults of a step of each variant, steps in turns."""
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in scenes}
    for _ in range(num_steps + 3):
        for name, scene in scenes.items():
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            start_s, wall_s = time.process_time(), time.perf_counter()
            scene.step()
            took, wall = time.process_time() - start_s, time.perf_counter() - wall_s
            times[name].append((took, wall, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults))
    found = {}
    for name, values in times.items():
        cpu, wall, faults_of = zip(*values[3:], strict=True)
        found[name] = {
            "cpu_ms": round(1e3 * statistics.median(cpu), 3),
            "best_cpu_ms": round(1e3 * min(cpu), 3),
            "wall_ms": round(1e3 * statistics.median(wall), 3),
            "page_faults": statistics.median(faults_of),
        }
    return found


def parts(scene: Scene, num_steps: int) -> dict[str, float]:
    """Return CPU ms of each part of a step."""
    scene.watch()
    step = scene.stopwatch.around("around the model", scene.step)
    step()
    scene.stopwatch.spent.clear()
    before = {} if scene.decoder is None else scene.decoder.spent()
    for _ in range(num_steps):
        step()
    spent = dict(scene.stopwatch.spent)
    for name, inside in ({} if scene.decoder is None else scene.decoder.spent()).items():
        spent[name] = inside - before[name]
        spent["model, the rest"] -= spent[name]
    return {name: round(1e3 * seconds / num_steps, 3) for name, seconds in sorted(spent.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--context", type=int, default=192)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the default; for the habit")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        path = options.model or str(save_random_model(LLAMA_110M, Path(scratch)))
        for batch_size in options.batch_sizes:
            scenes = {
                name: Scene(
                    path,
                    VARIANTS[name],
                    batch_size=batch_size,
                    context=options.context,
                    threads=options.threads,
                    by_module="modules" in name,
                )
                for name in options.variants
            }
            found = whole_steps(scenes, options.steps)
            for name, scene in scenes.items():
                # A graph has no parts to look into.
                inside = scene.warm_up or {"parts_ms": parts(scene, 10)}
                results.append({"batch_size": batch_size, "variant": name, **found[name], **inside})
    print(json.dumps({"machine": machine.describe(), "context": options.context, "results": results}, indent=1))


if __name__ == "__main__":
    main()
