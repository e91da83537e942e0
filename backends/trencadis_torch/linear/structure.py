"""How a decoder's layers are put together, read off one forward of a few tokens: which part got which tensor.

    embeddings ▶ × ▶ [norm] ▶ layers ▶ norm ▶ output projection ▶ ×, soft cap
    a layer      h ▶ [norm] ▶ attention ▶ [norm] ▶ × ▶ + h ▶ [norm] ▶ MLP ▶ [norm] ▶ × ▶ +
    parallel     both begin with h, by one norm, two or none

What stands in brackets may be missing, what is multiplied is solved for. A tensor that is none of those expected ends the reading, with words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, Final

import attrs
import torch
from torch import nn

from trencadis_torch.linear.experts import FusedMixture
from trencadis_torch.linear.fused import FusedMLP, FusedNorm, RotaryAttention
from trencadis_torch.linear.watch import Watched, watch

__all__ = [
    "Ending",
    "LayerParts",
    "Order",
    "OtherwiseError",
    "Seen",
    "need",
    "read_ending",
    "read_layer",
    "same",
    "scale_between",
]

CLOSE: Final = 1e-6
"""Largest difference of two tensors that are one but for the last rounding, over the largest value."""


class OtherwiseError(Exception):
    """A model is not a plain decoder; says where."""


def need(holds: Any, what: str) -> None:
    """Go on if something holds.

    Raises:
        OtherwiseError: It does not.
    """
    if not holds:
        raise OtherwiseError(what)


class Order(IntEnum):
    """How attention's output a and the MLP's m are added to the hidden states h; mirrors ``decoder.cpp``.

    Attributes:
        SEQUENTIAL: The MLP begins with h + a.
        PARALLEL: It begins with h, and the sum is (h + a) + m.
        PARALLEL_FIRST: The same, and the sum is h + (a + m).
    """

    SEQUENTIAL = 0
    PARALLEL = 1
    PARALLEL_FIRST = 2


@attrs.frozen(kw_only=True)
class LayerParts:
    """Parts of a layer, each in its place.

    Attributes:
        attention: Attention module.
        mlp: MLP, or mixture of experts.
        attention_norm: Before attention.
        attended_norm: Behind it.
        mlp_norm: Before the MLP.
        projected_norm: Behind it.
        order: Order of the sums.
        attended_scale: Factor of attention's output before it is added.
        projected_scale: The same of the MLP's.
        angles: Cosines and sines that attention was given, ``[T, R]`` each; None: it does not turn.
    """

    attention: RotaryAttention
    mlp: FusedMLP | FusedMixture
    attention_norm: FusedNorm | None
    attended_norm: FusedNorm | None
    mlp_norm: FusedNorm | None
    projected_norm: FusedNorm | None
    order: Order
    attended_scale: float
    projected_scale: float
    angles: tuple[torch.Tensor, torch.Tensor] | None


@attrs.frozen(kw_only=True)
class Ending:
    """What happens to what the output projection gives.

    Attributes:
        factor: It is multiplied by; 1: it is not.
        divisor: It is divided by; 1: it is not.
        softcap: Then, of the logits; None: none.
    """

    factor: float = 1.0
    divisor: float = 1.0
    softcap: float | None = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits, in the same memory."""
        if self.factor != 1.0:
            logits.mul_(self.factor)
        if self.divisor != 1.0:
            logits.div_(self.divisor)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


