"""Step times from the times of requests: simulate, count what each request waited for, solve, and simulate again.

    step times ▶ simulate ▶ steps ▶ sizes that each request waited for ─▶ least squares ▶ step times ─┐
        ▲                                                                                              │
        └────────────────────────────── until the simulated times come no nearer ◀─────────────────────┘

Nothing says how long a step took: but in a simulated schedule the time to a request's first token is the sum of the steps between its
arrival and that token, of the step in which it came the part that was left, and so it is linear in the coefficients. Solved for them the
schedule is another one, and the next turn counts again. A turn that comes no nearer is halved, then given up.

Residuals are those of the simulation, relative to the measured time and one step beside it, for a first token comes up to one step
sooner or later by chance. Large ones count by their size, not by its square: requests that the other engine preempted, say. Of what the
requests do not tell, such as steps of few sequences where there were always many, the coefficients stay near those of the start.

Source: Charbonnier and others, Two deterministic half-quadratic regularization algorithms for computed imaging, 1994 (the loss, solved by
weighted least squares); Lawson and Hanson, Solving Least Squares Problems, 1974 (NNLS).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import numpy as np

from trencadis.api import Config, Registry
from trencadis.console import Advance
from trencadis.errors import ConfigError
from trencadis.records import FloatArray, StepShape
from trencadis_tools.simulation.fleet import simulate
from trencadis_tools.simulation.measured_requests import MeasuredRun
from trencadis_tools.simulation.run import Run
from trencadis_tools.simulation.step_shape import StepTimes
from trencadis_tools.simulation.step_times.fit import nonnegative_solution
from trencadis_tools.simulation.step_times.linear import LinearStepTimes

__all__ = [
    "FEWEST",
    "TERMS",
    "FittedTerm",
    "LatencyErrors",
    "RequestFit",
    "fit_requests",
    "latency_errors",
    "predicted",
]

TERMS: Final[dict[str, Callable[[StepShape], float]]] = {
    "base_s": lambda _: 1.0,
    "prefill_token_s": lambda shape: shape.num_prefill_tokens,
    "context_s": lambda shape: shape.num_context,
    "row_s": lambda shape: shape.num_rows,
}
"""Coefficients of :class:`LinearStepTimes` that are fitted, and their sizes; the others are 0."""
FEWEST: Final = 20
"""Requests to fit."""

_SMALL: Final = 0.01
"""Relative residual up to which the loss is that of squares."""
_PRIOR: Final = 3e-4
"""Loss of a coefficient that is twice that of the start: as much as the simulated times change by chance, when steps shift."""
_NUM_TURNS: Final = 15
_SHARES: Final = (1.0, 0.5, 0.25)
"""Shares of a turn that are tried."""
_LEAST_GAIN: Final = 1e-3


@attrs.frozen(kw_only=True)
class FittedTerm:
    """One coefficient.

    Attributes:
        value: Seconds for one of its sizes.
        error: Standard error of the value if requests were independent, seconds; they are not, for they share steps.
        told: How much of it the requests tell, 0 .. 1; the rest is the start's.
    """

    value: float
    error: float
    told: float


@attrs.frozen(kw_only=True)
class RequestFit:
    """What was fitted.

    Attributes:
        times: The model.
        terms: Fitted terms by name of the coefficient.
        loss: Mean over the fitted times, at the end.
        num_simulations: Simulations that the fit took.
        run: Simulation of all requests with the fitted step times.
    """

    times: LinearStepTimes
    terms: Mapping[str, FittedTerm]
    loss: float
    num_simulations: int
    run: Run = attrs.field(repr=False)


@attrs.frozen(kw_only=True)
class LatencyErrors:
    """Simulated by measured, of some requests; shares of the measured time, 0.02 is 2 % too long.

    Attributes:
        num_requests: Number of the requests.
        measured_s: Mean that was measured, seconds.
        mean: Signed error of the mean.
        p50: Signed error of the median.
        p99: Signed error of the 99th percentile.
        each: Median over single requests of the error's size.
    """

    num_requests: int
    measured_s: float
    mean: float
    p50: float
    p99: float
    each: float


class _Steps:
    """Sizes of the steps of a run, summed up over time; a :class:`StepLog`."""

    def __init__(self, names: Sequence[str]) -> None:
        self._sizes = [TERMS[name] for name in names]
        self._rows: list[tuple[float, ...]] = []

    def computed(self, shape: StepShape, ends: Sequence[tuple[float, float]]) -> None:
        """Note some steps, each with one more KV entry of every decode."""
        for index, (end_s, step_s) in enumerate(ends):
            grown = attrs.evolve(shape, num_decode_context=shape.num_decode_context + index * shape.num_decodes)
            self._rows.append((end_s - step_s, end_s, *(size(grown) for size in self._sizes)))

    def table(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return when steps begin and end, float64 ``[num_steps]``, and their sizes, ``[num_steps, num_terms]``."""
        rows: FloatArray = np.array(self._rows, np.float64)
        return rows[:, 0], rows[:, 1], rows[:, 2:]

    def until(self, times_s: FloatArray) -> FloatArray:
        """Return the sizes of all steps until some moments, ``[num_moments, num_terms]``; of the step that runs the part."""
        begins, ends, sizes = self.table()
        moments = np.stack([begins, ends], 1).ravel()
        sums = np.vstack([np.zeros((1, sizes.shape[1])), np.cumsum(sizes, 0)])
        sums = np.repeat(sums, 2, 0)[1:-1]
        return np.stack([np.interp(times_s, moments, column) for column in sums.T], 1)


