"""Options to search: sizes of the engine, policies, and the options that the config classes of policies declare."""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from trencadis.api import AUTO, BUCKETING_BY_LAYOUT, Config, Registry
from trencadis.records import Bucket, Phase, StepShape
from trencadis_tools.simulation import StepTimes
from trencadis_tools.simulation.drafts import speculates
from trencadis_tools.tune.slo import Slo
from trencadis_tools.tune.trials import Changes

__all__ = ["Option", "Space", "ladder"]

_TOKENS, _ROWS, _CHUNKS = (128, 16384), (8, 1024), (64, 8192)
_SIZES = (4, 6, 8, 12, 16)
"""Numbers of sizes in a dimension of buckets."""
_MODEL = ("step_ms", "token_us", "context_token_us")
"""Options of a policy's step-time model, which are measured, not searched."""
_TARGETS = {"ttft_target_ms": "ttft", "tpot_target_ms": "tpot"}
_DRAFTS = (1, 16)
"""Drafts of a sequence in a step."""
_FRACTIONS = (0.5, 0.7, 0.8, 0.9)
"""Fractions of memory for the KV cache; the rest covers memory that a profile run does not measure."""
_OPEN = (0.25, 0.5, 2.0, 4.0)
"""Multiples of a default without an upper bound."""


@attrs.frozen(kw_only=True)
class Option:
    """One option of the configuration with the values to try.

    Attributes:
        path: Dotted path of the option.
        start: Value in the starting configuration.
        values: Values to try, including the start's; ascending if ordered.
        is_ordered: Whether neighbouring values behave alike.
        needs: Values by path that the option requires to take effect.
        brings: Further changes by value of the option.
    """

    path: str
    start: Any
    values: Sequence[Any]
    is_ordered: bool = False
    needs: Changes = attrs.field(factory=dict)
    brings: Mapping[Any, Changes] = attrs.field(factory=dict)

    def change(self, value: Any) -> dict[str, Any]:
        """Return the changes that set a value; empty for the start's value. Pure."""
        return {} if value == self.start else {self.path: value, **self.brings.get(value, {})}

    def others(self) -> list[Any]:
        """Return all other values than the start's; ordered ones begin with twice and half of it, then farther ones. Pure.

        If the start is 0 (no limit), the largest come first.
        """
        others = [value for value in self.values if value != self.start]
        if not self.is_ordered:
            return others
        return sorted(others, key=lambda value: (_distance(value, self.start or others[-1]), -value))

    def neighbours(self, value: Any) -> list[Any]:
        """Return the neighbouring values, or all others if values have no order. Pure."""
        if not self.is_ordered:
            return [other for other in self.values if other != value]
        place = self.values.index(value)
        return [self.values[one] for one in (place - 1, place + 1) if 0 <= one < len(self.values)]


def _distance(value: float, start: float) -> float:
    """Return a sort key: powers of two times the start before values between them, near ones first."""
    if value <= 0:
        return math.inf
    steps = abs(math.log2(value / start))
    return steps if steps < 1e-9 or abs(steps - round(steps)) < 1e-9 else steps + 100


def ladder(least: int, most: int, *extra: int) -> tuple[int, ...]:
    """Return powers of two and the values halfway between them, with ``extra``, ascending. Pure."""
    found = {value for value in extra if value > 0}
    power = least
    while power <= most:
        found |= {power} if power * 3 // 2 > most else {power, power * 3 // 2}
        power *= 2
    return tuple(sorted(found))


