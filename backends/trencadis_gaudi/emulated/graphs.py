"""Emulated captured graphs: a replay runs the same operations on the same shapes, or raises.

Source: habana_frameworks.torch.hpu.graphs of the vendor's bridge 1.19, for signatures and the meaning of each call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from trencadis_gaudi.emulated.device import RECIPE_BYTES, EmulatedDevice, EmulatedDeviceError
from trencadis_gaudi.emulated.recorder import Recorder

__all__ = ["GraphStore", "input_hash"]


@attrs.define
class _Graph:
    key: bytes
    outputs: Any
    num_bytes: int


class GraphStore:
    """Wraps modules so that their forward is captured once per shape and replayed.

    Args:
        device: Device that compiles and accounts for memory.
        recorder: Recorder of the operations.

    Attributes:
        num_graphs: Number of captured graphs that were not cleared.
    """

    def __init__(self, device: EmulatedDevice, recorder: Recorder) -> None:
        self._device = device
        self._recorder = recorder
        self.num_graphs = 0

    @property
    def graph_bytes(self) -> int:
        """Memory of all graphs, bytes."""
        return self._device.booked("graphs")

    def wrap_in_hpu_graph(
        self,
        module: Any,
        asynchronous: bool = False,
        disable_tensor_cache: bool = False,
        dry_run: bool = False,
        max_graphs: int | None = None,
    ) -> Any:
        """Replace ``module.forward`` by one that captures and replays; return the module.

        A call takes two more keyword arguments: ``bypass_hpu_graphs`` runs the module without a graph, ``warmup_mode`` does not replay an
        existing graph. The module gets ``clear_cache()`` and ``clear_inputs()``.
        """
        cache: dict[int, _Graph] = {}
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(cache, original, args, kwargs, max_graphs)

        def clear_cache() -> None:
            freed = sum(graph.num_bytes for graph in cache.values())
            self._device.book("graphs", self.graph_bytes - freed)
            self.num_graphs -= len(cache)
            cache.clear()

        module.forward = forward
        module.clear_cache = clear_cache
        module.clear_inputs = lambda: None
        return module

    def _call(
        self,
        cache: dict[int, _Graph],
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        max_graphs: int | None,
    ) -> Any:
        warmup_mode = kwargs.pop("warmup_mode", False)
        if kwargs.pop("bypass_hpu_graphs", False):
            return original(*args, **kwargs)
        key = input_hash((args, kwargs))
        graph = cache.get(key)
        if graph is None:
            if max_graphs is not None and len(cache) >= max_graphs:
                return original(*args, **kwargs)
            graph = cache[key] = self._capture(original, args, kwargs)
            return graph.outputs
        if warmup_mode:
            self._recorder.mark()
            return graph.outputs
        outputs, recording = self._recorder.within_graph(lambda: original(*args, **kwargs))
        if recording.key != graph.key:
            raise EmulatedDeviceError(
                "a replayed graph would run other operations than were captured: they depend on something that is no "
                "tensor, or on what is in a tensor."
            )
        self._device.num_recipe_hits += 1
        return outputs

    def _capture(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Graph:
        outputs, recording = self._recorder.within_graph(lambda: original(*args, **kwargs))
        # Each capture is a separate graph, even if two modules run the same operations.
        self._device.need_recipe(
            b"graph" + self.num_graphs.to_bytes(8, "little") + recording.key,
            what=f"A graph of {recording.num_operations} operations",
        )
        num_bytes = RECIPE_BYTES + 2 * recording.largest_bytes
        self._device.book("graphs", self.graph_bytes + num_bytes)
        self.num_graphs += 1
        return _Graph(recording.key, outputs, num_bytes)


def input_hash(value: Any) -> int:
    """Return the key of a graph: shape, strides and type of tensors, and the hash of anything else. Pure.

    Containers are hashed by their items, so that a number among the inputs gives one graph for each value.
    """
    if isinstance(value, torch.Tensor):
        return hash((tuple(value.shape), value.stride(), value.dtype))
    if isinstance(value, Mapping):
        return hash(tuple((key, input_hash(item)) for key, item in value.items()))
    if isinstance(value, list | tuple):
        return hash(tuple(input_hash(item) for item in value))
    return hash(value)
