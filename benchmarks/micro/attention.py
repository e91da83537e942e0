"""Decode attention over a paged cache: grouped gathering against one sequence at a time and against repeated heads.

    python benchmarks/micro/attention.py --repeats 30 > attention.json

Variants run one after the other within each repeat, so that a noisy machine disturbs all alike; ``grouped_again`` is the same code as
``grouped``: the ratio of the two is the noise floor.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from trencadis_torch.kv_cache import AttentionLayer, PagedKVCache
from trencadis_torch.ragged import RaggedPass, Workspace

BLOCK_SIZE = 16


class Scene:
    """Sequences in mid-decode with random contexts."""

    def __init__(self, *, batch_size: int, context: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        generator = np.random.default_rng(0)
        self.starts = generator.integers(context // 2, context * 3 // 2, batch_size).astype(np.int32)
        per_row = int(self.starts.max()) // BLOCK_SIZE + 1
        spec = AttentionLayer(
            index=0, num_kv_heads=num_kv_heads, key_dim=head_dim, value_dim=head_dim, window=0, dtype=torch.float32
        )
        num_blocks = batch_size * per_row
        self.cache = PagedKVCache((spec,), num_blocks=num_blocks, block_size=BLOCK_SIZE, device=torch.device("cpu"))
        for tensor in (*self.cache.keys, *self.cache.values):
            tensor.normal_()
        self.tables = torch.from_numpy(generator.permutation(num_blocks).reshape(batch_size, per_row).astype(np.int32))
        self.query = torch.randn(batch_size, num_heads, head_dim)
        self.new = torch.randn(2, batch_size, num_kv_heads, head_dim)
        rows = np.arange(batch_size, dtype=np.int32)
        positions = torch.from_numpy(self.starts).long()
        self.slots = self.tables[torch.arange(batch_size), positions // BLOCK_SIZE].long() * BLOCK_SIZE
        self.slots += positions % BLOCK_SIZE
        self.one = RaggedPass(
            self.cache,
            tables=self.tables,
            slots=self.slots,
            rows=rows,
            starts=self.starts,
            query_lens=np.ones(batch_size, np.int32),
            workspace=Workspace(),
        )

    def grouped(self) -> torch.Tensor:
        """The backend's own."""
        return self.one.attend(0, self.query, *self.new, scale=None, softcap=None, sinks=None)

    def alone(self, *, repeat: bool = False) -> torch.Tensor:
        """One sequence at a time; with ``repeat``, key-value heads repeated to the number of query heads."""
        self.cache.write(0, self.slots, *self.new)
        cached = self.cache.layer(0)
        groups = self.query.shape[1] // cached[0].shape[2]
        outputs = []
        for row, start in enumerate(self.starts.tolist()):
            blocks = self.tables[row, : start // BLOCK_SIZE + 1].long()
            keys, values = (part[blocks].flatten(0, 1)[: start + 1].transpose(0, 1)[None] for part in cached)
            if repeat:
                keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
            query = self.query[row : row + 1, :, None]
            outputs.append(scaled_dot_product_attention(query, keys, values, enable_gqa=not repeat)[0, :, 0])
        return torch.stack(outputs)


def measure(variants: dict[str, Callable[[], torch.Tensor]], repeats: int) -> dict[str, dict[str, float]]:
    """Return median and best of each variant, µs, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats + 2):
        for name, variant in variants.items():
            start_s = time.perf_counter()
            variant()
            times[name].append((time.perf_counter() - start_s) * 1e6)
    return {
        name: {"median_us": round(statistics.median(values[2:]), 1), "best_us": round(min(values[2:]), 1)}
        for name, values in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    with torch.inference_mode():
        for batch_size, context in ((1, 256), (8, 256), (32, 256), (32, 1024)):
            scene = Scene(batch_size=batch_size, context=context, num_heads=8, num_kv_heads=4, head_dim=64)
            torch.testing.assert_close(scene.grouped(), scene.alone(), atol=1e-4, rtol=1e-4)
            variants: dict[str, Callable[[], torch.Tensor]] = {
                "grouped": scene.grouped,
                "alone": scene.alone,
                "alone_repeated_heads": lambda scene=scene: scene.alone(repeat=True),  # type: ignore[misc]
                "grouped_again": scene.grouped,
            }
            times = measure(variants, options.repeats)
            results.append({"batch_size": batch_size, "context": context, "times": times})
    machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__}
    print(json.dumps({"machine": machine, "threads": options.threads, "results": results}, indent=1))


if __name__ == "__main__":
    main()