class Space:
    """Options of a starting configuration that the search may change.

    Args:
        config: Starting configuration.
        registry: Plugins of the configuration.
        slo: Objectives; policies with targets get their limits.
        step_times: Step times; policies with a step-time model get their coefficients.
        shares: Whether prompts of the workload share prefixes, so that the prefix cache matters.
        replicas: Number of simulated engines.
        is_short_of_blocks: Whether the workload could use more KV cache than the start has, and memory has room.
        layout: Batch layout of the device, such as ``ragged``.
        keep: Dotted paths or tables that stay unchanged.
    """

    def __init__(
        self,
        config: Config,
        registry: Registry,
        *,
        slo: Slo,
        step_times: StepTimes,
        shares: bool,
        replicas: int = 1,
        is_short_of_blocks: bool = False,
        layout: str = "ragged",
        keep: Sequence[str] = (),
    ) -> None:
        self._config, self._registry = config, registry
        self._targets_s = _targets(slo)
        self._model = _model_of(step_times)
        self._keep, self._layout = tuple(keep), layout
        self._is_short_of_blocks = is_short_of_blocks
        self._shares, self._replicas = shares, replicas

    def options(self) -> list[Option]:
        """Return the options to search, the most promising first."""
        engine = self._config.engine
        longest = max(_TOKENS[1], engine.max_num_batched_tokens)
        found = [
            Option(
                path="engine.max_num_batched_tokens",
                start=engine.max_num_batched_tokens,
                values=ladder(_TOKENS[0], longest, engine.max_num_batched_tokens),
                is_ordered=True,
            ),
            self._names("scheduling"),
            Option(
                path="engine.max_num_seqs",
                start=engine.max_num_seqs,
                values=ladder(_ROWS[0], max(_ROWS[1], engine.max_num_seqs), engine.max_num_seqs),
                is_ordered=True,
            ),
        ]
        found += self.options_of(self._config.scheduling.name)
        if self._layout != "ragged":
            found += self._bucketing_options()
        if speculates(self._config):
            found += self._draft_options()
        found += self._cache_options()
        if self._replicas > 1:
            found.append(self._names("router"))
        return [one for one in found if len(one.values) > 1 and not self._is_kept(one.path)]

    def _is_kept(self, path: str) -> bool:
        return any(path == kept or path.startswith(f"{kept}.") for kept in self._keep)

    def _bucketing_options(self) -> list[Option]:
        """Return the bucketing strategy and its options; the cost of padding is simulated, that of preparing buckets is not.

        Therefore the strategy that prepares no buckets, and compiles while requests wait, is left out.
        """
        chosen = self._config.bucketing.name
        table = BUCKETING_BY_LAYOUT[self._layout] if chosen == AUTO else chosen
        names = self._names("bucketing")
        left = tuple(name for name in names.values if name in (chosen, AUTO) or name != BUCKETING_BY_LAYOUT["ragged"])
        return [attrs.evolve(names, values=left), *self._options_in("bucketing", table, {})]

    def _draft_options(self) -> list[Option]:
        """Return the options of speculation: drafts on or off, maximum draft length, and the policy of the length."""
        name = self._config.speculation.name
        found = [Option(path="speculation.name", start=name, values=(name, "none")), self._names("draft_length")]
        most = getattr(self._config.speculation.components.get(name), "max_draft_tokens", 0)
        if most:
            values = ladder(*_DRAFTS, most)
            path = f"speculation.{name}.max_draft_tokens"
            found.append(Option(path=path, start=most, values=values, is_ordered=True))
        return found

    def _cache_options(self) -> list[Option]:
        cache, engine = self._config.cache, self._config.engine
        found = []
        if self._is_short_of_blocks:
            fractions = tuple(sorted({cache.memory_fraction, *_FRACTIONS}))
            found.append(
                Option(path="cache.memory_fraction", start=cache.memory_fraction, values=fractions, is_ordered=True)
            )
        if self._shares and cache.prefix_caching:
            found.append(self._names("eviction"))
        found.append(Option(path="engine.preemption", start=engine.preemption, values=("recompute", "swap")))
        swap = [cache.swap_bytes // 4, cache.swap_bytes, cache.swap_bytes * 4]
        found.append(
            Option(
                path="cache.swap_bytes",
                start=cache.swap_bytes,
                values=tuple(dict.fromkeys(swap)),
                is_ordered=True,
                needs={"engine.preemption": "swap"},
            )
        )
        return found

    def in_force(self, changes: Changes) -> dict[str, Any]:
        """Return the changes without options of policies that are not in use. Pure."""
        deciding = self.tables_in_force(changes.get("scheduling.name", self._config.scheduling.name))
        drafts = changes.get("speculation.name", self._config.speculation.name) != "none"
        swaps = changes.get("engine.preemption", self._config.engine.preemption) == "swap"
        found = {}
        for path, value in sorted(changes.items()):
            noun, _, rest = path.partition(".")
            table, dot, _ = rest.partition(".")
            if noun == "scheduling" and dot and table not in deciding:
                continue
            if noun == "bucketing" and dot and changes.get("bucketing.name", table) != table:
                continue
            if path == "cache.swap_bytes" and not swaps:
                continue
            if not drafts and (noun == "draft_length" or (noun == "speculation" and dot)):
                continue
            found[path] = value
        return found

    def _names(self, noun: str) -> Option:
        start = getattr(self._config, noun).name
        names = dict.fromkeys([start, *self._registry.components(noun)])
        brings = {}
        if noun == "scheduling":
            brings = {name: self._told(name) for name in names}
        return Option(path=f"{noun}.name", start=start, values=tuple(names), brings=brings)

    def _told(self, name: str) -> Changes:
        """Return the changes that set a policy's targets and step-time model, if it has such options."""
        found: dict[str, Any] = {}
        for table in self.tables_in_force(name):
            options = self._config.scheduling.components.get(table)
            for key, quantity in _TARGETS.items():
                if getattr(options, key, 0) and quantity in self._targets_s:
                    found[f"scheduling.{table}.{key}"] = 1000 * self._targets_s[quantity]
            if getattr(options, "tpot_target_ms", 0):
                found |= self._told_model(table)
        return found

    def _told_model(self, table: str) -> dict[str, Any]:
        return {f"scheduling.{table}.{key}": value for key, value in zip(_MODEL, self._model, strict=True)}

    def tables_in_force(self, name: str) -> list[str]:
        """Return the names of a policy and of its inner policies."""
        found = [name]
        for table in found:
            options = self._config.scheduling.components.get(table)
            for field in attrs.fields(type(options)) if options is not None else ():
                inner = getattr(options, field.name)
                if field.metadata.get("component") == "scheduling" and inner and inner not in found:
                    found.append(inner)
        return found

    def options_of(self, name: str) -> list[Option]:
        """Return the options of a scheduling policy's config class that have a known range of values.

        Args:
            name: Name of the policy; its options take effect only with it.
        """
        needs = {} if name == self._config.scheduling.name else {"scheduling.name": name}
        tables = reversed(self.tables_in_force(name))
        return [option for table in tables for option in self._options_in("scheduling", table, needs)]

    def _options_in(self, noun: str, table: str, needs: Changes) -> list[Option]:
        """Return the options in the table of one component."""
        options = getattr(self._config, noun).components.get(table)
        if not attrs.has(type(options)):
            return []
        hints = typing.get_type_hints(type(options))
        found = []
        for field in attrs.fields(type(options)):
            if field.name in _MODEL:
                continue
            start = getattr(options, field.name)
            option = self._option(f"{noun}.{table}", field, hints[field.name], start, needs)
            if option is not None and len(option.values) > 1 and not self._is_kept(option.path):
                found.append(option)
        return found

    def _option(self, table: str, field: Any, kind: Any, start: Any, needs: Changes) -> Option | None:
        path = f"{table}.{field.name}"
        if field.name in _TARGETS:
            return self._target(table, field.name, start, needs)
        if kind is bool:
            return Option(path=path, start=start, values=(start, not start), needs=needs)
        choices = _choices(field.validator)
        if choices:
            return Option(path=path, start=start, values=tuple(dict.fromkeys([start, *choices])), needs=needs)
        if kind not in (int, float):
            return None
        values = self._numbers(field, kind, start)
        return Option(path=path, start=start, values=values, is_ordered=True, needs=needs)

    def _numbers(self, field: Any, kind: type, start: float) -> tuple[float, ...]:
        low, high = _bounds(field.validator)
        if not math.isinf(low) and not math.isinf(high):
            found = [low, (low + high) / 2, high]
        elif start > 0:
            found = [start * factor for factor in _OPEN]
        elif field.metadata.get("unit") == "tokens":  # 0: no limit
            found = list(ladder(*_CHUNKS))
        elif field.metadata.get("unit") == "sizes":  # 0: the number follows from the range
            found = list(_SIZES)
        else:
            found = []
        return tuple(sorted({kind(value) for value in (start, *found) if low <= kind(value) <= high}))

    def _target(self, table: str, key: str, start: float, needs: Changes) -> Option | None:
        """Return the option of a policy's target, with values relative to the objective's limit; None without one."""
        target_s = self._targets_s.get(_TARGETS[key])
        if not target_s:
            return None
        values = tuple(sorted({start, *(1000 * target_s * factor for factor in (0.5, 0.75, 1.0))}))
        brings = {}
        if key == "tpot_target_ms":
            brings = {value: self._told_model(table.partition(".")[2]) for value in values if value}
        path = f"{table}.{key}"
        return Option(path=path, start=start, values=values, is_ordered=True, needs=needs, brings=brings)


def _targets(slo: Slo) -> dict[str, float]:
    """Return the smallest limit of each quantity, seconds; ``itl`` counts as ``tpot``. Pure."""
    found: dict[str, float] = {}
    for limit in slo.limits:
        quantity = "tpot" if limit.quantity == "itl" else limit.quantity
        found[quantity] = min(limit.limit_s, found.get(quantity, math.inf))
    return found


def _model_of(step_times: StepTimes) -> tuple[float, float, float]:
    """Return the step-time model of policies from decode steps: ms per step, µs per token, µs per KV entry."""

    def step_s(num_decodes: int, context: int) -> float:
        shape = StepShape(
            num_decodes=num_decodes,
            num_decode_tokens=num_decodes,
            num_decode_context=context,
            buckets=(Bucket(num_decodes, 1, context // 16, Phase.DECODE),),
        )
        return step_times.device_s(shape) + step_times.host_s(shape)

    one, rows, read = step_s(1, 1024), step_s(65, 65 * 1024), step_s(1, 65 * 1024)
    context_s = max(0.0, read - one) / (64 * 1024)
    token_s = max(0.0, rows - read) / 64
    base_s = max(0.0, one - token_s - 1024 * context_s)
    return tuple(float(f"{value:.4g}") for value in (1e3 * base_s, 1e6 * token_s, 1e6 * context_s))  # type: ignore[return-value]


def _parts(validator: Any) -> tuple[Any, ...]:
    """Return the single checks of an attrs validator. Pure."""
    checks: tuple[Any, ...] = getattr(validator, "_validators", (validator,))
    return checks


def _choices(validator: Any) -> tuple[Any, ...]:
    """Return the values that a validator allows, if it lists them. Pure."""
    return next((tuple(one.options) for one in _parts(validator) if hasattr(one, "options")), ())


def _bounds(validator: Any) -> tuple[float, float]:
    """Return the smallest and largest number that a validator allows; infinite without a bound. Pure."""
    low, high = -math.inf, math.inf
    for one in _parts(validator):
        operation, bound = getattr(one, "compare_op", ""), getattr(one, "bound", math.nan)
        if operation in (">=", ">"):
            low = bound
        elif operation in ("<=", "<"):
            high = bound
    return low, high
