"""A table learnt from what ran: few buckets, placed where the traffic is."""

from __future__ import annotations

from pathlib import Path

from trencadis.errors import ConfigValueError
from trencadis.records import Bucket, BucketLimits
from trencadis_plugins.bucketing.fitted_choice import Budget, choose
from trencadis_plugins.bucketing.fitted_config import FittedConfig
from trencadis_plugins.bucketing.fitted_problem import Problem, decode_problem, prefill_problem
from trencadis_plugins.bucketing.strategy import TableStrategy
from trencadis_plugins.bucketing.workloads.workload import read_source

__all__ = ["Fitted"]


class Fitted(TableStrategy):
    """The table that pads a workload least under a budget of buckets, compile time or memory.

    The largest buckets are always among them, so that every legal shape has one, whatever the trace held; only decode
    passes over more than three times the cache, which takes sequences that share most of their blocks, get a fallback.
    Tables are made once for each limits and then remembered; nothing else changes.

    Args:
        limits: What ``bucket_for`` works under.
        config: What to learn from, and the budget.

    Raises:
        ConfigValueError: No trace is named, or the budget does not pay for the largest buckets.
        ConfigError: The trace cannot be read.
    """

    def __init__(self, limits: BucketLimits, config: FittedConfig) -> None:
        if not config.trace:
            raise ConfigValueError(
                '[bucketing.fitted] trace = "": there is nothing to learn from.',
                hint="Name a trace or a file of recorded shapes, or choose another strategy.",
            )
        self._config = config
        self._source = read_source(Path(config.trace))
        self._tables: dict[BucketLimits, tuple[Bucket, ...]] = {}
        super().__init__(limits)

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        """Return the table: prefill buckets, then decode buckets.

        Raises:
            ConfigValueError: The budget does not pay for the largest buckets.
        """
        if limits not in self._tables:
            self._tables[limits] = self._fit(limits)
        return self._tables[limits]

    def _fit(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        config = self._config
        workload = self._source.workload(limits, config.cost)
        problems = (
            prefill_problem(workload, limits, config.cost),
            decode_problem(workload, limits, config.cost, config.reserve_ratio),
        )
        budget = _budget(config)
        _check(problems, budget, config)
        prefill, decode = choose(problems, budget)
        return (*sorted(prefill), *sorted(decode))


def _budget(config: FittedConfig) -> Budget:
    """Return the budget; every bucket takes equally long to prepare, so that time is a number of buckets."""
    numbers = [config.max_graphs] if config.max_graphs else []
    if config.max_compile_s:
        numbers.append(int(config.max_compile_s / config.cost.compile_s))
    if not numbers and not config.max_graph_bytes:
        raise ConfigValueError(
            "[bucketing.fitted] max_graphs, max_compile_s and max_graph_bytes are all 0: the table has no limit.",
            hint="Set one of them.",
        )
    return Budget(min(numbers) if numbers else None, config.max_graph_bytes or None)


def _check(problems: tuple[Problem, ...], budget: Budget, config: FittedConfig) -> None:
    num_graphs = sum(problem.num_tops for problem in problems)
    num_bytes = sum(float(problem.bytes[: problem.num_tops].sum()) for problem in problems)
    if budget.allows(num_graphs, num_bytes):
        return
    raise ConfigValueError(
        f"[bucketing.fitted] max_graphs = {config.max_graphs}, max_compile_s = {config.max_compile_s:g}, max_graph_bytes = "
        f"{config.max_graph_bytes:.4g}: the {num_graphs} largest buckets, which cover every legal shape, need "
        f"{num_graphs * config.cost.compile_s:.4g} s and {num_bytes:.4g} bytes.",
        hint="Raise the budget, or lower engine.max_num_batched_tokens or the backend's prefill batch size.",
    )