@attrs.frozen(kw_only=True)
class _Turn:
    """A simulation with some coefficients.

    Attributes:
        values: The coefficients, seconds.
        residuals: By fitted time, relative.
        sizes: That each fitted time is the sum of, ``[num_times, num_terms]``.
        loss: Mean of the fitted times, and the prior's.
        run: Simulation of all requests.
    """

    values: FloatArray
    residuals: FloatArray
    sizes: FloatArray
    loss: float
    run: Run


class _Problem:
    """What is minimised: over the first ``num_fitted`` requests, times to the first token, then those from it to the last one."""

    def __init__(
        self, config: Config, registry: Registry, measured: MeasuredRun, *, num_fitted: int, names: Sequence[str]
    ) -> None:
        self._config, self._registry = config, registry
        self._measured, self._num_fitted, self._names = measured, num_fitted, names
        self._workload = measured.workload
        self.num_simulations = 0
        self.step_s = _typical_step_s(measured)
        self.measured_s = np.concatenate([measured.ttft_s[:num_fitted], measured.decode_s[:num_fitted]])
        self.noise_s = self.measured_s + self.step_s
        self.start: FloatArray = np.empty(0)
        self.scale: FloatArray = np.empty(0)

    def run(self, times: StepTimes) -> tuple[Run, _Steps]:
        """Simulate all requests."""
        steps = _Steps(self._names)
        self.num_simulations += 1
        return predicted(self._config, self._registry, self._measured, times, log=steps), steps

    def begin(self, times: StepTimes | None) -> None:
        """Choose the coefficients to begin with: those nearest to some step times, or a share of what the requests took."""
        self.start = self._guess() if times is None else self._nearest(times)
        _, steps = self.run(_times(self._names, self.start))
        _, _, sizes = steps.table()
        # A coefficient of 0 is told apart from one that makes a tenth of a step.
        self.scale = np.maximum(self.start, 0.1 * self.step_s / np.maximum(sizes.mean(0), 1e-9))

    def _guess(self) -> FloatArray:
        measured = self._measured
        lengths = np.array([one.request.num_prompt_tokens for one in measured.requests], np.float64)
        outputs = np.array([one.request.num_output_tokens for one in measured.requests], np.float64)
        arrivals = np.array([one.request.arrival_s for one in measured.requests], np.float64)
        span_s = float((arrivals + measured.ttft_s + measured.decode_s).max())
        num_running = max(1.0, float(measured.decode_s.sum()) / span_s)
        context = num_running * float((lengths + outputs / 2).mean())
        shares = {
            "base_s": 0.5 * self.step_s,
            "prefill_token_s": 0.5 * float(np.percentile(measured.ttft_s / lengths, 5)),
            "context_s": 0.25 * self.step_s / context,
            "row_s": 0.1 * self.step_s / num_running,
        }
        return np.array([shares[name] for name in self._names])

    def _nearest(self, times: StepTimes) -> FloatArray:
        """Return the coefficients of a line as they are, of a sheet those nearest to it over the steps of a simulation."""
        if isinstance(times, LinearStepTimes):
            of_token = {"prefill_token_s": times.token_s, "row_s": times.token_s}
            return np.array([getattr(times, name) + of_token.get(name, 0.0) for name in self._names])
        _, steps = self.run(times)
        begins, ends, sizes = steps.table()
        took_s = np.maximum(ends - begins, 1e-9)
        return nonnegative_solution(sizes / took_s[:, None], np.ones(len(took_s)))

    def turn(self, values: FloatArray) -> _Turn:
        """Simulate with some coefficients."""
        run, steps = self.run(_times(self._names, values))
        records = run.records[: self._num_fitted]
        moments = np.array([(one.sent_s, one.first_token_s, one.finished_s) for one in records])
        sent, first, finished = steps.until(moments.T.ravel()).reshape(3, len(records), -1)
        found_s = np.array([one.ttft_s for one in records] + [one.finished_s - one.first_token_s for one in records])
        residuals = (found_s - self.measured_s) / self.noise_s
        prior = _PRIOR * float((((values - self.start) / self.scale) ** 2).sum())
        return _Turn(
            values=values,
            residuals=residuals,
            sizes=np.concatenate([first - sent, finished - first]),
            loss=float(_SMALL * (np.sqrt(1 + (residuals / _SMALL) ** 2) - 1).mean()) + prior,
            run=run,
        )

    def weighted(self, turn: _Turn) -> tuple[FloatArray, FloatArray]:
        """Return root weights of the fitted times, and of the prior, as both count in least squares."""
        roots = (1 + (turn.residuals / _SMALL) ** 2) ** -0.25
        return roots, np.full(len(self.scale), np.sqrt(2 * _SMALL * len(roots) * _PRIOR))

    def solved(self, turn: _Turn) -> FloatArray:
        """Return the coefficients that suit the schedule of a turn best."""
        roots, prior = self.weighted(turn)
        columns = turn.sizes / self.noise_s[:, None] * self.scale
        aim = columns @ (turn.values / self.scale) - turn.residuals
        rows = np.vstack([columns * roots[:, None], np.diag(prior)])
        return nonnegative_solution(rows, np.concatenate([aim * roots, prior * self.start / self.scale])) * self.scale

    def terms(self, turn: _Turn) -> dict[str, FittedTerm]:
        """Return coefficients with their errors, and how much of them is told."""
        roots, prior = self.weighted(turn)
        rows = turn.sizes / self.noise_s[:, None] * self.scale * roots[:, None]
        inverse = np.linalg.pinv(rows.T @ rows + np.diag(prior**2))
        spread = float(np.sqrt(((turn.residuals * roots) ** 2).sum() / max(1, len(roots) - len(prior))))
        return {
            name: FittedTerm(
                value=float(turn.values[index]),
                error=float(spread * np.sqrt(inverse[index, index]) * self.scale[index]),
                told=float(np.clip(1 - prior[index] ** 2 * inverse[index, index], 0, 1)),
            )
            for index, name in enumerate(self._names)
        }


