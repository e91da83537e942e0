"""Emulated ``hpu_backend`` of torch.compile, which counts each new graph as a compilation.

The first run of a graph is recorded and checked like that of a captured graph; later runs use the inner CPU tensors directly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_all_only, tree_map, tree_map_only

from trencadis_gaudi.emulated.device import EmulatedDevice
from trencadis_gaudi.emulated.float8 import copy_by_index
from trencadis_gaudi.emulated.recorder import Recorder
from trencadis_gaudi.emulated.tensor import CPU, HpuTensor, is_hpu, wrap

__all__ = ["counting_backend", "unwritten_outputs"]


def counting_backend(device: EmulatedDevice, recorder: Recorder) -> Callable[..., Any]:
    """Return a backend for ``torch.compile`` with the signature of ``hpu_backend``, bridge 1.19."""
    numbers = itertools.count()

    def hpu_backend(graph_module: Any, example_inputs: Any, **kwargs: Any) -> Any:
        # torch.compile calls this only for new graphs.
        device.need_recipe(b"compiled" + next(numbers).to_bytes(8, "little"), what="A graph of torch.compile")
        on_host: list[Any] = []

        def run(*args: Any) -> Any:
            if device.compile_only and (outputs := unwritten_outputs(graph_module)) is not None:
                return tree_map_only(torch.Tensor, lambda output: wrap(output, recorder), outputs)
            if on_host:
                return _run_within(on_host[0], args, recorder)
            outputs, _ = recorder.within_graph(lambda: graph_module.forward(*args))
            on_host.append(_moved_to_host(graph_module))
            return outputs

        return run

    return hpu_backend


def _moved_to_host(graph_module: Any) -> Any:
    """Return a copy of a graph that runs on the inner CPU tensors."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    for node in graph.nodes:
        node.args, node.kwargs = tree_map(lambda value: CPU if is_hpu(value) else value, (node.args, node.kwargs))
        if node.target == "index_copy_":
            node.op, node.target = "call_function", copy_by_index
    return torch.fx.GraphModule(graph_module, graph)


def _run_within(graph_module: Any, args: tuple[Any, ...], recorder: Recorder) -> Any:
    wrappers = {id(arg.on_host): arg for arg in args if isinstance(arg, HpuTensor)}
    outputs = graph_module.forward(*(arg.on_host if isinstance(arg, HpuTensor) else arg for arg in args))
    return tree_map_only(
        torch.Tensor,
        lambda output: wrappers[id(output)] if id(output) in wrappers else wrap(output, recorder),
        outputs,
    )


def unwritten_outputs(graph_module: Any) -> Any:
    """Return uninitialised tensors in place of a graph's results; None if a shape is not static.

    Args:
        graph_module: Graph made by torch.compile, whose nodes hold example results.

    Source: PT_COMPILE_ONLY_MODE of the vendor's bridge, which launches no recipe.
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
