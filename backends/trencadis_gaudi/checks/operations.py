"""Checks of every operation of a forward and of the sampler, one at a time.

The names are those of operations that the emulated device runs while it serves; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from trencadis_gaudi.checks.bench import Bench, on_device
from trencadis_gaudi.checks.records import Found

__all__ = ["OPERATIONS", "every"]

_TOLERANCE = 1e-3

Inputs = dict[str, torch.Tensor]


def _inputs() -> Inputs:
    maker = torch.Generator().manual_seed(3)
    x = torch.randn((8, 64), generator=maker)
    return {
        "x": x,
        "y": torch.randn((8, 64), generator=maker),
        "weight": torch.randn((64, 64), generator=maker),
        "positive": x.abs() + 0.5,
        "ids": torch.randint(0, 8, (8,), generator=maker),
        "columns": torch.stack([torch.randperm(64, generator=maker)[:16] for _ in range(8)]),
        "order": torch.randperm(8, generator=maker),
        "mask": x > 0,
        "heads": torch.randn((2, 4, 16, 32), generator=maker),
    }


OPERATIONS: dict[str, Callable[[Inputs], Any]] = {
    "__and__": lambda t: t["mask"] & (t["y"] > 0),
    "__or__": lambda t: t["mask"] | (t["y"] > 0),
    "_to_copy": lambda t: t["x"].to(torch.bfloat16).float(),
    "add": lambda t: t["x"] + t["y"],
    "all": lambda t: t["mask"].all(),
    "amax": lambda t: t["x"].amax(-1),
    "arange": lambda t: torch.arange(64, device=t["x"].device) + t["ids"][0],
    "argmax": lambda t: t["x"].argmax(-1),
    "bitwise_not": lambda t: ~t["mask"],
    "cat": lambda t: torch.cat([t["x"], t["y"]]),
    "clamp": lambda t: t["x"].clamp(-1, 1),
    "clamp_": lambda t: t["x"].clone().clamp_(-1, 1),
    "clamp_min": lambda t: t["x"].clamp_min(0),
    "copy_": lambda t: t["x"].clone().copy_(t["y"]),
    "cos": lambda t: t["x"].cos(),
    "cumsum": lambda t: t["x"].cumsum(-1),
    "div": lambda t: t["x"] / t["positive"],
    "div_": lambda t: t["x"].clone().div_(t["positive"]),
    "einsum": lambda t: torch.einsum("ab,cb->ac", t["x"], t["y"]),
    "embedding": lambda t: functional.embedding(t["ids"], t["x"]),
    "eq": lambda t: t["ids"] == t["order"],
    "exp": lambda t: t["x"].exp(),
    "exp_": lambda t: t["x"].clone().exp_(),
    "eye": lambda t: torch.eye(8, device=t["x"].device) * t["x"][:, :8],
    "gather": lambda t: t["x"].gather(1, t["columns"]),
    "ge": lambda t: t["x"] >= t["y"],
    "gt": lambda t: (t["x"] > t["y"]) & (t["x"] > 0),
    "index": lambda t: t["x"][t["ids"]],
    "index_copy_": lambda t: t["x"].clone().index_copy_(0, t["order"], t["y"]),
    "index_put_": lambda t: t["x"].clone().index_put_((t["order"], t["columns"][:, 0]), t["y"][:, 0]),
    "index_select": lambda t: t["x"].index_select(0, t["ids"]),
    "isfinite": lambda t: (t["x"] / t["x"].relu()).isfinite(),
    "le": lambda t: t["x"] <= t["y"],
    "linear": lambda t: functional.linear(t["x"], t["weight"]),
    "log_": lambda t: t["positive"].clone().log_(),
    "lt": lambda t: (t["x"] < t["y"]) & (t["x"] < 0),
    "masked_fill": lambda t: t["x"].masked_fill(t["mask"], 2.0),
    "masked_fill_": lambda t: t["x"].clone().masked_fill_(t["mask"], 2.0),
    "matmul": lambda t: t["x"] @ t["weight"],
    "maximum": lambda t: torch.maximum(t["x"], t["y"]),
    "mean": lambda t: t["x"].mean(-1, keepdim=True),
    "mul": lambda t: t["x"] * t["y"],
    "neg": lambda t: -t["x"],
    "new_full": lambda t: t["x"].new_full((8, 64), 3.0) + t["x"],
    "pad": lambda t: functional.pad(t["x"], (0, 3)),
    "pow": lambda t: t["x"].pow(2),
    "repeat_interleave": lambda t: t["x"].repeat_interleave(2, dim=0),
    "rsqrt": lambda t: t["positive"].rsqrt(),
    "scaled_dot_product_attention": lambda t: functional.scaled_dot_product_attention(
        t["heads"], t["heads"], t["heads"]
    ),
    "scatter_": lambda t: t["x"].clone().scatter_(1, t["columns"], t["y"]),
    "scatter_add_": lambda t: t["x"].clone().scatter_add_(1, t["columns"], t["y"]),
    "scatter_reduce": lambda t: t["x"].scatter_reduce(0, t["ids"][:, None].expand(8, 64), t["y"], "amax"),
    "silu": lambda t: functional.silu(t["x"]),
    "sin": lambda t: t["x"].sin(),
    "softmax": lambda t: t["x"].softmax(-1),
    "sort": lambda t: t["x"].sort(-1, descending=True)[0],
    "sub": lambda t: t["x"] - t["y"],
    "sum": lambda t: t["x"].sum(-1),
    "topk": lambda t: t["x"].topk(8)[0],
    "where": lambda t: torch.where(t["mask"], t["x"], t["y"]),
    "zeros": lambda t: torch.zeros((8, 64), device=t["x"].device) + t["x"],
    "zeros_like": lambda t: torch.zeros_like(t["x"]) + t["y"],
}
"""Computation that uses each PyTorch operation, by name, on the device of its inputs."""


@on_device
def every(bench: Bench) -> Found:
    """Run each operation on the device and on the CPU."""
    inputs = _inputs()
    given = {name: bench.to_device(tensor) for name, tensor in inputs.items()}
    wrong: list[str] = []
    with bench.fallbacks() as fallen:
        for name, operation in OPERATIONS.items():
            try:
                found = operation(given).cpu()
            except Exception as error:
                wrong.append(f"{name} raised {type(error).__name__}: {str(error)[:80]}")
                continue
            if not torch.allclose(found.float(), operation(inputs).float(), rtol=_TOLERANCE, atol=_TOLERANCE):
                wrong.append(name)
    text = f"{len(OPERATIONS)} operations; on the host: {_list(fallen)}; wrong: {_list(wrong)}"
    return Found(not fallen and not wrong, text)


def _list(names: Any) -> str:
    return ", ".join(names) or "none"