def fit_requests(
    config: Config,
    registry: Registry,
    measured: MeasuredRun,
    *,
    num_fitted: int,
    start: StepTimes | None = None,
    leave_out: Sequence[str] = (),
    note: Advance | None = None,
) -> RequestFit:
    """Return the step times with which simulated requests take what the measured ones took. Deterministic.

    Args:
        config: Configuration of the measured engine: rows, token budget, KV blocks, scheduling.
        registry: The plugins.
        measured: All of its requests are simulated.
        num_fitted: The first so many are fitted; the others are load alone.
        start: Step times to begin with, and to stay near where the requests tell nothing; None: a guess from the requests.
        leave_out: Names of coefficients that are to be 0.
        note: Called with the number of simulations so far, and the most that there will be; or None.

    Raises:
        ConfigError: Fewer than :data:`FEWEST` requests, an unknown coefficient, or a request that the engine refuses.
        TrencadisError: A policy failed.
    """
    names = _chosen(leave_out)
    if num_fitted < FEWEST:
        raise ConfigError(
            f"{measured.name}: {num_fitted} requests are too few to fit {len(names)} coefficients: {FEWEST} are needed.",
            hint="Measure more requests, or hold out fewer (--held-out).",
        )
    problem = _Problem(config, registry, measured, num_fitted=num_fitted, names=names)
    problem.begin(start)
    best = problem.turn(problem.start)
    most = problem.num_simulations + _NUM_TURNS * len(_SHARES)
    for _ in range(_NUM_TURNS):
        aim, found = problem.solved(best), None
        for share in _SHARES:
            tried = problem.turn(best.values + share * (aim - best.values))
            if note is not None:
                note(problem.num_simulations, most)
            if tried.loss < best.loss * (1 - _LEAST_GAIN):
                found = tried
                break
        if found is None:
            break
        best = found
    return RequestFit(
        times=_times(names, best.values),
        terms=problem.terms(best),
        loss=best.loss,
        num_simulations=problem.num_simulations,
        run=best.run,
    )


