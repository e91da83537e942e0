"""Readers of mixtures of experts: how a router chooses, what experts compute, and what stands beside them.

    experts    a module of two weights of three dimensions: which of them is first, how they lie, what is a gate, is tried
    router     a module whose weight has a row for each expert: the ways of choosing are tried on logits of many rows
    mixture    both, and an MLP beside them or none: the whole is compared with the original module

Shapes as in :mod:`trencadis_torch.linear.experts`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs
import torch
from torch import nn

from trencadis_torch.linear.experts import (
    LIMITED,
    MOST_GROUPS,
    Activated,
    FusedMixture,
    Grouping,
    LooseExperts,
    PackedExperts,
    Routing,
    Score,
)
from trencadis_torch.linear.fused import FusedMLP
from trencadis_torch.linear.held import FloatWeight, HeldWeight, StackedWeight
from trencadis_torch.linear.native import ACTIVATIONS, Native
from trencadis_torch.linear.packed import FusedLinear, pack
from trencadis_torch.linear.watch import Watched

__all__ = ["is_experts", "is_mixture", "packed_experts", "read_mixture"]

ROWS: Final = 256
"""Rows for which a router is asked."""

TRIED: Final = 6
"""Rows for which experts are asked: each expert that they go to is dequantised each time."""

TIE: Final = 1e-5
"""Rows whose last choice and first other one are nearer to each other than that are not compared."""

Hold = Callable[[HeldWeight], HeldWeight]
Agree = Callable[[Any, Any], bool]
ActivationOf = Callable[[nn.Module], str | None]


def is_experts(module: nn.Module) -> bool:
    """Return whether a module may be the experts of a layer: two weights of three dimensions, and biases of two. Pure."""
    own = _own(module)
    dims = sorted(one.dim() if isinstance(one, torch.Tensor) else 3 for one in own.values())
    return dims in ([3, 3], [2, 2, 3, 3]) and len({one.shape[0] for one in own.values()}) == 1


def is_mixture(module: nn.Module) -> bool:
    """Return whether a module has experts, and something that chooses among them. Pure."""
    return sum(map(is_experts, module.children())) == 1 and len(list(module.children())) > 1


def _own(module: nn.Module) -> dict[str, Any]:
    stacked = {name: one for name, one in vars(module).items() if isinstance(one, StackedWeight)}
    return {**dict(module.named_parameters(recurse=False)), **stacked}


def packed_experts(
    module: Any, seen: Watched | None, hold: Hold, native: Native, agree: Agree, activation_of: ActivationOf
) -> PackedExperts | None:
    """Return packed experts that compute what a module does; None: there are none.

    Args:
        module: The experts.
        seen: A call of theirs: rows, experts and weights; None: no row came to them, as it may be on one of several ranks.
        hold: Gives a matrix the form in which it is held.
        native: The library.
        agree: Whether two tensors differ by rounding alone.
        activation_of: Names the activation of a module without weights.
    """
    x, *routes = (
        _made_up(module, native, activation_of) if seen is None else (one[:TRIED] for one in _experts_call(seen))
    )
    found = _loose(module, x, routes, native, agree, activation_of)
    return None if found is None else found.packed(hold)


def _made_up(module: Any, native: Native, activation_of: ActivationOf) -> tuple[torch.Tensor, ...]:
    """Return rows for experts, the expert that each goes to, and its weight."""
    one = next(_ways(module, native, activation_of))
    rows = torch.randn(TRIED, one.up.shape[1 if one.transposed else 2], generator=torch.Generator().manual_seed(14))
    return rows, torch.arange(TRIED)[:, None] % one.up.shape[0], torch.full((TRIED, 1), 0.5)


def _experts_call(seen: Watched) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, experts, weights = (*seen.args, *seen.options.values())
    return rows, experts, weights


def _loose(
    module: Any, x: torch.Tensor, routes: list[torch.Tensor], native: Native, agree: Agree, activation_of: ActivationOf
) -> LooseExperts | None:
    larger = torch.randn(x.shape, generator=torch.Generator().manual_seed(11)) * 30.0 * x.square().mean().sqrt()
    expected = [(rows, module(rows, *routes)) for rows in (x, larger)]
    candidates = _ways(module, native, activation_of)
    return next((one for one in candidates if all(agree(one(rows, *routes), y) for rows, y in expected)), None)


def _ways(module: Any, native: Native, activation_of: ActivationOf) -> Iterator[LooseExperts]:
    """Yield the ways in which experts may compute, as far as their shapes allow them."""
    own = _own(module)
    stacks = {name: _stack(one) for name, one in own.items() if not isinstance(one, torch.Tensor) or one.dim() == 3}
    biases = [one for one in own.values() if isinstance(one, torch.Tensor) and one.dim() == 2]
    for (up, down), transposed in itertools.product(itertools.permutations(stacks.values()), (False, True)):
        outputs, inputs = up.shape[1:][::-1] if transposed else up.shape[1:]
        size, back = (outputs // 2, down.shape[1:][::-1] if transposed else down.shape[1:])
        if outputs % 2 or back != (inputs, size):
            continue
        up_bias = next((one for one in biases if one.shape[1] == outputs), None)
        down_bias = next((one for one in biases if one is not up_bias and one.shape[1] == inputs), None)
        halves = (slice(0, size), slice(size, None)), (slice(0, None, 2), slice(1, None, 2))
        for (first, second), activated in itertools.product(halves, _activated(module, activation_of)):
            for gates, values in ((first, second), (second, first)):
                yield LooseExperts(
                    up=up,
                    down=down,
                    up_bias=up_bias,
                    down_bias=down_bias,
                    transposed=transposed,
                    gates=gates,
                    values=values,
                    activated=activated,
                    native=native,
                )


def _stack(weight: Any) -> StackedWeight:
    return weight if isinstance(weight, StackedWeight) else StackedWeight([FloatWeight(one.detach()) for one in weight])


def _activated(module: Any, activation_of: ActivationOf) -> Iterator[Activated]:
    """Yield what gates and values may go through: an activation among the parts, or two numbers of the module."""
    for name in filter(None, map(activation_of, module.children())):
        yield Activated(activation=ACTIVATIONS[name])
    numbers = [float(one) for one in vars(module).values() if type(one) is float]
    for alpha, limit in itertools.permutations(numbers, 2):
        yield Activated(activation=LIMITED, alpha=alpha, limit=limit)


def read_mixture(
    module: Any, seen: Watched, hold: Hold, native: Native, agree: Agree, activation_of: ActivationOf
) -> FusedMixture | None:
    """Return a packed mixture that computes what a module does; None: there is none.

    Args:
        module: The mixture; an MLP beside its experts has been replaced before.
        seen: A call of it.
        hold: Gives a matrix the form in which it is held.
        native: The library.
        agree: Whether two tensors differ by rounding alone.
        activation_of: Names the activation of a module without weights.
    """
    x = seen.args[0] if seen.args else seen.options["hidden_states"]
    x = x.reshape(1, -1, x.shape[-1])[:, :TRIED]
    children = {name: child for name, child in module.named_children() if next(child.parameters(), None) is not None}
    children |= {
        name: child for name, child in module.named_children() if isinstance(child, FusedMLP) or is_experts(child)
    }
    experts = next(name for name, child in children.items() if is_experts(child))
    calls = _calls_within(module, x, children)
    router = next((name for name, call in calls.items() if _routes_of(call.output) is not None), None)
    if router is None or experts not in calls or children.pop(router) is children.pop(experts):
        return None
    routed, (rows, *routes) = getattr(module, experts), _experts_call(calls[experts])
    loose = _loose(routed, rows, routes, native, agree, activation_of)
    found = _read_router(module, router, calls[router], loose)
    if loose is None or found is None:
        return None
    linear, routing = found
    for beside, gate in _beside(list(children.values())):
        gives = isinstance(seen.output, tuple)
        new = FusedMixture(linear, routing, loose, beside=beside, gate=gate, gives_weights=gives, native=native)
        if all(_computes(new, module, one, router, agree) for one in _inputs(x)):
            return FusedMixture(
                _packed_float(linear, native),
                routing,
                loose.packed(hold),
                beside=beside,
                gate=None if gate is None else _packed_float(gate, native),
                gives_weights=gives,
                native=native,
            )
    return None


def _beside(rest: list[nn.Module]) -> Iterator[tuple[FusedMLP | None, nn.Linear | None]]:
    """Yield the MLP beside experts, and its gate, if all other parts are these."""
    mlps = [one for one in rest if isinstance(one, FusedMLP)]
    gates = [one for one in rest if type(one) is nn.Linear and one.out_features == 1]
    if len(mlps) + len(gates) == len(rest) and len(mlps) < 2 and len(gates) <= len(mlps):
        yield next(iter(mlps), None), next(iter(gates), None)


def _inputs(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield inputs as seen, and others, of which some are larger and some smaller."""
    yield x
    more = torch.randn(x.shape, generator=torch.Generator().manual_seed(12)) * x.square().mean().sqrt()
    more[..., ::2, :] *= 4.0
    more[..., 1::4, :] /= 900.0
    yield more


