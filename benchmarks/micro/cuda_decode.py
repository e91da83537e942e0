"""On a CUDA device: the paged kernel against gathering and against what memory allows, and decode steps with and without graphs.

    python benchmarks/micro/cuda_decode.py --quick
    python benchmarks/micro/cuda_decode.py --model DIR --output benchmarks/results/cuda_decode.json

Times are of the device, between events, and variants run in turns; ``again`` is the kernel a second time, whose ratio is the noise floor.
The limit of a decode is a sum over as many bytes as its keys and values have. Steps are timed on the host as well, from launch to
tokens: what a graph saves is mostly there. transformers' own step has a static cache and the same tokens. Without a CUDA device the
script says so and ends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from random_models import LLAMA_110M, save_random_model

from trencadis.clock import SystemClock
from trencadis.interfaces import AllocationPlan
from trencadis.records import Batch, Bucket, ModelSource, Pass, Phase, TableWrites
from trencadis_testing.backend import ArgmaxSampler
from trencadis_torch.attention.choice import choose_kernel
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.ragged import RaggedPass, Workspace
from trencadis_torch.backend import TorchBackend
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKernel, PagedKVCache
from trencadis_torch.config import TorchConfig

BLOCK_SIZE = 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
CASES = ((1, 1024, 1), (8, 1024, 1), (64, 1024, 1), (8, 16384, 1), (32, 1024, 4), (1, 4096, 512), (4, 0, 1024))
"""Sequences, tokens of each in the cache, new tokens of each."""

STEPS: dict[str, dict[str, str]] = {
    "eager, gathered": {"attention": "sdpa"},
    "eager, kernel": {},
    "graphs, gathered": {"attention": "sdpa", "layout": "padded", "graphs": "buckets"},
    "graphs, kernel, not fused": {"layout": "padded", "graphs": "buckets", "pack": "off"},
    "graphs, kernel": {"layout": "padded", "graphs": "buckets"},
    "graphs, kernel, again": {"layout": "padded", "graphs": "buckets"},
}


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Return what one call takes on the device and on the clock, ms."""
    make: Any = torch.cuda.Event
    first, last = make(enable_timing=True), make(enable_timing=True)
    start_s = time.perf_counter()
    first.record()
    run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)), 1e3 * (time.perf_counter() - start_s)


