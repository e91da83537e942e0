"""Attention over a paged cache on a CPU: the kernel against gathering, and against what reading or multiplying alone would take.

    python benchmarks/micro/attention.py --quick
    python benchmarks/micro/attention.py --output benchmarks/results/attention.json

Everything runs in turns within a round, so that a noisy machine disturbs all alike. CPU time is compared, in pairs; ``again`` is the
kernel a second time, whose ratio is the noise floor. The limit of a decode is a sum over as many bytes as its keys and values have,
that of a prompt a product of matrices with as many operations. One layer, 12 query heads of 64 elements.

The JSON has ``machine``, ``threads`` and ``results``, one for each case: times by variant in ms (``cpu_ms`` median, ``best_cpu_ms``,
``best_wall_ms``), ratios of CPU times in pairs as quartiles (``gathered_by_native``, ``limit_by_native``, ``again_by_native``), the case's size
(``mib`` read, ``gigaops``), and what the least CPU time comes to: ``gbytes_per_s`` of a decode, ``gflops_per_s`` of a prompt, and
``share_of_limit``, the least time of the limit by that of the kernel.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

from trencadis_torch.attention.native import NativeAttention, compiled_kernel
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.ragged import RaggedPass, Workspace
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache
from trencadis_torch.cache.storage import STORED_DTYPES
from trencadis_torch.native_build import find_compiler

BLOCK_SIZE = 16
NUM_HEADS, HEAD_DIM = 12, 64
CPU = torch.device("cpu")
Variant = Callable[[], object]


@attrs.frozen(kw_only=True)
class Case:
    """Sequences alike, each with ``context`` tokens in the cache and ``query_len`` new ones."""

    name: str
    batch_size: int
    context: int
    query_len: int = 1
    kv_dtype: str = "float32"
    num_kv_heads: int = NUM_HEADS

    @property
    def layer(self) -> AttentionLayer:
        return AttentionLayer(
            index=0,
            num_kv_heads=self.num_kv_heads,
            key_dim=HEAD_DIM,
            value_dim=HEAD_DIM,
            window=0,
            dtype=STORED_DTYPES[self.kv_dtype],
        )

    @property
    def num_bytes(self) -> int:
        """Keys and values that are read."""
        return self.batch_size * (self.context + self.query_len) * self.layer.bytes_per_token

    @property
    def num_operations(self) -> float:
        """Multiplications and additions of scores and values that queries see."""
        seen = self.query_len * self.context + self.query_len * (self.query_len + 1) / 2
        return 4.0 * NUM_HEADS * HEAD_DIM * self.batch_size * seen


CASES = (
    *(
        Case(name=f"decode, {batch_size} × {context}", batch_size=batch_size, context=context)
        for context in (192, 2048)
        for batch_size in (1, 8, 32)
    ),
    *(
        Case(
            name=f"decode, {batch_size} × {context}, 4 KV heads", batch_size=batch_size, context=context, num_kv_heads=4
        )
        for batch_size, context in ((1, 192), (8, 192), (32, 192), (32, 2048))
    ),
    *(
        Case(name=f"decode, 32 × 2048, {kv_dtype}", batch_size=32, context=2048, kv_dtype=kv_dtype)
        for kv_dtype in ("float16", "bfloat16", "int8")
    ),
    Case(name="chunk of 512 on 2048", batch_size=1, context=2048, query_len=512),
    Case(name="prompt of 128", batch_size=1, context=0, query_len=128),
    Case(name="prompt of 512", batch_size=1, context=0, query_len=512),
    Case(name="8 prompts of 512", batch_size=8, context=0, query_len=512),
    Case(name="prompt of 1024", batch_size=1, context=0, query_len=1024),
    Case(name="prompt of 1024, 4 KV heads", batch_size=1, context=0, query_len=1024, num_kv_heads=4),
)


class Scene:
    """A case with random contents; blocks lie in random order."""

    def __init__(self, case: Case, kernel: NativeAttention) -> None:
        generator = torch.Generator().manual_seed(0)
        width = -(-(case.context + case.query_len) // BLOCK_SIZE)
        num_blocks = case.batch_size * width
        self.tables = torch.randperm(num_blocks, generator=generator).view(case.batch_size, width).int()
        self._case = case
        count = case.batch_size * case.query_len
        self._new = [
            torch.randn(count, heads, HEAD_DIM, generator=generator)
            for heads in (NUM_HEADS, case.num_kv_heads, case.num_kv_heads)
        ]
        self._cache = PagedKVCache((case.layer,), num_blocks=num_blocks, block_size=BLOCK_SIZE, device=CPU)
        for row in range(case.batch_size):  # as a model would: what is stored narrowly has its scales
            keys, values = (
                torch.randn(width * BLOCK_SIZE, case.num_kv_heads, HEAD_DIM, generator=generator) for _ in "kv"
            )
            self._cache.write(0, self._slots(row, 0, width * BLOCK_SIZE), keys, values)
        self.native, self.gathered = (self._variant(chosen) for chosen in (kernel, None))

    def _slots(self, row: int, first: int, last: int) -> torch.Tensor:
        positions = torch.arange(first, last)
        return self.tables[row, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE

    def _variant(self, kernel: NativeAttention | None) -> Variant:
        case, rows = self._case, range(self._case.batch_size)
        one = RaggedPass(
            self._cache,
            tables=self.tables,
            slots=torch.cat([self._slots(row, case.context, case.context + case.query_len) for row in rows]),
            rows=np.arange(case.batch_size, dtype=np.int32),
            starts=np.full(case.batch_size, case.context, np.int32),
            query_lens=np.full(case.batch_size, case.query_len, np.int32),
            workspace=Workspace(),
        )

        def attend() -> object:
            self._cache.kernel = kernel  # a pass asks for it when it attends first
            return one.attend(0, *self._new, options=AttentionOptions())

        return attend

    def check(self) -> float:
        """Return the largest difference between the two."""
        found, expected = self.native(), self.gathered()
        assert isinstance(found, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        error = float((found - expected).abs().max())
        if error > (1e-5 if self._case.kv_dtype == "float32" else 1e-3):
            raise SystemExit(f"{self._case.name}: the kernel differs by {error:.2g}")
        return error


def limits(case: Case) -> Iterator[tuple[str, Variant]]:
    """Yield what alone takes as long as the case at best."""
    if case.query_len == 1:
        # Huge pages, as the cache has them; torch's own memory does not.
        source = torch.from_numpy(np.zeros(case.num_bytes // 4, np.float32)).fill_(1.0)
        yield "limit", source.sum
        return
    side = round((case.num_operations / 2) ** (1 / 3))
    first, second = torch.randn(2, side, side)
    yield "limit", lambda: first @ second


def measure(variants: dict[str, Variant], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return CPU and wall time of each call, milliseconds, in turns; the first two rounds are left out."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    for _ in range(rounds + 2):
        for name, variant in variants.items():
            cpu, wall = time.process_time(), time.perf_counter()
            variant()
            times[name].append(((time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3))
    return {name: values[2:] for name, values in times.items()}


def summary(case: Case, times: dict[str, list[tuple[float, float]]], error: float) -> dict[str, Any]:
    def ratio(over: str, under: str) -> list[float]:
        pairs = zip(times[over], times[under], strict=True)
        return [round(part, 3) for part in statistics.quantiles([one[0] / other[0] for one, other in pairs], n=4)]

    best = {name: min(cpu for cpu, _ in values) for name, values in times.items()}
    native_ms = min(best["native"], best["again"])
    decodes = case.query_len == 1
    rate = {"gbytes_per_s": case.num_bytes / 1e6} if decodes else {"gflops_per_s": case.num_operations / 1e6}
    return {
        "case": case.name,
        "largest_difference": error,
        "cpu_ms": {name: round(statistics.median(cpu for cpu, _ in values), 3) for name, values in times.items()},
        "best_cpu_ms": {name: round(value, 3) for name, value in best.items()},
        "best_wall_ms": {name: round(min(wall for _, wall in values), 3) for name, values in times.items()},
        "gathered_by_native": ratio("gathered", "native"),
        "limit_by_native": ratio("limit", "native"),
        "again_by_native": ratio("again", "native"),
        "mib": round(case.num_bytes / 2**20, 2),
        "gigaops": round(case.num_operations / 1e9, 3),
        **{name: round(amount / native_ms, 1) for name, amount in rate.items()},
        "share_of_limit": round(best["limit"] / native_ms, 3),
    }


def machine() -> dict[str, Any]:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    flags = torch.backends.cpu.get_cpu_capability()
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "simd": flags,
        "torch": torch.__version__,
        "compiler": find_compiler(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds, a minute at most")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="file for the results; else they are printed")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kernel = compiled_kernel()
    results = []
    with torch.inference_mode():
        for case in CASES:
            scene = Scene(case, kernel)
            error = scene.check()
            # In this order neither of the two runs of the kernel comes right after the other one.
            variants = {"native": scene.native, "gathered": scene.gathered, "again": scene.native, **dict(limits(case))}
            large = case.num_bytes > 1 << 26 or case.query_len > 1
            rounds = math.ceil((5 if options.quick else options.rounds) * (1 if large else 3))
            results.append(summary(case, measure(variants, rounds), error))
    text = json.dumps(
        {"machine": machine(), "threads": options.threads, "results": results}, indent=1, ensure_ascii=False
    )
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