class Seen:
    """What a model's modules got and gave in one forward; its attention is switched to one that attends to nothing.

    Args:
        model: Model of transformers, its modules packed and fused.

    Attributes:
        calls: By name of a module.
        names: By id of a module.
        logits: Logits of the model.
        numbers: In its configuration and modules: what a multiplier may be.

    Raises:
        OtherwiseError: The forward fails.
    """

    def __init__(self, model: Any) -> None:
        parts = {name: part for name, part in model.named_modules() if _is_watched(part)}
        self.names = {id(part): name for name, part in parts.items()}
        try:
            self.calls: Mapping[str, Watched] = watch(model, parts, {})[0]
        except Exception as error:  # of the model's code
            raise OtherwiseError(f"a forward of a few tokens fails: {type(error).__name__}") from error
        result = self.calls[""].output
        self.logits: torch.Tensor = result.logits
        self.numbers = _numbers(model)

    def io(self, module: nn.Module, what: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tensor that a module got, and the one that it gave.

        Args:
            module: A part of the model.
            what: The module in words.

        Raises:
            OtherwiseError: It was not called.
        """
        need(self.has(module), f"{what} is not called")
        call = self.calls[self.names[id(module)]]
        given: Any = call.args[0] if call.args else call.options.get("hidden_states")
        made = call.output[0] if isinstance(call.output, tuple) else call.output
        need(isinstance(given, torch.Tensor) and isinstance(made, torch.Tensor), f"{what} gives no tensor")
        return given, made

    def has(self, module: nn.Module) -> bool:
        """Return whether a module was called."""
        return self.names.get(id(module)) in self.calls

    def output(self, module: nn.Module, what: str) -> torch.Tensor:
        """Return the tensor that a module gave; see :meth:`io`.

        Args:
            module: A part of the model.
            what: The module in words.

        Raises:
            OtherwiseError: It was not called.
        """
        need(self.has(module), f"{what} is not called")
        made: torch.Tensor = self.calls[self.names[id(module)]].output
        return made

    def given(self, module: nn.Module) -> torch.Tensor:
        """Return the first tensor that a module got, which was called."""
        call = self.calls[self.names[id(module)]]
        found: torch.Tensor = next(iter((*call.args, *call.options.values())))
        return found

    def gives_pair(self, module: nn.Module) -> bool:
        """Return whether a module gave two tensors of one shape, as angles are."""
        made = self.calls[self.names[id(module)]].output if self.has(module) else None
        if not isinstance(made, tuple) or len(made) != 2 or isinstance(module, RotaryAttention):
            return False
        return all(isinstance(one, torch.Tensor) and one.shape == made[0].shape for one in made)

    def angles(self, attention: RotaryAttention) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the cosines and sines that an attention got, ``[T, R]`` each; None: it does not turn."""
        if not attention.heads.turns:
            return None
        call = self.calls[self.names[id(attention)]]
        given = call.options.get("position_embeddings")
        if given is None:
            given = next((one for one in call.args[1:] if isinstance(one, tuple)), None)
        if given is None:
            raise OtherwiseError("its attention is given no angles")
        cosines, sines = given
        return cosines[0], sines[0]


def _is_watched(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList)


def _numbers(model: Any) -> tuple[float, ...]:
    """Return numbers that a model's configuration and its modules name."""
    found: set[float] = set()
    config = model.config.get_text_config()
    for values in (
        config.to_dict(),
        *(vars(part) for part in model.modules() if not isinstance(part, RotaryAttention)),
    ):
        found.update(float(one) for one in values.values() if type(one) in (int, float) and one)
    hidden = float(config.hidden_size)
    return tuple(sorted(found | {hidden**0.5, hidden**-0.5}))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are one but for the last rounding. Pure."""
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= CLOSE * other.abs().max())


def scale_between(of: torch.Tensor, to: torch.Tensor, numbers: Iterable[float]) -> float | None:
    """Return what a tensor is multiplied by to give another one; None: that is not all. Pure.

    Args:
        of: The one.
        to: The other.
        numbers: Candidates: the one that gives the same bits is taken, or one over it.
    """
    if of.shape != to.shape:
        return None
    if torch.equal(of, to):
        return 1.0
    wide = of.double()
    found = float((wide * to.double()).sum() / wide.square().sum().clamp_min(1e-300))
    near = [one for number in numbers for one in (number, 1.0 / number) if abs(one - found) <= 1e-4 * abs(found)]
    exact = next((one for one in near if torch.equal(of * one, to)), None)
    if exact is not None:
        return exact
    return found if same(of * found, to) else None


def _added(base: torch.Tensor, what: torch.Tensor, total: torch.Tensor, numbers: Iterable[float]) -> float | None:
    """Return what something was multiplied by before it was added; None: that is not all. Pure."""
    if same(base + what, total):
        return 1.0
    wide = what.double()
    found = float((wide * (total - base).double()).sum() / wide.square().sum().clamp_min(1e-300))
    near = [one for one in numbers if abs(one - found) <= 1e-3 * abs(found)]
    return next((one for one in (*near, found) if same(base + what * one, total)), None)


def read_layer(layer: nn.Module, seen: Seen) -> LayerParts:
    """Return the parts of a layer in their places.

    Args:
        layer: A layer.
        seen: Record of the model's forward.

    Raises:
        OtherwiseError: It is put together in another way.
    """
    children = [child for child in layer.children() if next(child.parameters(), None) is not None or _is_part(child)]
    attention, mlp, norms = (
        [child for child in children if isinstance(child, kind)]
        for kind in (RotaryAttention, FusedMLP | FusedMixture, FusedNorm)
    )
    known = RotaryAttention | FusedMLP | FusedMixture | FusedNorm
    others = sorted({type(child).__name__ for child in children if not isinstance(child, known)})
    need(not others, f"its layers have parts that are their own: {', '.join(others)}")
    need(len(attention) == len(mlp) == 1, "a layer has not one attention and one MLP")
    return _Places(layer, attention[0], mlp[0], norms, seen).read()


def _is_part(module: nn.Module) -> bool:
    return bool(re.search("Attention|MLP|Mixture|Norm", type(module).__name__))


class _Places:
    """Finds the places of a layer's parts."""

    def __init__(self, layer: nn.Module, attention: Any, mlp: Any, norms: list[Any], seen: Seen) -> None:
        self._attention, self._mlp, self._seen = attention, mlp, seen
        self._hidden, self._total = seen.io(layer, "a layer")
        self._norms = [(norm, *seen.io(norm, "a norm of a layer")) for norm in norms]

    def read(self) -> LayerParts:
        """Return the parts."""
        hidden, total, numbers = self._hidden, self._total, self._seen.numbers
        before, begins, attended_norm, attended = self._around(self._attention, "attention")
        need(torch.equal(begins, hidden), "its attention begins with something else than the layer's input")
        mlp_norm, source, projected_norm, projected = self._around(self._mlp, "MLP")
        used = {id(norm) for norm in (before, attended_norm, mlp_norm, projected_norm) if norm is not None}
        need(used == {id(norm) for norm, _, _ in self._norms}, "a norm of its layers has another place")
        order, scales = (
            Order.SEQUENTIAL,
            (_added(hidden, attended, source, numbers), _added(source, projected, total, numbers)),
        )
        if torch.equal(source, hidden):
            order, scales = self._parallel(attended, projected), (1.0, 1.0)
        need(None not in scales, "something else is added in its layers")
        return LayerParts(
            attention=self._attention,
            mlp=self._mlp,
            attention_norm=before,
            attended_norm=attended_norm,
            mlp_norm=mlp_norm,
            projected_norm=projected_norm,
            order=order,
            attended_scale=float(scales[0] or 0.0),
            projected_scale=float(scales[1] or 0.0),
            angles=self._seen.angles(self._attention),
        )

    def _around(self, module: nn.Module, what: str) -> tuple[Any, torch.Tensor, Any, torch.Tensor]:
        """Return the norm before a module with its input, and the norm behind with its output; without a norm the module's own."""
        given, made = self._seen.io(module, f"its {what}")
        before, begins = next(((norm, x) for norm, x, y in self._norms if torch.equal(y, given)), (None, given))
        behind, ends = next(((norm, y) for norm, x, y in self._norms if torch.equal(x, made)), (None, made))
        return before, begins, behind, ends

    def _parallel(self, attended: torch.Tensor, projected: torch.Tensor) -> Order:
        hidden, total = self._hidden, self._total
        if torch.equal(hidden + attended + projected, total):
            return Order.PARALLEL
        need(same(attended + projected + hidden, total), "something else is added in its parallel layers")
        return Order.PARALLEL_FIRST


def read_ending(projected: torch.Tensor, logits: torch.Tensor, numbers: tuple[float, ...]) -> Ending:
    """Return what makes logits of the output projection's values.

    Args:
        projected: The values.
        logits: The model's.
        numbers: Numbers of the model's configuration and modules.

    Raises:
        OtherwiseError: Something else does.
    """
    if torch.equal(projected, logits):
        return Ending()
    for number in numbers:
        for ending in (Ending(factor=number), Ending(divisor=number), Ending(softcap=number)):
            if torch.equal(ending.apply(projected.clone()), logits):
                return ending
    raise OtherwiseError("its logits are not those of its output projection, scaled or capped")