def _computes(new: FusedMixture, module: Any, x: torch.Tensor, router: str, agree: Agree) -> bool:
    """Return whether a mixture gives what a module does, where both choose the same experts; elsewhere two were equally good."""
    call = _calls_within(module, x, {router: getattr(module, router)})[router]
    routes = _routes_of(call.output)
    assert routes is not None, "it gave some before"
    expected, found = module(x), new(x)
    mine, _ = new.choose(new.router(x.reshape(-1, x.shape[-1])))
    alike = (mine.sort(-1).values == routes[0].sort(-1).values).all(-1)
    if float(alike.float().mean()) < 0.7:
        return False
    pairs = zip(*((one if isinstance(one, tuple) else (one,)) for one in (found, expected)), strict=True)
    return all(agree(one.reshape(len(alike), -1)[alike], y.reshape(len(alike), -1)[alike]) for one, y in pairs)


def _calls_within(module: Any, x: torch.Tensor, parts: dict[str, nn.Module]) -> dict[str, Watched]:
    """Return the calls of a module's parts while it is called."""
    found: dict[str, Watched] = {}

    def noting(name: str) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            found[name] = Watched(args, dict(options), output)

        return note

    handles = [part.register_forward_hook(noting(name), with_kwargs=True) for name, part in parts.items()]
    try:
        module(x)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _routes_of(output: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return experts and weights among the results of a router; None: it is none."""
    if not isinstance(output, tuple) or not all(isinstance(one, torch.Tensor) for one in output):
        return None
    experts = next((one for one in output if one.dtype is torch.int64), None)
    if experts is None:
        return None
    weights = [one for one in output if one.is_floating_point() and one.shape == experts.shape]
    return None if not weights else (experts, weights[-1])


def _read_router(module: Any, name: str, call: Watched, loose: LooseExperts | None) -> tuple[nn.Linear, Routing] | None:
    """Return what gives logits, and the way of choosing, as many rows show it; None: it is another one."""
    router = getattr(module, name)
    weights = [one for one in router.parameters() if one.dim() == 2 and not one.is_meta]
    linear = next((_linear(one, router) for one in weights if loose and len(one) == len(loose.up.matrices)), None)
    if linear is None:
        return None
    seen = call.args[0]
    made = torch.randn(ROWS, linear.in_features, generator=torch.Generator().manual_seed(13))
    made *= seen.square().mean().sqrt() * torch.logspace(-1, 0.3, ROWS)[:, None]
    output = router(made if seen.dim() == 2 else made[None], *call.args[1:], **call.options)
    routes = _routes_of(output)
    assert routes is not None, "it gave some before"
    logits = linear(made)
    numbers = [float(one) for one in vars(router).values() if type(one) in (int, float) and one > 0]
    for routing in _routings(module, router, len(linear.weight), routes[0].shape[-1]):
        found = _scaled(routing, logits, routes, numbers)
        if found is not None:
            return linear, found
    return None


def _linear(weight: torch.Tensor, router: Any) -> nn.Linear:
    """Return a router's product as a layer."""
    bias = getattr(router, "bias", None)
    made = nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach().float(), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().float(), requires_grad=False)
    return made


