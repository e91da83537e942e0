"""The least work first."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np

from trencadis.errors import ConfigValueError, did_you_mean
from trencadis.interfaces import SchedulerView, import_attribute, plain_state
from trencadis.records import FloatArray, Int32Array, Request
from trencadis_plugins.scheduling.columns import SlotColumn
from trencadis_plugins.scheduling.config import ShortestFirstConfig
from trencadis_plugins.scheduling.fcfs import Fcfs

__all__ = ["Predictor", "ShortestFirst", "make_predictor"]


class Predictor(ABC):
    """Expects output lengths."""

    def on_added(self, slot: int, request: Request) -> None:  # noqa: B027 - optional
        """Called for a request."""

    def on_finished(self, tenant: int, num_output_tokens: int) -> None:  # noqa: B027 - optional
        """Receives how long an output was."""

    @abstractmethod
    def expected(self, view: SchedulerView, slots: Int32Array) -> FloatArray:
        """Return the output tokens to expect of each slot, float64 as long as ``slots``."""


class NoOutput(Predictor):
    """Only prompts count."""

    def expected(self, view: SchedulerView, slots: Int32Array) -> FloatArray:
        """Return zeros."""
        return np.zeros(len(slots))


class Allowed(Predictor):
    """Outputs are as long as requests allow."""

    def expected(self, view: SchedulerView, slots: Int32Array) -> FloatArray:
        """Return what ``max_tokens`` and the model's limit leave."""
        return (view.max_total_tokens[slots] - view.num_prompt_tokens[slots]).astype(np.float64)


class History(Predictor):
    """Outputs are as long as the tenant's were on average; recent ones count more.

    Args:
        memory: About so many outputs count.
        first_guess: Expected of a tenant without any, tokens.
    """

    def __init__(self, *, memory: int = 100, first_guess: float = 128.0) -> None:
        self._memory = memory
        self._first_guess = first_guess
        self._means = SlotColumn()
        self._counts = SlotColumn()

    def on_finished(self, tenant: int, num_output_tokens: int) -> None:
        """Move the tenant's mean."""
        if num_output_tokens:
            count = min(self._counts[tenant] + 1, self._memory)
            self._counts[tenant] = count
            self._means[tenant] += (num_output_tokens - self._means[tenant]) / count

    def expected(self, view: SchedulerView, slots: Int32Array) -> FloatArray:
        """Return the tenants' means, at most what requests allow."""
        tenants = view.tenant[slots].astype(np.int32)
        means = np.where(self._counts.of(tenants) > 0, self._means.of(tenants), self._first_guess)
        expected: FloatArray = np.minimum(means, view.max_total_tokens[slots] - view.num_prompt_tokens[slots])
        return expected


class ByFunction(Predictor):
    """A guess of the user's function, asked once per request.

    Args:
        function: Called with the request; returns output tokens, 0 or more.
    """

    def __init__(self, function: Callable[[Request], float]) -> None:
        self._function = function
        self._guesses = SlotColumn()

    def on_added(self, slot: int, request: Request) -> None:
        """Ask, and remember."""
        self._guesses[slot] = float(self._function(request))

    def expected(self, view: SchedulerView, slots: Int32Array) -> FloatArray:
        """Return the guesses."""
        return self._guesses.of(slots)


_BY_NAME: dict[str, Callable[[], Predictor]] = {"none": NoOutput, "max_tokens": Allowed, "history": History}


def make_predictor(name: str) -> Predictor:
    """Return a predictor by name, or by the import path of a function of the request.

    Raises:
        ConfigValueError: There is no such predictor, or it cannot be imported.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]()
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ConfigValueError(
            f"[scheduling.shortest_first] predictor = {name!r}: no such predictor."
            f"{did_you_mean(name, _BY_NAME)} Choose one of: {', '.join(_BY_NAME)}.",
            hint="A function of yours takes an import path: package.module:function.",
        )
    try:
        function = import_attribute(name)
    except (ImportError, AttributeError) as error:
        raise ConfigValueError(
            f"[scheduling.shortest_first] predictor = {name!r}: cannot be imported: {error}.",
            hint="Correct the import path: package.module:function, importable where trencadis runs.",
        ) from error
    if not inspect.isfunction(function):
        raise ConfigValueError(
            f"[scheduling.shortest_first] predictor = {name!r}: is no function of a Python module, and was not called.",
            hint="Name a function that takes a request and returns how many output tokens to expect.",
        )
    return ByFunction(function)


@plain_state
class ShortestFirst(Fcfs):
    """Admits what is expected to be done soonest: tokens to compute, and output tokens that are still to come, weighted.

    Waiting makes up for work, as ``work + arrival × age_tokens_per_s`` is the key.

    Args:
        config: Predictor, weight of outputs, ageing.

    Source: shortest job first; ranking by predictions is enough, as only the order matters: Fu et al., "Efficient LLM Scheduling
    by Learning to Rank", NeurIPS 2024.
    """

    def __init__(self, config: ShortestFirstConfig | None = None) -> None:
        config = config if config is not None else ShortestFirstConfig()
        super().__init__(config)
        self._predictor = make_predictor(config.predictor)
        self._output_weight = config.output_weight
        self._age_tokens_per_s = config.age_tokens_per_s

    def on_added(self, *, slot: int, request: Request) -> None:
        """Let the predictor see it."""
        self._predictor.on_added(slot, request)

    def order(self, view: SchedulerView) -> Int32Array:
        """Return waiting slots by work, the least first; equal ones stay in order."""
        waiting = view.waiting
        num_tokens = view.num_tokens[waiting]
        done = num_tokens - view.num_prompt_tokens[waiting]
        to_come = np.maximum(self._predictor.expected(view, waiting) - done, 0)
        work = num_tokens + self._output_weight * to_come
        return waiting[np.argsort(work + self._age_tokens_per_s * view.arrival_s[waiting], kind="stable")]

    def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
        """Let the predictor learn."""
        self._predictor.on_finished(tenant, num_output_tokens)
