"""Stages of a pipeline: a rank keeps some of a model's layers, gets hidden states from the stage before and sends its own to the next.

    first stage    embeddings ─▶ layers ─▶ send
    others         receive ─▶ layers ─▶ send
    last stage     receive ─▶ layers ─▶ norm ─▶ logits

What is another stage's is replaced by modules that pass on what they get, so that the model's own forward runs on each rank, and layers keep
their numbers. Which module is what, transformers says with most of its models (``model.pp_plan``).
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import nn

from trencadis.errors import ModelLoadError
from trencadis.interfaces import RankGroups
from trencadis.records import divide_layers

__all__ = ["cut_stage"]


@attrs.frozen(kw_only=True)
class _Parts:
    """Names of a model's parts."""

    embeddings: str
    layers: str
    after: tuple[str, ...]
    head: str


class _Passes(nn.Module):
    """Stands for a layer or a norm of another stage."""

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states


class _NoHead(_Passes):
    """Stands for the output projection of the last stage."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.out_features = out_features


class _NoEmbeddings(nn.Module):
    """Stands for the embeddings of the first stage, in whose place hidden states are received.

    They are NaN: whatever else a model does with its embeddings makes NaN of its logits, and the self-check refuses it.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self._hidden_size = hidden_size
        # A parameter, for a model whose others have all been packed is asked for its data type and device, too.
        self.like = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.like.data.new_full((*input_ids.shape, self._hidden_size), torch.nan)


def cut_stage(model: Any, groups: RankGroups) -> range:
    """Leave a model the part of one stage, in place; returns its layers.

    Args:
        model: Model with parameters of local size.
        groups: Where the rank stands.

    Raises:
        ModelLoadError: It has no stages, or fewer layers than there are stages.
    """
    parts, layout = _parts_of(model), groups.layout
    stage, layers = layout.stage(groups.rank), model.get_submodule(parts.layers)
    embeddings, head = model.get_submodule(parts.embeddings), model.get_submodule(parts.head)
    try:
        stages = divide_layers(
            [_size(layer) for layer in layers],
            num_stages=layout.pipeline,
            first=_size(embeddings),
            last=_size(head) + sum(_size(model.get_submodule(name)) for name in parts.after),
        )
    except ValueError as error:
        raise ModelLoadError(
            f"[parallel] pipeline = {layout.pipeline}: {type(model).__name__} has {len(layers)} layers.",
            hint=f"Set [parallel] pipeline to {len(layers)} or less.",
        ) from error
    own = stages[stage]
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    for index in range(len(layers)):
        if index not in own:
            layers[index] = _Passes()
    if not is_first:
        _put(model, parts.embeddings, _NoEmbeddings(_hidden_size(embeddings)))
        _receive(layers[own[0]], groups)
    if not is_last:
        for name in parts.after:
            _put(model, name, _Passes())
        _put(model, parts.head, _NoHead(head.out_features))
        _send(layers[own[-1]], groups)
    return own


def _parts_of(model: Any) -> _Parts:
    plan = getattr(model, "pp_plan", None) or {}
    lists = [name for name in plan if isinstance(_found(model, name), nn.ModuleList)]
    embeddings = [name for name, (inputs, _) in plan.items() if list(inputs) == ["input_ids"]]
    heads = [name for name, module in model.named_modules() if module is model.get_output_embeddings()]
    if len(lists) != 1 or len(embeddings) != 1 or len(heads) != 1:
        raise ModelLoadError(
            f"{type(model).__name__} comes without a plan of stages, which [parallel] pipeline above 1 needs.",
            hint="Set [parallel] pipeline = 1, and tensor to the number of ranks.",
        )
    after = [name for name, (inputs, _) in plan.items() if list(inputs) == ["hidden_states"] and name not in heads]
    return _Parts(embeddings=embeddings[0], layers=lists[0], after=tuple(after), head=heads[0])


def _found(model: Any, name: str) -> Any:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _size(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _hidden_size(embeddings: Any) -> int:
    return int(getattr(embeddings, "local", embeddings).embedding_dim)


def _put(model: Any, name: str, module: nn.Module) -> None:
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, module)


def _receive(layer: nn.Module, groups: RankGroups) -> None:
    """Let a layer get hidden states from the same place of the stage before."""

    def receive(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        empty = args[0] if args else options["hidden_states"]
        hidden = torch.empty(empty.shape, dtype=empty.dtype, device=empty.device)
        groups.world.receive(hidden, source=groups.rank - groups.layout.tensor)
        return ((hidden, *args[1:]), options) if args else (args, {**options, "hidden_states": hidden})

    layer.register_forward_pre_hook(receive, with_kwargs=True)


def _send(layer: nn.Module, groups: RankGroups) -> None:
    """Let a layer's output go to the same place of the next stage."""

    def send(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        groups.world.send(output.contiguous(), target=groups.rank + groups.layout.tensor)

    layer.register_forward_hook(send)
