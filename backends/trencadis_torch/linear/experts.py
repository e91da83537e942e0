"""Mixtures of experts: which experts a token goes to, and experts whose matrices are packed, in place of transformers' modules.

    FusedMixture     router ▶ Routing ▶ experts ▶ + an MLP beside them
    PackedExperts    of a mixture whose choice of experts is its own: the same experts, called as transformers calls them

What a module computes is read by :mod:`trencadis_torch.linear.mixtures`.

Shapes: M tokens, E experts, C experts of a token, H hidden size, I inner size of an expert, N outputs and K inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, Protocol

import attrs
import torch
from torch import nn
from torch.nn import functional

from trencadis_torch.linear.fused import FusedMLP
from trencadis_torch.linear.held import FloatWeight, HeldWeight, StackedWeight, with_zeros
from trencadis_torch.linear.native import Mixture, Native, Packed, product
from trencadis_torch.linear.packed import PackedLinear, pack

__all__ = [
    "LIMITED",
    "MOST_GROUPS",
    "Activated",
    "Experts",
    "FusedMixture",
    "Grouping",
    "LooseExperts",
    "PackedExperts",
    "Routing",
    "Score",
]

LIMITED: Final = 5
"""``gate · sigmoid(alpha · gate) · (value + 1)``, gates limited from above and values from both sides; after those of ``ACTIVATIONS``."""


MOST_GROUPS: Final = 64
"""Groups of experts that the library can compare."""


@attrs.frozen
class Grouping:
    """Experts are in groups of one size, and a token goes to those of some groups alone.

    Attributes:
        num_groups: G, at most :data:`MOST_GROUPS`.
        num_open: Groups whose experts may be chosen: those with the best sums.
        num_best: How many of a group's best scores, each with its correction, are summed: 1 or 2.

    Sources: DeepSeek-V2, arXiv:2405.04434, section 2.2.2; DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """

    num_groups: int
    num_open: int
    num_best: int

    def sums(self, keys: torch.Tensor) -> torch.Tensor:
        """Return by what groups are chosen, ``[M, G]``, from keys of experts ``[M, E]``. Pure."""
        return keys.view(len(keys), self.num_groups, -1).topk(self.num_best, -1).values.sum(-1)

    def masked(self, keys: torch.Tensor) -> torch.Tensor:
        """Return keys ``[M, E]``, of groups that are not open the least there are. Pure."""
        chosen = self.sums(keys).topk(self.num_open, -1).indices
        is_open = torch.zeros(len(keys), self.num_groups, dtype=torch.bool).scatter_(-1, chosen, value=True)
        return keys.masked_fill(~is_open.repeat_interleave(keys.shape[-1] // self.num_groups, -1), -torch.inf)


class Score(IntEnum):
    """How logits become scores; mirrors ``experts.h``."""

    SOFTMAX = 0
    SIGMOID = 1


@attrs.frozen(kw_only=True, eq=False)
class Routing:
    """Which experts a token goes to, and what they weigh.

    Attributes:
        num_experts: E.
        num_chosen: C: those with the best scores.
        score: Function from logits to scores.
        correction: Added to scores where experts are chosen, not where they weigh, float32 ``[E]``; None: nothing is.
        normalises: Weights are divided by their sum.
        scale: Then multiplied by this.
        grouping: Groups of experts, few of which are chosen from; None: all may be chosen.

    Sources: Mixtral, arXiv:2401.04088, section 2.1; the correction, DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """

    num_experts: int
    num_chosen: int
    score: Score
    correction: torch.Tensor | None = None
    normalises: bool = False
    scale: float = 1.0
    grouping: Grouping | None = None

    def keys(self, logits: torch.Tensor) -> torch.Tensor:
        """Return by what experts are chosen, before groups are, from logits ``[M, E]``. Pure."""
        if self.correction is None and self.grouping is None:
            return logits
        scores = self.scores(logits)
        return scores if self.correction is None else scores + self.correction

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return what experts weigh, from logits ``[M, E]``. Pure."""
        return logits.softmax(-1) if self.score is Score.SOFTMAX else logits.sigmoid()

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return experts, int64 ``[M, C]``, and their weights, from logits ``[M, E]``. Pure; the library does the same."""
        keys = self.keys(logits)
        keys = keys if self.grouping is None else self.grouping.masked(keys)
        experts = keys.topk(self.num_chosen, -1).indices
        weights = self.scores(logits).gather(-1, experts)
        if self.normalises:
            weights = weights / weights.sum(-1, keepdim=True)
        return experts, weights * self.scale


@attrs.frozen(kw_only=True)
class Activated:
    """How gates and values become one: an activation of the gates times the values, or gpt-oss's limited gates.

    Attributes:
        activation: Number in ``ACTIVATIONS``, or ``LIMITED``.
        alpha: Factor of ``LIMITED``.
        limit: Largest gate and magnitude of a value, of ``LIMITED``.
    """

    activation: int
    alpha: float = 0.0
    limit: float = 0.0

    def __call__(self, gates: torch.Tensor, values: torch.Tensor, native: Native) -> torch.Tensor:
        """Return ``[..., I]`` from gates and values ``[..., I]``."""
        if self.activation != LIMITED:
            return native.gate(torch.cat([gates, values], -1), self.activation)
        gates, values = gates.clamp(max=self.limit), values.clamp(-self.limit, self.limit)
        return gates * torch.sigmoid(gates * self.alpha) * (values + 1)


class Experts(Protocol):
    """Experts of a layer."""

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return weighted sums ``[M, H]``, of rows ``[M, H]``, the experts of each, int64 ``[M, C]``, and their weights."""
        ...


