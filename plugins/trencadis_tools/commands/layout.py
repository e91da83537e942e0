"""``trencadis layout``: how a model can be divided over devices, what each layout needs and sends, and which one to take."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

import attrs

from trencadis.api import RANKS, Config, Registry, ResolvedPlan, resolve_plan, unserved_layout
from trencadis.console import print_table
from trencadis.errors import ConfigValueError
from trencadis_tools.layout.layouts import LayoutNeeds, Limits, Traffic, all_layouts, propose
from trencadis_tools.layout.model import ModelPlan, read_configured_model

__all__ = ["add_arguments", "run"]

DEFAULT_BLOCK_SIZE = 16
"""Default block size, since the command loads no backend."""

_MOST_DEVICES = 1024
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 2 ** (10 * power) for power, unit in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)(b?)", re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.epilog = (
        "It reads config.json of --model.path, no weights, and tables [model], [engine] and [cache]. Bytes are what a rank hands to "
        "collectives, of the busiest stage. What the activations of a step take is left out: the engine measures it when it starts."
    )
    parser.add_argument("--devices", type=_devices, required=True, metavar="N", help="devices there are")
    parser.add_argument(
        "--memory", type=_memory, required=True, metavar="SIZE", help="memory of one, such as 96GiB or 80GB"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _devices(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to {_MOST_DEVICES}")
    return int(text)


def _memory(text: str) -> int:
    found = _SIZE.fullmatch(text.strip())
    unit = found[2].lower() if found else ""
    if found is None or unit not in _UNITS or not (num_bytes := int(Decimal(found[1]) * _UNITS[unit])):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 96GiB (2**30 bytes each), 96GB (10**9) or bytes")
    return num_bytes


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Print the layouts; returns 0.

    Raises:
        ConfigError: A setting contradicts the model, or the plan of the configuration cannot be read.
        ModelLoadError: There is no such model, or none that can be laid out.
    """
    chosen = resolve_plan(config, registry)
    plan = read_configured_model(config, chosen)
    limits = _limits(args, config, plan)
    layouts, refused = all_layouts(plan, limits, partial(unserved_layout, chosen, nouns=("backend",)))
    proposed = propose(layouts)
    if args.json:
        print(json.dumps(_report(plan, limits, layouts, refused, proposed)))
        return 0
    _print(plan, limits, layouts, proposed)
    for kind, sizes in refused.items():
        for line in _refusals(kind, sizes, plan):
            print(line)
    for why in dict.fromkeys(one.unserved for one in layouts if one.unserved):
        print(f"not served: {why}.")
    if proposed is None:
        print(_no_room(layouts))
    else:
        print(_advice(proposed, layouts, limits))
        print(f"Start it with: {_settings(proposed, chosen, registry)}.")
    return 0


def _limits(args: argparse.Namespace, config: Config, plan: ModelPlan) -> Limits:
    if config.model.max_model_len > plan.max_model_len:
        raise ConfigValueError(
            f"[model] max_model_len = {config.model.max_model_len}: {plan.architecture} was made for {plan.max_model_len} tokens.",
            hint="Lower it, or leave it at 0 for the model's own.",
        )
    return Limits(
        num_devices=args.devices,
        memory_bytes=args.memory,
        memory_fraction=config.cache.memory_fraction,
        max_bytes=config.cache.max_bytes,
        block_size=config.cache.block_size or DEFAULT_BLOCK_SIZE,
        max_model_len=config.model.max_model_len or plan.max_model_len,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
    )


def _report(
    plan: ModelPlan,
    limits: Limits,
    layouts: Iterable[LayoutNeeds],
    refused: Mapping[str, Mapping[int, str]],
    proposed: LayoutNeeds | None,
) -> dict[str, Any]:
    return {
        "model": {
            "path": plan.path,
            "architecture": plan.architecture,
            "dtype": plan.dtype,
            "weights_bytes": sum(one.num_bytes for one in plan.weights),
            "num_layers": plan.num_layers,
            "num_experts": plan.num_experts,
            "vocab_size": plan.vocab_size,
        },
        "limits": attrs.asdict(limits),
        "layouts": [{**attrs.asdict(one), "is_proposed": one is proposed} for one in layouts],
        "refused": {kind: {str(size): why for size, why in sizes.items()} for kind, sizes in refused.items()},
    }


