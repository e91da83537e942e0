"""Facts about compiled programs: their borders, compilation without running, replay, and sharing by layers."""

from __future__ import annotations

from typing import Any

import torch

from trencadis.records import Bucket, Phase
from trencadis_gaudi.checks.bench import UNCOUNTED, Bench, error_of, on_device
from trencadis_gaudi.checks.records import Found
from trencadis_gaudi.graphs.costs import GraphCosts
from trencadis_gaudi.memory import format_bytes

__all__ = ["compile_only", "costs", "layers", "marks", "replay"]

_CLOSE = 0.01
"""Largest relative error of a result, float32."""


class _Layer(torch.nn.Module):
    """A layer with a matrix, and a cache that each call writes."""

    def __init__(self, size: int, seed: int, device: torch.device) -> None:
        super().__init__()
        self.matrix = torch.randn((size, size), generator=torch.Generator().manual_seed(seed)) / size**0.5
        self.weight = self.matrix.to(device)
        self.cache = torch.zeros((4 * size, size), device=device)

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, slots, x)
        return torch.tanh(self.cache.index_select(0, slots) @ self.weight) + x

    def on_host(self, x: torch.Tensor) -> torch.Tensor:
        """Return the result computed on the CPU."""
        return torch.tanh(x @ self.matrix) + x


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@on_device
def marks(bench: Bench) -> Found:
    """Count programs with and without a mark."""
    if not bench.counts:
        return UNCOUNTED
    host = _random(19, 211, seed=1)
    given = bench.to_device(host)
    with bench.compilations() as one:
        together = (given + 1) * 2
    with bench.compilations() as two:
        apart = given - 1
        bench.habana.mark_step()
        apart = apart / 2
    wrong = error_of(together, (host + 1) * 2) + error_of(apart, (host - 1) / 2)
    is_right = one.number == 1 and two.number == 2 and wrong < _CLOSE
    return Found(is_right, f"{one.number} and {two.number} programs, relative error {wrong:.2%}")


@on_device
def compile_only(bench: Bench) -> Found:
    """Compile, then run."""
    if not bench.counts:
        return UNCOUNTED
    habana = bench.habana
    host = _random(23, 96, seed=2)
    layer = _Layer(96, 3, habana.device)
    run: Any = layer
    if bench.config.mode == "compile":
        run = torch.compile(layer, backend=habana.compiler, dynamic=False)
    given, slots = bench.to_device(host), bench.to_device(torch.arange(23))
    with habana.internal.bridge_config.env_setting("PT_COMPILE_ONLY_MODE", True), bench.compilations() as dry:
        found = run(given, slots)  # kept, since lazy mode does not compute dropped results
    with bench.compilations() as wet:
        found = run(given, slots)
    wrong = error_of(found, layer.on_host(host))
    text = f"{dry.number} programs within, {wet.number} when run, relative error {wrong:.2%}"
    return Found(dry.number > 0 and not wet.number and wrong < _CLOSE, text)


@on_device
def replay(bench: Bench) -> Found:
    """Capture with some inputs, replay with others."""
    layer = _Layer(128, 4, bench.habana.device)
    graphed = bench.habana.hpu.wrap_in_hpu_graph(layer, disable_tensor_cache=True)
    slots = bench.to_device(torch.arange(32))
    errors, replayed = [], 0
    for seed in range(4):
        host = _random(32, 128, seed=10 + seed)
        given = bench.to_device(host)
        with bench.compilations() as compiled:
            found = graphed(given, slots)
        replayed += compiled.number if seed else 0
        errors.append(error_of(found, layer.on_host(host)))
    num_wrong = sum(not error < _CLOSE for error in errors[1:])  # NaN is wrong
    text = f"captured: relative error {errors[0]:.2%}; {num_wrong} of 3 replays wrong, {replayed} programs compiled by them"
    return Found(errors[0] < _CLOSE and not num_wrong and not replayed, text)


@on_device
def costs(bench: Bench) -> Found:
    """Capture graphs of growing size, and estimate the memory of each from the previous ones."""
    habana, size = bench.habana, 1024
    graphed = habana.hpu.wrap_in_hpu_graph(_Layer(size, 5, habana.device), disable_tensor_cache=True)
    fit, rows, ratio = GraphCosts(), [], 1.0
    for length in (256, 512, 1024, 2048):
        bucket = Bucket(1, length, 0, Phase.PREFILL)
        given, slots = bench.to_device(torch.zeros(length, size)), bench.to_device(torch.arange(length))
        before = habana.free_bytes()
        graphed(given, slots)
        bench.flush()
        taken, estimate = max(0, before - habana.free_bytes()), fit.estimate(bucket)
        rows.append(f"{length}: {format_bytes(taken)} (estimate {format_bytes(estimate)})")
        ratio = max(1, estimate) / max(1, taken)
        fit.add(bucket, taken)
    graphed.clear_cache()
    return Found(0.5 <= ratio <= 2, "; ".join(rows))


@on_device
def layers(bench: Bench) -> Found:
    """Compile layers of equal structure, and count the programs."""
    from torch._dynamo.utils import counters

    habana = bench.habana
    every = [_Layer(112, 20 + number, habana.device) for number in range(4)]
    for layer in every:
        layer.compile(backend=habana.compiler, dynamic=False)
    slots, before = bench.to_device(torch.arange(40)), counters["stats"]["unique_graphs"]
    breaks, limits = habana.dynamo.num_graph_breaks, habana.dynamo.num_limit_hits
    again, errors = 0, []
    for seed in (30, 31):
        host = _random(40, 112, seed=seed)
        found = bench.to_device(host)
        with bench.compilations() as compiled:
            for layer in every:
                found = layer(found, slots)
        again = compiled.number
        for layer in every:
            host = layer.on_host(host)
        errors.append(error_of(found, host))
    num_graphs = counters["stats"]["unique_graphs"] - before
    breaks, limits = habana.dynamo.num_graph_breaks - breaks, habana.dynamo.num_limit_hits - limits
    text = f"{num_graphs} graphs, {breaks} breaks, {limits} limits hit, {again} programs the second time, relative error {errors[-1]:.2%}"
    return Found((num_graphs, breaks, limits, again) == (1, 0, 0, 0) and all(error < _CLOSE for error in errors), text)
