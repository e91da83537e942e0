"""CPU seconds of the standard sampler against one that sorts the vocabulary, on the same logits.

    python benchmarks/micro/sampling.py [--rounds 18] [--rows 32] [--vocab 131072]

Each round runs the arms one after the other, in every order in turn: ours, ours again (A/A: the noise floor), and a sampler that
sorts each row where top-k or top-p asks for it, and draws by one uniform number per row. One thread; CPU time of the process.
Writes JSON to standard output: median CPU milliseconds of each arm, and the paired ratios: their median and middle half.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from trencadis.interfaces import SamplingContext
from trencadis.records import RowStart, SamplingParams
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.standard import StandardSampler

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 50},
    "chat": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=131_072)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = {name: compare(params, args) for name, params in CASES.items()}
    machine = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    shape = {"rows": args.rows, "vocab": args.vocab, "rounds": args.rounds}
    print(json.dumps({**machine, **shape, "unit": "CPU ms per call", "cases": cases}, indent=2))


def compare(params: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    logits = model_like_logits(args.rows, args.vocab)
    ours = standard(params, args.rows, args.vocab)
    arms = {"ours": ours, "ours_again": ours, "sorting": sorting(params)}
    times: dict[str, list[float]] = {name: [] for name in arms}
    orders = list(itertools.permutations(arms))
    for number in range(-2, args.rounds):
        for name in orders[number % len(orders)]:
            copy = logits.clone()
            start = time.process_time()
            arms[name](copy)
            if number >= 0:  # the first rounds warm up
                times[name].append(1e3 * (time.process_time() - start))
    samples = {name: np.array(values) for name, values in times.items()}
    return {
        "median_ms": {name: round(float(np.median(values)), 3) for name, values in samples.items()},
        "sorting_over_ours": quartiles(samples["sorting"] / samples["ours"]),
        "noise_floor": quartiles(samples["ours_again"] / samples["ours"]),
    }


def quartiles(ratios: np.ndarray) -> dict[str, float]:
    low, median, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    return {"median": round(float(median), 3), "quarter": round(float(low), 3), "three_quarters": round(float(high), 3)}


def model_like_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    """A few likely tokens over a wide floor, as trained models have."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (num_rows, vocab_size))
    logits[:, :200] += rng.exponential(3, (num_rows, 200)) + 8
    return torch.from_numpy(logits.astype(np.float32))


def standard(params: dict[str, Any], num_rows: int, vocab_size: int) -> Callable[[torch.Tensor], torch.Tensor]:
    sampler = StandardSampler(standard_chain("vllm"))
    sampler.allocate(num_rows=num_rows, vocab_size=vocab_size, device=torch.device("cpu"))
    for row in range(num_rows):
        sampler.start_row(
            RowStart(
                row=row,
                token_ids=np.zeros(1, dtype=np.int32),
                num_prompt_tokens=1,
                params=SamplingParams(**params),
                seed=row,
            )
        )
    tokens = torch.zeros((num_rows, 9), dtype=torch.int32)
    context = SamplingContext(rows=tuple(range(num_rows)), positions=(0,) * num_rows, tokens=tokens)
    return lambda logits: sampler.sample(logits, context).token_ids


def sorting(params: dict[str, Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    temperature, top_k, top_p = params.get("temperature", 1.0), params.get("top_k", 0), params.get("top_p", 1.0)

    def uniforms(cumulative: torch.Tensor) -> torch.Tensor:
        return torch.rand((len(cumulative), 1), generator=generator) * cumulative[:, -1:]

    def sample(logits: torch.Tensor) -> torch.Tensor:
        logits.div_(temperature)
        if not top_k and top_p == 1:
            cumulative = logits.softmax(-1).cumsum(-1)
            return torch.searchsorted(cumulative, uniforms(cumulative))[:, 0]
        values, order = logits.sort(-1, descending=True)
        if top_k:
            values.masked_fill_(values < values[:, top_k - 1 : top_k], -torch.inf)
        if top_p < 1:
            mass = values.softmax(-1)
            values.masked_fill_(mass.cumsum(-1) - mass >= top_p, -torch.inf)
        cumulative = values.softmax(-1).cumsum(-1)
        return order.gather(1, torch.searchsorted(cumulative, uniforms(cumulative)))[:, 0]

    return sample


if __name__ == "__main__":
    main()