@attrs.frozen(kw_only=True, eq=False)
class LooseExperts:
    """Experts with matrices that are not packed, computed one after the other; packed ones are compared with them.

    Attributes:
        up: Gates and values of each expert.
        down: Matrices from the inner size back to H.
        up_bias: ``[E, 2 I]``, or None.
        down_bias: ``[E, H]``, or None.
        transposed: A matrix is ``[K, N]``, else ``[N, K]``.
        gates: Outputs that are gates.
        values: Outputs that are values.
        activated: How gates and values become one.
        native: The library.
    """

    up: StackedWeight
    down: StackedWeight
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    transposed: bool
    gates: slice
    values: slice
    activated: Activated
    native: Native

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return weighted sums; see :class:`Experts`."""
        out = torch.zeros_like(x)
        for expert in sorted(set(experts.flatten().tolist())):
            rows, places = (experts == expert).nonzero(as_tuple=True)
            made = self._product(self.up, self.up_bias, expert, x[rows])
            made = self.activated(made[:, self.gates], made[:, self.values], self.native)
            made = self._product(self.down, self.down_bias, expert, made)
            out.index_add_(0, rows, made * weights[rows, places, None])
        return out

    def _product(self, stack: StackedWeight, bias: torch.Tensor | None, expert: int, x: torch.Tensor) -> torch.Tensor:
        matrix = stack[expert]
        return functional.linear(x, matrix.T if self.transposed else matrix, None if bias is None else bias[expert])

    def packed(self, hold: Callable[[HeldWeight], HeldWeight]) -> PackedExperts:
        """Return the same experts, packed.

        Args:
            hold: Gives a matrix the form in which it is held.
        """
        outputs = {"gates": (self.up, self.up_bias, self.gates), "values": (self.up, self.up_bias, self.values)}
        outputs["down"] = (self.down, self.down_bias, slice(None))
        made = {name: self._stack(*parts, hold) for name, parts in outputs.items()}
        if not _take_one_row(made["gates"].packed, made["values"].packed):
            for name in ("gates", "values"):
                made[name] = self._stack(*outputs[name], lambda weight: FloatWeight(hold(weight).dequantised()))
        inner, outer = made["down"].in_features, made["gates"].in_features
        return PackedExperts(
            **made,
            sizes=(len(self.up.matrices), outer, inner),
            activated=self.activated,
            native=self.native,
        )

    def _stack(
        self, stack: StackedWeight, bias: torch.Tensor | None, rows: slice, hold: Callable[[HeldWeight], HeldWeight]
    ) -> PackedLinear:
        """Return some outputs of all experts in one product, each expert's padded to whole panels."""
        panel = self.native.panel
        found = [hold(stack.turned(e, transposed=self.transposed)).rows(rows) for e in range(len(stack.matrices))]
        missing = -found[0].shape[0] % panel
        biases: list[torch.Tensor | None] = [None] * len(found)
        if bias is not None:
            biases = [functional.pad(one[rows].float(), (0, missing)) for one in bias]
        layer = pack([with_zeros(one, missing) if missing else one for one in found], biases, self.native)
        assert isinstance(layer, PackedLinear), "there is a library"
        return layer