def _print(plan: ModelPlan, limits: Limits, layouts: Iterable[LayoutNeeds], proposed: LayoutNeeds | None) -> None:
    weights = sum(one.num_bytes for one in plan.weights)
    print(
        f"{plan.architecture}, {plan.dtype}: {_size(weights)} of weights. Devices: {limits.num_devices} of {_size(limits.memory_bytes)}; "
        f"KV cache: {limits.memory_fraction:g} of what weights leave; sequences of {limits.max_model_len} tokens; "
        f"decode steps of {limits.max_num_seqs} rows, prefill steps of {limits.max_num_batched_tokens} tokens."
    )
    head = (
        "tensor",
        "pipeline",
        "expert",
        "attention",
        "data",
        "weights/rank",
        "KV heads/rank",
        "KV/token/rank",
        "tokens/copy",
        "sequences/copy",
    )
    rows = [
        (
            *map(str, (one.tensor, one.pipeline, one.expert, one.attention, one.data)),
            _size(one.weights_bytes),
            f"{one.kv_heads}" + (f" (on {one.kv_repeats} ranks)" if one.kv_repeats > 1 else ""),
            _size(one.kv_bytes_per_token),
            f"{one.num_tokens:,}",
            f"{one.num_sequences:,}",
            _traffic(one.decode),
            _traffic(one.prefill),
            "proposed" if one is proposed else one.misfit or ("not served" if one.unserved else ""),
        )
        for one in layouts
    ]
    print_table((*head, "decode step", "prefill step", ""), rows)


def _traffic(one: Traffic) -> str:
    return f"{_size(one.num_bytes)}, {one.num_messages} calls" if one.num_messages else "nothing"


def _size(num_bytes: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if num_bytes >= 2 ** (10 * power):
            return f"{num_bytes / 2 ** (10 * power):,.2f} {unit}"
    return f"{num_bytes} B"


def _refusals(kind: str, sizes: Mapping[int, str], plan: ModelPlan) -> Iterable[str]:
    """Yield a line for each reason, with the sizes that it applies to. Pure."""
    if kind in ("expert", "attention") and not plan.num_experts:
        return
    if kind == "attention":  # expert obstacles are already listed
        sizes = {size: why for size, why in sizes.items() if "max_num_seqs" in why}
    by_reason: dict[str, list[str]] = {}
    for size, why in sizes.items():
        by_reason.setdefault(why, []).append(str(size))
    for why, refused in by_reason.items():
        label = f'{kind} = "data" over' if kind == "attention" else kind
        yield f"not {label} {', '.join(refused)}: {why}."


def _no_room(layouts: Iterable[LayoutNeeds]) -> str:
    most = max((one for one in layouts if not one.unserved), key=lambda one: (one.num_tokens, -one.weights_bytes))
    return (
        f"Nothing fits. There is most room with {most.name}: {_size(most.weights_bytes)} of weights on a device, {most.num_tokens} tokens "
        "of KV cache. Lower model.max_model_len, raise cache.memory_fraction, or take more devices or memory."
    )


def _advice(proposed: LayoutNeeds, layouts: Iterable[LayoutNeeds], limits: Limits) -> str:
    """Return the proposed layout and the reason, in words. Pure."""
    num_ranks, copies, num_tokens = proposed.num_ranks, proposed.data, proposed.num_tokens * proposed.data
    most = max(one.num_tokens * one.data for one in layouts if not one.misfit and not one.unserved)
    smaller = [one for one in layouts if one.num_ranks < num_ranks and not one.unserved]
    words = f"Proposed: {proposed.name}. "
    if num_ranks == 1:
        words += "One device is enough for a copy"
    elif all(one.misfit for one in smaller):
        words += f"A copy fits on {num_ranks} devices and on no fewer"
    else:
        words += f"Copies on fewer than {num_ranks} devices have less than half of the most KV cache there is"
    words += f": {num_tokens:,} tokens over all devices, of {most:,} at most"
    words += f"; the {copies} copies exchange nothing" if copies > 1 else ""
    idle = limits.num_devices - num_ranks * copies
    return words + (f"; {idle} of the devices are left over." if idle else ".")


def _settings(proposed: LayoutNeeds, chosen: ResolvedPlan, registry: Registry) -> str:
    """Return the settings of a layout, and how to start it. Pure."""
    sizes = {name: getattr(proposed, name) for name in ("tensor", "pipeline", "expert")}
    settings = [f"parallel.{name} = {size}" for name, size in sizes.items() if size > 1]
    settings += ['parallel.attention = "data"'] if proposed.attention == "data" else []
    if proposed.num_ranks > 1 and RANKS not in chosen.choices["executor"].component.component.provides:
        able = (name for name, item in registry.components("executor").items() if RANKS in item.component.provides)
        settings += [f'executor.name = "{name}"' for name in sorted(able)[:1]]
    if proposed.data > 1:
        settings.append(f"parallel.data = {proposed.data}")
    return ", ".join(settings) or "the defaults"