def predicted(
    config: Config, registry: Registry, measured: MeasuredRun, times: StepTimes, *, log: _Steps | None = None
) -> Run:
    """Return the run of measured requests with some step times.

    Raises:
        ConfigError: The engine refuses a request.
        TrencadisError: A policy failed.
    """
    run = simulate(config, registry, measured.workload, step_times=times, log=log)
    for record in run.records:
        if record.error:
            raise ConfigError(
                f"{measured.name}: the simulated engine refuses a request of {record.request.num_prompt_tokens} prompt tokens that was "
                f"answered: {record.error}.",
                hint="Set cache.num_blocks, engine.max_num_seqs and scheduling as in the engine that was measured.",
            )
    return run


def latency_errors(
    measured: MeasuredRun, run: Run, *, first: int = 0, end: int | None = None
) -> dict[str, LatencyErrors]:
    """Return errors of TTFT, TPOT and E2E of some requests; TPOT is left out if no answer has two tokens. Pure.

    Args:
        measured: Measured requests.
        run: The same requests, simulated.
        first: Index of the first of them.
        end: Index after the last one; None: all.
    """
    outputs = np.array([one.request.num_output_tokens for one in measured.requests])[first:end]
    ttft_s, decode_s = measured.ttft_s[first:end], measured.decode_s[first:end]
    records = run.records[first:end]
    several = outputs > 1
    pairs = {
        "TTFT": (ttft_s, np.array([one.ttft_s for one in records])),
        "TPOT": ((decode_s / np.maximum(1, outputs - 1))[several], np.array([one.tpot_s for one in records])[several]),
        "E2E": (ttft_s + decode_s, np.array([one.e2e_s for one in records])),
    }
    return {name: _errors(was_s, is_s) for name, (was_s, is_s) in pairs.items() if len(was_s)}


def _errors(was_s: FloatArray, is_s: FloatArray) -> LatencyErrors:
    return LatencyErrors(
        num_requests=len(was_s),
        measured_s=float(was_s.mean()),
        mean=float(is_s.mean() / was_s.mean() - 1),
        p50=float(np.median(is_s) / np.median(was_s) - 1),
        p99=float(np.percentile(is_s, 99) / np.percentile(was_s, 99) - 1),
        each=float(np.median(np.abs(is_s / was_s - 1))),
    )


def _typical_step_s(measured: MeasuredRun) -> float:
    """Return the median time from token to token, or of a first token where no answer has two. Pure."""
    tpot_s = [
        one.decode_s / (one.request.num_output_tokens - 1)
        for one in measured.requests
        if one.request.num_output_tokens > 1
    ]
    return float(np.median(tpot_s)) if tpot_s else float(measured.ttft_s.min())


def _times(names: Sequence[str], values: FloatArray) -> LinearStepTimes:
    coefficients: dict[str, Any] = {"token_s": 0.0} | dict.fromkeys(TERMS, 0.0)
    return LinearStepTimes(**coefficients | dict(zip(names, map(float, values), strict=True)))


def _chosen(leave_out: Sequence[str]) -> list[str]:
    unknown = set(leave_out) - set(TERMS)
    if unknown:
        raise ConfigError(
            f"there is no coefficient {', '.join(sorted(unknown))} to leave out.", hint=f"There are {', '.join(TERMS)}."
        )
    names = [name for name in TERMS if name not in leave_out]
    if not names:
        raise ConfigError("every coefficient is left out.", hint="Leave out fewer (--leave-out).")
    return names
