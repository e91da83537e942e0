"""``hpu_backend`` of torch.compile, emulated: graphs run as they are, and each one made is a compilation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_all_only, tree_map_only

from trencadis_gaudi.emulated.device import EmulatedDevice

__all__ = ["counting_backend", "unwritten_outputs"]


def counting_backend(device: EmulatedDevice) -> Callable[..., Any]:
    """Return a backend for ``torch.compile`` whose signature is that of ``hpu_backend``, bridge 1.19."""
    numbers = itertools.count()

    def hpu_backend(graph_module: Any, example_inputs: Any, **kwargs: Any) -> Any:
        # torch.compile asks only for graphs it does not have.
        device.need_recipe(b"compiled" + next(numbers).to_bytes(8, "little"), what="A graph of torch.compile")

        def run(*args: Any) -> Any:
            outputs = unwritten_outputs(graph_module) if device.compile_only else None
            return graph_module.forward(*args) if outputs is None else outputs

        return run

    return hpu_backend


def unwritten_outputs(graph_module: Any) -> Any:
    """Return uninitialised memory in the place of a graph's results; None if a shape is not known beforehand.

    Args:
        graph_module: As torch.compile makes it: each node knows what it results in.

    Source: PT_COMPILE_ONLY_MODE of the vendor's bridge, under which no recipe is launched.
    """
    (output,) = (node for node in graph_module.graph.nodes if node.op == "output")
    results = tree_map_only(torch.fx.Node, lambda node: node.meta.get("example_value"), output.args[0])
    if not tree_all_only((torch.Tensor, torch.SymInt, type(None)), _is_static, results):
        return None
    return tree_map_only(torch.Tensor, _unwritten, results)


def _is_static(result: Any) -> bool:
    return isinstance(result, torch.Tensor) and all(isinstance(size, int) for size in (*result.shape, *result.stride()))


def _unwritten(result: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(result.shape, result.stride(), dtype=result.dtype)
