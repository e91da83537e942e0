"""Step times of the configured engine on this machine, from a short run of it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from trencadis.api import Engine, build_engine
from trencadis.errors import ConfigError
from trencadis.records import Request, SamplingParams
from trencadis_tools.compare.candidates import Candidate, restored
from trencadis_tools.simulation.fleet import has_store
from trencadis_tools.simulation.step_times import (
    BucketStepTimes,
    Fit,
    LinearStepTimes,
    StepRecord,
    fit_step_times,
    read_records,
    steady,
    step_time_errors,
    step_times_json,
)
from trencadis_tools.workloads import Workload

__all__ = ["MeasuredSteps", "measure_steps"]

_NUM_WARM_UP, _NUM_STEPS = 20, 400
_SIZES = (1, 16, 4, 32, 2, 8)
_MOST_TOKENS = 8192
"""Maximum prompt tokens of a group, to keep the run short."""
_DOUBTFUL = 0.2
_SHORTEST, _LEAST_OUTPUT, _MOST_OUTPUT = 8, 6, 24
_LEAVE_OUT = ((), ("product_s",), ("product_s", "row_s"), ("product_s", "row_s", "host_row_s"))
"""Coefficients to leave out, tried in this order until the run's steps determine the others."""


@attrs.frozen(kw_only=True)
class MeasuredSteps:
    """Step times and sizes of an engine from a short run.

    Attributes:
        times: Fitted step times.
        num_blocks: Number of KV blocks of the engine.
        block_size: Tokens of a block.
        max_model_len: Longest sequence that the engine takes, tokens.
        num_rows: Maximum number of concurrent sequences.
        facts: Facts of the fit, as written to a step-time file.
    """

    times: LinearStepTimes | BucketStepTimes
    num_blocks: int
    block_size: int
    max_model_len: int
    num_rows: int
    facts: dict[str, Any]

    @property
    def fillable_blocks(self) -> int:
        """KV blocks of ``num_rows`` sequences of the longest length."""
        return self.num_rows * -(-self.max_model_len // self.block_size)

    @property
    def words(self) -> str:
        """Description of the fit, one sentence."""
        error = self.facts["errors"]["all"]
        return (
            f"fitted from {self.facts['num_steps']} steps of the configured engine on this machine; of other steps, {error['num_steps']}, "
            f"half are predicted within {error['device_median']:.0%}, and their sum is {error['step_sum']:+.0%} off"
        )

    @property
    def is_doubtful(self) -> bool:
        """Whether held-out steps deviate from the fit, because of other load on the machine or too short a run."""
        return bool(abs(self.facts["errors"]["all"]["step_sum"]) > _DOUBTFUL)


def measure_steps(start: Candidate, workload: Workload) -> MeasuredSteps:
    """Run the configured engine for some hundred steps with prompt lengths of the workload, and fit step times.

    Args:
        start: Configuration of the engine.
        workload: Workload whose range of prompt lengths is used, up to the model's limit.

    Raises:
        ConfigError: The model only embeds, or its steps do not allow a fit.
        TrencadisError: The engine cannot be built.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "steps.jsonl")
        recording: dict[str, object] = {"kv_connector.name": "none"} if has_store(start.config) else {}
        recording |= {"observer.names": ["recorder"], "observer.recorder.file": str(file), "observer.budget_ms": 1000.0}
        candidate = restored(start.name, {**start.given, **recording}, may_import=start.may_import)
        engine = build_engine(candidate.config, registry=candidate.registry)
        try:
            if not isinstance(engine, Engine):
                raise ConfigError("trencadis tune: the model only embeds.", hint="Take a model that generates.")
            _run(engine, workload)
            found = engine.inspect()
        finally:
            engine.close()
        steps = steady(read_records(file).steps, num_warm_up=_NUM_WARM_UP)
    held_out = len(steps) // 5
    fit = _fit(steps[:-held_out])
    errors = {kind: attrs.asdict(one) for kind, one in step_time_errors(fit.times, steps[-held_out:]).items()}
    return MeasuredSteps(
        times=fit.times,
        num_blocks=found.blocks.num_blocks,
        block_size=found.block_size,
        max_model_len=found.max_model_len,
        num_rows=found.num_rows,
        facts=step_times_json(fit.times, {"num_steps": fit.num_steps, "errors": errors}),
    )


def _fit(steps: Sequence[StepRecord]) -> Fit:
    """Return step times by bucket if steps have buckets, else a linear model over the sizes that the steps determine."""
    if any(step.shape.buckets for step in steps):
        return fit_step_times(steps, by_bucket=True, leave_out=_LEAVE_OUT[-1], source="the short run")
    for leave_out in _LEAVE_OUT:
        try:
            return fit_step_times(steps, leave_out=leave_out, source="the short run")
        except ConfigError:
            if leave_out == _LEAVE_OUT[-1]:
                raise
    raise AssertionError("the last one returns or raises")


def _run(engine: Engine, workload: Workload) -> None:
    """Run groups of requests of several sizes, added at once or one by one, until there are enough steps."""
    requests = _requests(engine, workload)
    most = engine.inspect().num_rows
    num_steps = number = 0
    while num_steps < _NUM_STEPS + _NUM_WARM_UP:
        size, pause = min(_SIZES[number % len(_SIZES)], most), number // len(_SIZES) % 3
        number += 1
        waiting = _group(requests, size)
        while waiting or engine.has_work:
            while waiting and (not pause or num_steps % (pause + 1) == 0):
                engine.add(waiting.pop())
                if pause:
                    break
            engine.step()
            num_steps += 1


def _group(requests: Iterator[Request], size: int) -> list[Request]:
    found: list[Request] = []
    num_tokens = 0
    while len(found) < size and num_tokens < _MOST_TOKENS:
        found.append(next(requests))
        num_tokens += len(found[-1].prompt_token_ids)
    return found


def _requests(engine: Engine, workload: Workload) -> Iterator[Request]:
    """Yield an endless stream of requests without shared prefixes, of 8 tokens up to the workload's lengths, evenly by logarithm."""
    lengths = sorted(one.num_prompt_tokens for one in workload.requests)
    longest = min(lengths[int(0.9 * (len(lengths) - 1))], engine.max_model_len - _MOST_OUTPUT - 1)
    draws = np.random.default_rng(0)
    number = 0
    while True:
        length = round(math.exp(draws.uniform(math.log(min(_SHORTEST, longest)), math.log(longest))))
        tokens = draws.integers(engine.model.vocab_size, size=length).tolist()
        output = int(draws.integers(_LEAST_OUTPUT, _MOST_OUTPUT))
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
        yield Request(request_id=f"fit-{number}", prompt_token_ids=tuple(tokens), params=params)
        number += 1
