"""The model's forward as graphs of torch.compile: one for each shape, all of them made by the warm-up.

    while preparing    a shape without a graph ─▶ trace ▶ compile, or take from disk ▶ compare with the plain forward
    while serving      a shape with a graph ─▶ its graph;  any other ─▶ the plain forward, counted; nothing is compiled

A graph is found by the sizes that all its shapes follow from. So what torch.compile would check before every call (guards) is left
out: model, cache and threads are what they were when it was made, and every graph has code of its own, so that none can be taken for
another.
"""

from __future__ import annotations

import contextlib
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch

from trencadis.errors import BackendError
from trencadis_torch.inputs import AttentionPass
from trencadis_torch.runner import Forward

__all__ = ["Graphs"]

NUM_TRIED: Final = 7
"""Different tokens and positions that a new graph is compared on."""

logger = logging.getLogger("trencadis.torch")


class Graphs:
    """A forward that runs as a graph where there is one. Thread of the backend.

    Args:
        plain: The forward as it is.
        check: Raises if logits of a graph, second, are not those of the plain forward, first; None: not compared.
        compiler: Backend of torch.compile.

    Attributes:
        num_eager: Passes that ran without a graph.
    """

    def __init__(
        self,
        plain: Forward,
        *,
        check: Callable[[torch.Tensor, torch.Tensor], None] | None,
        compiler: str = "inductor",
    ) -> None:
        self.num_eager = 0
        self._plain = plain
        self._check = check
        self._compiler = compiler
        self._graphs: dict[tuple[Any, ...], Forward] = {}
        self._missed: set[tuple[Any, ...]] = set()
        self._is_preparing = False

    def __len__(self) -> int:
        return len(self._graphs)

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Make graphs of the shapes that run within a ``with`` block."""
        self._is_preparing = True
        try:
            yield
        finally:
            self._is_preparing = False

    def __call__(
        self, token_ids: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, attention: AttentionPass
    ) -> torch.Tensor:
        """Return logits ``[L, V]``, and write keys and values.

        Raises:
            BackendError: While preparing: the model cannot be compiled, or the graph computes something else.
        """
        key = (getattr(attention, "signature", None), len(keep))
        graph = self._graphs.get(key)
        if graph is not None:
            return graph(token_ids, positions, keep, attention)
        if not self._is_preparing:
            self._note(key)
            return self._plain(token_ids, positions, keep, attention)
        graph = _compiled(self._plain, len(self._graphs), self._compiler)
        logits = _first(graph, key, token_ids, positions, keep, attention)
        if self._check is not None:
            # Of padding all tokens are alike, and some models make nothing of them.
            tried = torch.arange(token_ids.numel()).view_as(token_ids) % NUM_TRIED
            others = (tried + 1, tried, keep, attention)
            self._check(self._plain(*others), graph(*others))
        self._graphs[key] = graph
        return logits

    def _note(self, key: tuple[Any, ...]) -> None:
        self.num_eager += 1
        if key not in self._missed:
            self._missed.add(key)
            logger.warning("No graph was prepared for passes of the shape %s: they run without.", key)


def _compiled(plain: Forward, number: int, compiler: str) -> Forward:
    """Return the forward as a graph to be, behind code of its own: what torch.compile makes it keeps with the code."""
    assert isinstance(plain, types.FunctionType), "a function has code"
    name = f"{plain.__code__.co_name}_{number}"
    own = types.FunctionType(
        plain.__code__.replace(co_name=name), plain.__globals__, name, plain.__defaults__, plain.__closure__
    )
    # Sizes inside a graph follow from those of its inputs, which its key has: nothing to assert at every operation.
    options: dict[str, Any] = {"guard_filter_fn": _no_guards, "size_asserts": False}
    graph: Forward = torch.compile(own, backend=compiler, fullgraph=True, dynamic=False, options=options)
    return graph


def _no_guards(guards: Sequence[Any]) -> list[bool]:
    return [False] * len(guards)


def _first(graph: Forward, key: tuple[Any, ...], *arguments: Any) -> torch.Tensor:
    """Run a graph for the first time, which compiles it.

    Raises:
        BackendError: It cannot be compiled.
    """
    try:
        return graph(*arguments)
    except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
        words = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise BackendError(
            f'[backend.torch] compile = "buckets": torch.compile failed for the shape {key}: {type(error).__name__}: '
            f"{' '.join(words[:3])[:500]}",
            hint='Set [backend.torch] compile = "off" to serve this model without graphs; TORCH_LOGS=+dynamo,inductor says more.',
        ) from error
