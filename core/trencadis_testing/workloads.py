"""Repeatable workloads, and the loop that serves one: what suites run strategies under."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from trencadis.clock import SimulatedClock
from trencadis.errors import RequestRefusedError, StepFailedError
from trencadis.records import FinishedSequence, FinishReason, Request, SamplingParams
from trencadis_testing.fakes import fake_text

if TYPE_CHECKING:
    from trencadis.engine.engine import Engine

__all__ = ["Arrival", "Served", "arrivals", "serve", "wrong_texts"]

_TENANTS = ("", "blue", "green")


@attrs.frozen
class Arrival:
    """A request and the step before which it arrives."""

    step: int
    request: Request


@attrs.frozen
class Served:
    """What became of a workload.

    Attributes:
        ends: Finished sequences by request id; aborted ones are left out.
        accepted: Ids of the requests that were neither refused nor aborted.
        num_aborted: Requests that were aborted.
    """

    ends: dict[str, FinishedSequence]
    accepted: set[str]
    num_aborted: int


def arrivals(seed: int, *, num_requests: int = 24, longest: int = 30) -> list[Arrival]:
    """Return a bursty workload: shared prefixes, priorities, tenants, one-token and long requests. Pure.

    Args:
        seed: Seed of all choices.
        num_requests: How many.
        longest: Most prompt tokens after the shared prefix of 12.
    """
    rng = random.Random(seed)
    system = [rng.randrange(97) for _ in range(12)]
    found, step = [], 0
    for i in range(num_requests):
        step += rng.choice([0, 0, 0, 1, 5])
        own = [rng.randrange(97) for _ in range(rng.randint(1, longest))]
        prompt = system + own if rng.random() < 0.5 else own
        request = Request(
            request_id=f"request {i}",
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=rng.choice([1, 2, 8, 20])),
            priority=rng.choice([0, 0, 1, 5]),
            tenant=rng.choice(_TENANTS),
            cache_salt="",
        )
        found.append(Arrival(step, request))
    return found


def serve(
    engine: Engine,
    clock: SimulatedClock,
    todo: Sequence[Arrival],
    *,
    abort_every: int = 0,
    max_steps: int = 4000,
    after_step: Callable[[], None] = lambda: None,
) -> Served:
    """Serve a workload to its end; the engine must then hold nothing.

    Args:
        engine: Engine of the strategies under test, on a fake backend.
        clock: The engine's; advances by 0.05 s a step.
        todo: In order of their steps.
        abort_every: Abort the oldest live request every so many steps; 0: never.
        max_steps: The work must be done by then.
        after_step: Called after every step, for further checks.

    Raises:
        AssertionError: A block is not given back, or the work does not end.
    """
    waiting = list(todo)
    ends: dict[str, FinishedSequence] = {}
    accepted: set[str] = set()
    num_aborted = 0
    for step in range(max_steps):
        while waiting and waiting[0].step <= step:
            _add(engine, waiting.pop(0).request, accepted)
        live = engine.inspect().sequences if abort_every and step % abort_every == 0 else ()
        if live:
            end = engine.abort(next(iter(live)))
            accepted.discard(end.request_id if end else "")
            num_aborted += 1
        ends.update((end.request_id, end) for end in engine.step().finished)
        clock.advance(0.05)
        after_step()
        if not waiting and not engine.has_work:
            assert engine.inspect().blocks.num_used == 0, "every block comes back"
            return Served(ends=ends, accepted=accepted, num_aborted=num_aborted)
    raise AssertionError(f"20: after {max_steps} steps {sorted(engine.inspect().sequences)} are not done")


def wrong_texts(served: Served, todo: Sequence[Arrival], *, eos: int = 0) -> list[str]:
    """Return the requests that failed, or whose text is not the one the fake model has for their prompt; in words. Pure.

    Args:
        served: Outcome of each request.
        todo: The requests.
        eos: End-of-sequence token of the fake backend.
    """
    faults = [f"{name} is lost" for name in sorted(served.accepted - set(served.ends))]
    for arrival in todo:
        request = arrival.request
        end = served.ends.get(request.request_id)
        if end is None:
            continue
        true = fake_text(list(request.prompt_token_ids), request.params.max_tokens or 0, eos=eos)
        if end.finish_reason is FinishReason.ERROR:
            faults.append(f"{request.request_id} failed: {end.error}")
        elif end.token_ids.tolist() != true:
            faults.append(f"{request.request_id} is {end.token_ids.tolist()}, not {true}")
    return faults


def _add(engine: Engine, request: Request, accepted: set[str]) -> None:
    try:
        engine.add(request)
    except RequestRefusedError as error:
        if isinstance(error.__cause__, StepFailedError):
            raise  # the policy failed: that is no refusal
        return
    accepted.add(request.request_id)