class PackedExperts(nn.Module):
    """Experts whose matrices are packed; called as transformers calls them.

    Args:
        gates: Product of all experts, the outputs of each padded to whole panels, like ``values`` and ``down``.
        values: See ``gates``.
        down: See ``gates``.
        sizes: E, H and I.
        activated: How gates and values become one.
        native: The library.
    """

    def __init__(
        self,
        *,
        gates: PackedLinear,
        values: PackedLinear,
        down: PackedLinear,
        sizes: tuple[int, int, int],
        activated: Activated,
        native: Native,
    ) -> None:
        super().__init__()
        self.gates, self.values, self.down = gates, values, down
        self._sizes = sizes
        self._activated = activated
        self._native = native

    def structure(self, num_chosen: int) -> Mixture:
        """Return what the library reads, without a way of choosing; it refers to memory of this module.

        Args:
            num_chosen: C.
        """
        num_experts, hidden_size, inner_size = self._sizes
        return Mixture(
            gates=product(self.gates.packed),
            values=product(self.values.packed),
            down=product(self.down.packed),
            num_experts=num_experts,
            num_chosen=num_chosen,
            hidden_size=hidden_size,
            inner_size=inner_size,
            activation=self._activated.activation,
            alpha=self._activated.alpha,
            limit=self._activated.limit,
        )

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return weighted sums; see :class:`Experts`.

        Raises:
            IndexError: There is no such expert.
        """
        return self._native.mix(x.float(), experts.long(), weights.float(), self.structure(experts.shape[-1]))


class FusedMixture(nn.Module):
    """A router, experts, and an MLP beside them if there is one.

    Args:
        router: Gives logits.
        routing: Which experts follow from them.
        experts: Matrices of the experts.
        beside: The MLP, or None.
        gate: One output, by whose sigmoid the MLP's are multiplied; None: they are added as they are.
        gives_weights: Whether the weights are a second result.
        native: The library.

    Attributes:
        router: Module that gives logits.
        routing: Rule by which experts follow from logits, its correction a parameter.
        routed: The experts.
        beside: MLP beside the experts, or None.
        gate: Gate of that MLP, or None.
    """

    def __init__(
        self,
        router: Callable[..., Any],
        routing: Routing,
        experts: Experts,
        *,
        beside: FusedMLP | None,
        gate: Callable[..., Any] | None,
        gives_weights: bool,
        native: Native,
    ) -> None:
        super().__init__()
        self.router, self.routed, self.beside, self.gate = router, experts, beside, gate
        self.correction = None if routing.correction is None else nn.Parameter(routing.correction, requires_grad=False)
        self.routing = attrs.evolve(routing, correction=self.correction)
        self._gives_weights = gives_weights
        self._native = native

    def structure(self) -> Mixture:
        """Return what the library reads; it refers to memory of this module, whose layers are packed."""
        routing, experts = self.routing, self.routed
        assert isinstance(experts, PackedExperts), "packed"
        found = experts.structure(routing.num_chosen)
        _set_routing(found, routing)
        assert isinstance(self.router, PackedLinear), "packed"
        found.router = product(self.router.packed)
        if isinstance(self.gate, PackedLinear):
            found.beside = product(self.gate.packed)
        return found

    def forward(self, x: torch.Tensor) -> Any:
        """Return ``[..., H]`` from ``[..., H]``, and weights ``[M, C]`` if the module that this one stands for does."""
        rows = x.reshape(-1, x.shape[-1])
        experts, weights = self.choose(self.router(rows))
        out = self.routed(rows, experts, weights)
        if self.beside is not None:
            gates = None if self.gate is None else self.gate(rows)
            self._native.add_beside(self.beside(rows), gates, out)
        out = out.view(x.shape)
        return (out, weights) if self._gives_weights else out

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return experts and their weights, ``[M, C]`` each, from logits ``[M, E]``."""
        mixture = Mixture(num_experts=self.routing.num_experts, num_chosen=self.routing.num_chosen)
        _set_routing(mixture, self.routing)
        return self._native.route(logits, mixture)


def _set_routing(mixture: Mixture, routing: Routing) -> None:
    mixture.score, mixture.normalises, mixture.scale = routing.score, routing.normalises, routing.scale
    mixture.correction = None if routing.correction is None else routing.correction.data_ptr()
    if routing.grouping is not None:
        mixture.num_groups, mixture.num_open, mixture.num_best = attrs.astuple(routing.grouping)


def _take_one_row(one: Packed, other: Packed) -> bool:
    """Return whether a row that is quantised for one product may be multiplied by the other. Pure."""
    if (one.kind, one.group, one.zero) != (other.kind, other.group, other.zero):
        return False
    return one.order is other.order or (
        one.order is not None and other.order is not None and torch.equal(one.order, other.order)
    )