def in_turns(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Return median times of each variant, ms; the first rounds warm up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(rounds + 3):
        for name, run in variants.items():
            times[name].append(timed(run))
    found = {}
    for name, values in times.items():
        device, wall = zip(*values[3:], strict=True)
        found[name] = {"device_ms": round(statistics.median(device), 4), "wall_ms": round(statistics.median(wall), 4)}
    return found


class Attention:
    """One layer in mid-serving; blocks lie in random order."""

    def __init__(self, case: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> None:
        self._size, self._context, self._length = case
        self.layer = _layer(dtype)
        width = -(-(self._context + self._length) // BLOCK_SIZE)
        self._tables = torch.randperm(self._size * width, device=device).view(self._size, width).int()
        self._cache = PagedKVCache((self.layer,), num_blocks=self._size * width, block_size=BLOCK_SIZE, device=device)
        for part in self._cache.parts:
            part.normal_()
        count = self._size * self._length
        self._new = [
            torch.randn(count, heads, HEAD_DIM, device=device, dtype=dtype)
            for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        ]
        self.num_bytes = self._size * (self._context + self._length) * self.layer.bytes_per_token

    def variant(self, kernel: PagedKernel | None) -> Callable[[], torch.Tensor]:
        """Return the layer's attention with a kernel, or by gathering."""
        self._cache.kernel = kernel
        rows = np.arange(self._size, dtype=np.int32)
        places = torch.arange(self._context, self._context + self._length, device=self._tables.device)
        one = RaggedPass(
            self._cache,
            tables=self._tables,
            slots=(self._tables[:, places // BLOCK_SIZE].long() * BLOCK_SIZE + places % BLOCK_SIZE).flatten(),
            rows=rows,
            starts=np.full(self._size, self._context, np.int32),
            query_lens=np.full(self._size, self._length, np.int32),
            workspace=Workspace(),
        )

        def run() -> torch.Tensor:
            return one.attend(0, *self._new, options=AttentionOptions())

        run()  # a pass takes the cache's kernel when it is first attended with
        return run


def _layer(dtype: torch.dtype) -> AttentionLayer:
    return AttentionLayer(
        index=0, num_kv_heads=NUM_KV_HEADS, key_dim=HEAD_DIM, value_dim=HEAD_DIM, window=0, dtype=dtype
    )


def attention(device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """Measure the kernel."""
    dtype = torch.bfloat16
    kernel = choose_kernel("triton", device=device, layout="ragged", layers=(_layer(dtype),), num_heads=NUM_HEADS)
    results = []
    for case in CASES:
        scene = Attention(case, device, dtype)
        run, gathered = scene.variant(kernel), scene.variant(None)
        difference = float((run().float() - gathered().float()).abs().max())
        source = torch.ones(scene.num_bytes // 4, device=device)
        variants: dict[str, Callable[[], object]] = {"kernel": run, "gathered": gathered, "again": run}
        found = in_turns({**variants, "limit": source.sum}, rounds)
        rate = scene.num_bytes / found["kernel"]["device_ms"] / 1e6
        results.append({"case": case, "largest_difference": difference, "gb_per_s": round(rate, 1), **found})
    return results


class Steps:
    """A backend in mid-decode, every row with as many tokens."""

    def __init__(self, path: str, options: dict[str, str], *, size: int, context: int) -> None:
        self.backend = TorchBackend(TorchConfig(device="cuda", **options), clock=SystemClock())  # type: ignore[arg-type]
        facts = self.backend.load(ModelSource(path=path, dtype="bfloat16"), sampler=ArgmaxSampler())
        width = -(-(context + 1) // BLOCK_SIZE)
        self.backend.allocate(
            AllocationPlan(
                num_blocks=size * width,
                block_size=BLOCK_SIZE,
                num_rows=size,
                max_model_len=context + 1,
                max_num_batched_tokens=size,
            )
        )
        bucket = Bucket(size, 1, size * width, Phase.DECODE)
        if options.get("layout") == "padded":
            self.warm_up = self.backend.warm_up([bucket])
        rows = self.backend._rows
        rows.tokens.copy_(torch.randint(3, facts.vocab_size, rows.tokens.shape))
        rows.tables[:, :width] = torch.randperm(size * width).view(size, width).int()
        order = np.arange(size, dtype=np.int32)
        one = Pass(
            bucket=bucket,
            indices=order,
            rows=order,
            starts=np.full(size, context - 1, np.int32),
            query_lens=np.ones(size, np.int32),
            num_logits=np.ones(size, np.int32),
            num_prompt_logits=np.zeros(size, np.int32),
        )
        none = np.empty(0, np.int32)
        writes = TableWrites(rows=none, columns=none, block_ids=none)
        self._batch = Batch(step=0, num_sequences=size, row_starts=(), table_writes=writes, passes=(one,))

    def step(self) -> object:
        """Run one decode step, tokens on the host."""
        return self.backend.submit(self._batch).wait()


def reference(path: str, device: torch.device, *, size: int, context: int) -> Callable[[], object]:
    """Return a decode step of transformers with a static cache of as many tokens."""
    from transformers import AutoModelForCausalLM, StaticCache

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).eval()
    # It counts the tokens of every call: a measurement makes some dozens.
    cache = StaticCache(config=model.config, max_cache_len=context + 256)
    tokens = torch.randint(3, model.config.vocab_size, (size, context - 1), device=device)
    # The cache stands fourth, by whatever name a release of transformers calls it.
    model(tokens, None, None, cache, use_cache=True, logits_to_keep=1)
    last, where = tokens[:, :1], torch.full((size, 1), context - 1, device=device)

    def step() -> object:
        return model(last, None, where, cache, use_cache=True).logits[:, -1].argmax(-1).tolist()

    return step


def steps(path: str, device: torch.device, rounds: int, context: int) -> list[dict[str, Any]]:
    """Measure decode steps."""
    results = []
    for size in (1, 8, 64):
        scenes = {name: Steps(path, options, size=size, context=context) for name, options in STEPS.items()}
        variants: dict[str, Callable[[], object]] = {name: scene.step for name, scene in scenes.items()}
        variants["transformers"] = reference(path, device, size=size, context=context)
        found = in_turns(variants, rounds)
        graphs = scenes["graphs, kernel"].warm_up
        results.append({"batch_size": size, "graph_bytes": graphs.graph_bytes, **found})
        for scene in scenes.values():
            scene.backend.close()
    return results


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="directory of a model; else one of random weights")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--output", type=Path, help="file for the results; else they are printed")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device: nothing is measured.")
        return
    device, rounds = torch.device("cuda", torch.cuda.current_device()), 10 if options.quick else options.rounds
    with tempfile.TemporaryDirectory() as scratch:
        path = options.model or str(save_random_model(LLAMA_110M, Path(scratch)))
        machine = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "cuda": torch.version.cuda}
        found = {
            "machine": machine,
            "attention": attention(device, rounds),
            "steps": steps(path, device, rounds, options.context),
        }
    text = json.dumps(found, indent=1, ensure_ascii=False)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
