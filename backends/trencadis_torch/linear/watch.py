"""One forward of a few tokens, watched: each module's inputs and outputs, and what other code reads of it.

A module that is called may be replaced by one that gives the same. What other code reads of it (a router its weight's dtype, a
padding row of an embedding) a replacement must have as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, Self

import attrs
import torch
from torch import nn

from trencadis_torch.attention.adapter import switch

__all__ = ["HANDED", "Reads", "Watched", "Watching", "register", "watch"]

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
    register()
    if not switch(model, HANDED):
        raise TypeError(f"{type(model).__name__} does not take its attention from transformers' AttentionInterface")
    positions = torch.tensor([POSITIONS], device=model.device)
    with Watching(called, read) as watching:
        model(input_ids=positions % 7 + 1, position_ids=positions, use_cache=False, trencadis_seen={})
        return watching.take(None)


def register() -> None:
    """Have transformers know the attention that attends to nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(HANDED, _attention)
    AttentionMaskInterface.register(HANDED, lambda **_: None)


class Watching:
    """Modules that are watched while a forward runs, until what was seen of them is taken. As a context: until it ends.

    Each module whose reads are wanted has a class of its own meanwhile, whose instances report what is looked up of them while
    their own ``forward`` does not run.

    Args:
        called: Modules whose calls are wanted, by name.
        read: Modules whose reads by others are wanted, by name.
    """

    def __init__(self, called: Mapping[str, nn.Module], read: Mapping[str, nn.Module]) -> None:
        self._seen: dict[str, Watched] = {}
        self._reads: dict[str, set[str]] = {name: set() for name in read}
        self._names = {id(module): name for name, module in read.items()}
        self._running: Counter[int] = Counter()
        self._handles: dict[str, list[Any]] = {}
        self._originals = {name: (module, type(module)) for name, module in read.items()}
        for name, module in called.items():
            handle = module.register_forward_hook(self._noting(name), with_kwargs=True)
            self._handles.setdefault(name, []).append(handle)
        kinds = {kind: _reporting(kind, self._note) for kind in {type(module) for module in read.values()}}
        for name, module in read.items():
            self._handles.setdefault(name, []).extend(
                (
                    module.register_forward_pre_hook(lambda one, _: self._running.update([id(one)])),
                    module.register_forward_hook(lambda one, *_: self._running.subtract([id(one)])),
                )
            )
            module.__class__ = kinds[type(module)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.take(None)

    def take(self, prefix: str | None) -> tuple[dict[str, Watched], Reads]:
        """Return what was seen of the modules below a name, which are watched no longer, nor held here.

        Args:
            prefix: Beginning of their names, with its point; None: all.
        """
        names = [name for name in self._handles if prefix is None or name.startswith(prefix)]
        for name in names:
            for handle in self._handles.pop(name):
                handle.remove()
            if name in self._originals:
                module, kind = self._originals.pop(name)
                module.__class__ = kind
                del self._names[id(module)]
        seen = {name: self._seen.pop(name) for name in names if name in self._seen}
        reads = {name: frozenset(self._reads[name]) for name in names if self._reads.get(name)}
        return seen, reads

    def _noting(self, name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            self._seen[name] = Watched(args, dict(options), output, dict(options.get(HANDED) or {}))

        return note

    def _note(self, module: nn.Module, attribute: str) -> None:
        if not attribute.startswith("_") and attribute not in _COMMON and not self._running[id(module)]:
            self._reads[self._names[id(module)]].add(attribute)


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
