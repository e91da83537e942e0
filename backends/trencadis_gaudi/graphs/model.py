"""The model's forward on the device, from tensors to logits: captured, compiled or plain.

    token ids, positions, which logits, attention tensors ──▶ attention pass ──▶ the model's own forward ──▶ logits [L, V]

Shapes: T token positions of the bucket, L logits rows, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch

from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.habana import Habana
from trencadis_gaudi.memory import MemoryMeter
from trencadis_gaudi.passes.tensors import GaudiPasses, PassTensors
from trencadis_torch.attention.adapter import PASS_ARGUMENT

__all__ = ["Forward", "ForwardAdapter", "dynamo_limits", "make_forward", "mark_layers", "prepare_layers"]

logger = logging.getLogger("trencadis.gaudi")

Forward = Callable[..., torch.Tensor]
"""``(token_ids, positions, keep, tensors, *, graph: bool)`` to logits, or the arguments of another module."""

_LAYER_SUFFIXES = ("DecoderLayer", "EncoderLayer", "BertLayer", "BigCodeBlock", "Block", "Layer")


class ForwardAdapter(torch.nn.Module):
    """Forward that takes only tensors, so that only shapes distinguish the vendor's graphs.

    Args:
        model: Model of transformers with paged attention enabled.
        passes: Makes the attention of a pass from its tensors.
    """

    def __init__(self, model: Any, passes: GaudiPasses) -> None:
        super().__init__()
        self.model = model
        self._passes = passes
        passes.attach(model)
        self._selects = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, tensors: PassTensors
    ) -> torch.Tensor:
        """Return logits ``[L, V]``, and write keys and values.

        Args:
            token_ids: Token ids, int64 ``[1, T]``.
            positions: Positions, int64 ``[1, T]``.
            keep: Indices of the tokens whose logits are returned, int64 ``[L]``.
            tensors: Attention tensors of the pass.
        """
        options: dict[str, Any] = {PASS_ARGUMENT: self._passes.attention(tensors)}
        if self._selects:
            options["logits_to_keep"] = keep
        result = self.model(input_ids=token_ids, position_ids=positions, use_cache=False, **options)
        logits: torch.Tensor = result.logits[0]
        return logits if self._selects else logits.index_select(0, keep)


def prepare_layers(model: Any, config: GaudiConfig, habana: Habana) -> None:
    """Mark or compile the decoder layers of a model for the config's mode, once for all its forwards."""
    if config.mode == "lazy":
        mark_layers(model, habana.mark_step, every=config.mark_layers)
    elif config.mode == "compile" and config.regional:
        for layer in decoder_layers(model):
            layer.compile(**_compile_options(config, habana))


def make_forward(adapter: torch.nn.Module, config: GaudiConfig, habana: Habana) -> Forward:
    """Return a module's forward in the config's mode, after :func:`prepare_layers`; changes the module."""
    if config.mode == "lazy":
        meter = MemoryMeter(habana)
        graphed = habana.hpu.wrap_in_hpu_graph(adapter, disable_tensor_cache=True)
        logger.info("Wrapping in HPU Graph took %s", meter.summary())

        def replay(*args: Any, graph: bool) -> torch.Tensor:
            logits: torch.Tensor = graphed(*args, bypass_hpu_graphs=not graph)
            return logits

        return replay
    run: Any = adapter
    if config.mode == "compile" and not config.regional:
        run = torch.compile(adapter, **_compile_options(config, habana))

    def plain(*args: Any, graph: bool) -> torch.Tensor:
        logits: torch.Tensor = run(*args)
        return logits

    return plain


def _compile_options(config: GaudiConfig, habana: Habana) -> dict[str, Any]:
    """Return the arguments of torch.compile.

    Source: vllm-gaudi, v1/worker/hpu_model_runner.py, HPUCompileConfig and _compile_region.
    """
    options: dict[str, Any] = {"backend": habana.compiler, "fullgraph": config.fullgraph}
    if config.dynamic_shapes:
        if isinstance(habana.compiler, str):
            options["options"] = {"force_static_compile": True}
    else:
        options["dynamic"] = False
    return options


def mark_layers(model: Any, mark_step: Callable[[], None], *, every: int) -> int:
    """Call ``mark_step`` after every n-th decoder layer of a model; return the number of marked layers.

    Args:
        model: Model whose layers get hooks.
        mark_step: Ends a run of operations.
        every: Distance between marks in layers, n; 0: no marks.

    Source: vllm-gaudi, v1/worker/hpu_model_runner.py, modify_model_layers.
    """
    if not every:
        return 0
    marked = decoder_layers(model)[every - 1 :: every]
    for layer in marked:
        layer.register_forward_hook(lambda *_: mark_step())
    return len(marked)


def decoder_layers(model: Any) -> list[Any]:
    """Return a model's decoder layers in order, found in its longest list of modules with a layer's class name. Pure."""
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    layers = [[one for one in part if type(one).__name__.endswith(_LAYER_SUFFIXES)] for part in lists]
    return max(layers, key=len, default=[])


def dynamo_limits(num_buckets: int, *, regional: bool) -> tuple[int, int]:
    """Return the maximum numbers of graphs of torch.compile for one piece of code and for all. Pure.

    Args:
        num_buckets: Number of prefill and decode buckets together.
        regional: Whether layers are compiled one by one, which makes more graphs.

    Source: vllm-gaudi, v1/worker/hpu_model_runner.py, warmup_model.
    """
    limit = 1 + (5 if regional else 1) * num_buckets
    return limit, 8 * limit
