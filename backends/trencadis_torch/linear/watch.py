"""One forward of a few tokens, watched: each module's inputs and outputs, and what other code reads of it.

A module that is called may be replaced by one that gives the same. What other code reads of it (a router its weight's dtype, a
padding row of an embedding) a replacement must have as well.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import attrs
import torch
from torch import nn

from trencadis_torch.attention.adapter import switch

__all__ = ["HANDED", "Reads", "Watched", "watch"]

HANDED: Final = "trencadis_seen"
"""Name of the attention function, and of its argument that takes what it was called with."""

POSITIONS: Final = (0, 3, 4, 9, 17)
"""Positions of the tokens that go through the model once: unlike their indices."""

_COMMON: Final = frozenset(dir(nn.Module()))

Reads = Mapping[str, frozenset[str]]
"""By the name of a module, the attributes of it that other code read."""


@attrs.define
class Watched:
    """Inputs and outputs of a module; of an attention also the arguments of its attention function."""

    args: tuple[Any, ...]
    options: dict[str, Any]
    output: Any
    handed: dict[str, Any] = attrs.field(factory=dict)


def watch(
    model: Any, called: Mapping[str, nn.Module], read: Mapping[str, nn.Module]
) -> tuple[dict[str, Watched], Reads]:
    """Run five tokens through a model. Its attention is switched to one that attends to nothing.

    Args:
        model: A model of transformers.
        called: Modules whose calls are wanted, by name.
        read: Modules whose reads by others are wanted, by name.

    Returns:
        The last call of each module that was called, and the reads.

    Raises:
        Exception: The forward fails with such an attention; any kind.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(HANDED, _attention)
    AttentionMaskInterface.register(HANDED, lambda **_: None)
    seen: dict[str, Watched] = {}
    if not switch(model, HANDED):
        raise TypeError(f"{type(model).__name__} does not take its attention from transformers' AttentionInterface")
    positions = torch.tensor([POSITIONS], device=model.device)
    with _calls(called, seen), _reads(read) as reads:
        model(input_ids=positions % 7 + 1, position_ids=positions, use_cache=False, trencadis_seen={})
    return seen, {name: frozenset(names) for name, names in reads.items() if names}


@contextlib.contextmanager
def _calls(modules: Mapping[str, nn.Module], seen: dict[str, Watched]) -> Iterator[None]:
    def noting(name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            seen[name] = Watched(args, dict(options), output, dict(options.get(HANDED) or {}))

        return note

    handles = [module.register_forward_hook(noting(name), with_kwargs=True) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _reads(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, set[str]]]:
    """Note attributes that are read of a module while its own ``forward`` does not run.

    Each module has a class of its own meanwhile, whose instances report what is looked up of them.
    """
    reads: dict[str, set[str]] = {name: set() for name in modules}
    names = {id(module): name for name, module in modules.items()}
    running: Counter[int] = Counter()

    def note(module: nn.Module, attribute: str) -> None:
        if not attribute.startswith("_") and attribute not in _COMMON and not running[id(module)]:
            reads[names[id(module)]].add(attribute)

    kinds = {kind: _reporting(kind, note) for kind in {type(module) for module in modules.values()}}
    handles = []
    for module in modules.values():
        handles.append(module.register_forward_pre_hook(lambda one, _: running.update([id(one)])))
        handles.append(module.register_forward_hook(lambda one, *_: running.subtract([id(one)])))
    originals = {name: type(module) for name, module in modules.items()}
    try:
        for module in modules.values():
            module.__class__ = kinds[type(module)]
        yield reads
    finally:
        for name, module in modules.items():
            module.__class__ = originals[name]
        for handle in handles:
            handle.remove()


def _reporting(kind: type[nn.Module], note: Callable[[nn.Module, str], None]) -> type[nn.Module]:
    def look_up(self: nn.Module, attribute: str) -> Any:
        note(self, attribute)
        return kind.__getattribute__(self, attribute)

    return type(kind.__name__, (kind,), {"__getattribute__": look_up})


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    trencadis_seen: dict[str, Any],
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Note the arguments of an attention function; returns values of the right size for later layers."""
    trencadis_seen.clear()
    trencadis_seen.update(options, query=query.clone(), key=key.clone(), value=value.clone())
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None
