"""float32 against bfloat16 and float16 for one decoder layer's products on a CPU: what ``dtype = "auto"`` rests on.

    python benchmarks/micro/dtype.py --repeats 20 > dtype.json

Each size stands for a model: the layer's four products, times the number of layers such a model has. Variants run in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch.nn.functional import linear

SIZES = {"6 M": (256, 768, 6), "100 M": (768, 2048, 12), "600 M": (1024, 3072, 28), "1.2 B": (2048, 8192, 16)}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    with torch.inference_mode():
        for name, (hidden, inner, num_layers) in SIZES.items():
            for batch_size in (1, 8, 32, 256):
                # Weights of several layers, so that no cache holds a model that would not fit it.
                copies = min(num_layers, 4)
                shapes = ((3 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
                weights = {d: [[torch.randn(s).to(d) for s in shapes] for _ in range(copies)] for d in DTYPES}
                inputs = {d: [torch.randn(batch_size, s[1]).to(d) for s in shapes] for d in DTYPES}
                times: dict[str, list[float]] = {str(dtype): [] for dtype in DTYPES}
                for _ in range(options.repeats + 2):
                    for dtype in DTYPES:
                        start_s = time.perf_counter()
                        for layer in weights[dtype]:
                            for weight, value in zip(layer, inputs[dtype], strict=True):
                                linear(value, weight)
                        times[str(dtype)].append((time.perf_counter() - start_s) * 1e3 * num_layers / copies)
                medians = {dtype: round(statistics.median(values[2:]), 3) for dtype, values in times.items()}
                results.append({"model": name, "batch_size": batch_size, "median_ms": medians})
    capability = torch.backends.cpu.get_cpu_capability()
    print(json.dumps({"cpu": capability, "torch": torch.__version__, "results": results}, indent=1))


if __name__ == "__main__":
    main()