def _routings(module: Any, router: Any, num_experts: int, num_chosen: int) -> Iterator[Routing]:
    """Yield ways of choosing, those without groups first."""
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    corrections = [one.detach().flatten().float() for _, one in named if one.numel() == num_experts]
    for grouping in (None, *_groupings(module, router, num_experts, num_chosen)):
        for score, correction, normalises in itertools.product(Score, (None, *corrections), (False, True)):
            yield Routing(
                num_experts=num_experts,
                num_chosen=num_chosen,
                score=score,
                correction=correction,
                normalises=normalises,
                grouping=grouping,
            )


def _groupings(module: Any, router: Any, num_experts: int, num_chosen: int) -> Iterator[Grouping]:
    """Yield the groups that experts may be in, by whole numbers that the modules have."""
    numbers = sorted({one for part in (router, module) for one in vars(part).values() if type(one) is int})
    for num_open, num_groups in itertools.combinations([one for one in numbers if 0 < one <= MOST_GROUPS], 2):
        size, left = divmod(num_experts, num_groups)
        if not left and size * num_open >= num_chosen:
            yield from (Grouping(num_groups, num_open, num_best) for num_best in (1, 2) if num_best <= size)


def _scaled(
    routing: Routing, logits: torch.Tensor, routes: tuple[torch.Tensor, torch.Tensor], numbers: list[float]
) -> Routing | None:
    """Return a way of choosing with the scale of its weights, if it chooses and weighs as a router did; None: it does not."""
    mine, expected = (_spread(*one, logits) for one in (routing.choose(logits), routes))
    clear = _is_clear(routing, logits)
    if float(clear.float().mean()) < 0.7 or not torch.equal(mine[clear] != 0, expected[clear] != 0):
        return None
    mine, expected = mine[clear], expected[clear]
    scale = float((mine * expected).sum() / mine.square().sum())
    scale = next((one for one in (1.0, *numbers) if abs(one - scale) < 1e-5 * scale), scale)
    alike = torch.allclose(mine * scale, expected, rtol=1e-5, atol=1e-7 * scale)
    return attrs.evolve(routing, scale=scale) if alike else None


def _spread(experts: torch.Tensor, weights: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like).scatter(-1, experts, weights.to(like.dtype))


def _is_clear(routing: Routing, logits: torch.Tensor) -> torch.Tensor:
    """Return for each row whether the last expert chosen is clearly better than the first other one, and groups are so too."""
    keys, grouping = routing.scores(logits), routing.grouping
    keys = keys if routing.correction is None else keys + routing.correction
    if grouping is None:
        return _is_apart(keys, routing.num_chosen)
    is_apart = _is_apart(grouping.sums(keys), grouping.num_open)
    return is_apart & _is_apart(grouping.masked(keys), routing.num_chosen)


def _is_apart(keys: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Return for each row whether the last of the best is clearly better than the first other one."""
    if num_chosen == keys.shape[-1]:
        return torch.ones(len(keys), dtype=torch.bool)
    best = keys.topk(num_chosen + 1, -1).values
    return best[:, -2] - best[:, -1] > TIE * best[:, 0].abs()


def _packed_float(layer: nn.Linear, native: Native) -> FusedLinear:
    """Return a small layer as floats, whatever matrices are rounded to: in 16 bits where these hold every value."""
    weight = layer.weight.detach().float()
    narrow = weight.bfloat16()
    exact = torch.equal(narrow.float(), weight)
    return pack([FloatWeight(narrow if exact else weight)], [layer.bias], native)
