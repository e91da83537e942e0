"""Measurements of real engines in alternating order (A B, B A, A B, …), each on the same piece of the workload at the same rate.

Drift of the machine, such as temperature or other load, affects all configurations alike; the alternating order cancels
effects of a run on the next one.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import attrs
import numpy as np

from trencadis.api import Engine, build_engine
from trencadis.clock import Clock, SystemClock
from trencadis.errors import ConfigError, RequestError, StepFailedError
from trencadis.records import FinishedSequence, FinishReason, Request
from trencadis_tools.compare.candidates import Candidate
from trencadis_tools.simulation import RequestRecord, Run
from trencadis_tools.workloads import Prompts, Workload, WorkloadRequest

__all__ = ["LiveRuns", "pieces_of"]

_WARM_UP_TOKENS = 8


class LiveRuns:
    """Runs workloads on one engine of each configuration, one engine at a time; use as a context manager.

    Args:
        clock: Clock of engines and measurement; None: the system's.
        wait: Sleeps for a number of seconds until the next request.
        token_times: Whether records have the time of each token.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        wait: Callable[[float], None] = time.sleep,
        token_times: bool = False,
    ) -> None:
        self._token_times = token_times
        self._clock = clock or SystemClock()
        self._wait = wait
        self._candidates: Sequence[Candidate] = ()
        self._engines: list[Engine] = []

    def __call__(self, candidates: Sequence[Candidate], workload: Workload, pair: int) -> list[Run]:
        """Return one run for each configuration; odd pairs run in reverse order. Engines are kept until the candidates change.

        Args:
            candidates: Configurations, in the order of the results.
            workload: Workload, the same for all candidates.
            pair: Number of the pair.

        Raises:
            TrencadisError: An engine cannot be built, or a policy failed.
        """
        if candidates != self._candidates:
            self._open(candidates, workload)
        places = list(range(len(candidates)))
        runs = {
            place: _LiveRun(
                self._engines[place], workload, self._clock, self._wait, token_times=self._token_times
            ).run()
            for place in (reversed(places) if pair % 2 else places)
        }
        return [runs[place] for place in places]

    def _open(self, candidates: Sequence[Candidate], workload: Workload) -> None:
        self.close()
        for candidate in candidates:
            engine = build_engine(candidate.config, registry=candidate.registry, clock=self._clock)
            if not isinstance(engine, Engine):
                engine.close()
                raise ConfigError(f"{candidate.name}: its model only embeds.", hint="Take a model that generates.")
            self._engines.append(engine)
            _warm_up(engine, workload)
        self._candidates = candidates

    def close(self) -> None:
        """Close the engines."""
        while self._engines:
            self._engines.pop().close()
        self._candidates = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _warm_up(engine: Engine, workload: Workload) -> None:
    """Run one unmeasured request, with the end of the first prompt, so that memory and threads are allocated."""
    first = _greedy(Prompts(workload, vocab_size=engine.model.vocab_size).request(0))
    params = attrs.evolve(first.params, max_tokens=_WARM_UP_TOKENS)
    engine.add(attrs.evolve(first, params=params, prompt_token_ids=first.prompt_token_ids[-_WARM_UP_TOKENS:]))
    while engine.has_work:
        engine.step()


def _greedy(request: Request) -> Request:
    """Return the request with end-of-sequence tokens ignored."""
    return attrs.evolve(request, params=attrs.evolve(request.params, ignore_eos=True))


@attrs.define(kw_only=True)
class _Sent:
    """A request that was sent to the engine.

    Attributes:
        index: Index of the request in the workload.
        prompt: Prompt token ids.
        sent_s: Scheduled time of sending, seconds since the start of the run.
        num_tokens: Number of tokens received.
        first_token_s: Time of the first token, seconds since the start; NaN before.
        token_times_s: Times of all tokens, if requested.
    """

    index: int
    prompt: tuple[int, ...]
    sent_s: float
    num_tokens: int = 0
    first_token_s: float = math.nan
    token_times_s: list[float] = attrs.field(factory=list)


class _LiveRun:
    """One workload on one engine."""

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        clock: Clock,
        wait: Callable[[float], None],
        *,
        token_times: bool,
    ) -> None:
        self._engine, self._clock, self._wait = engine, clock, wait
        self._token_times = token_times
        self._requests = workload.requests
        self._prompts = Prompts(workload, vocab_size=engine.model.vocab_size)
        self._records: dict[int, RequestRecord] = {}
        self._sent: dict[int, _Sent] = {}  # by slot
        self._followers: dict[str, list[int]] = {}
        self._coming: list[tuple[float, int, tuple[int, ...]]] = []  # (time, index, preceding tokens), a heap
        for index, request in enumerate(self._requests):
            if request.after:
                self._followers.setdefault(request.after, []).append(index)
            else:
                self._coming.append((request.arrival_s, index, ()))
        heapq.heapify(self._coming)
        self._start_s = clock.now_s()

    def _now_s(self) -> float:
        return self._clock.now_s() - self._start_s

    def run(self) -> Run:
        """Send every request at its time and step until the last one has ended.

        Raises:
            StepFailedError: A policy failed.
        """
        before = attrs.evolve(self._engine.totals)
        busy_s = 0.0
        while self._coming or self._sent:
            while self._coming and self._coming[0][0] <= self._now_s():
                self._send(*heapq.heappop(self._coming))
            if self._engine.has_work:
                start_s = self._now_s()
                self._step()
                busy_s += self._now_s() - start_s
            elif self._coming:
                self._wait(max(0.0, self._coming[0][0] - self._now_s()))
        totals = self._engine.totals
        records = tuple(self._records[index] for index in range(len(self._requests)))
        return Run(
            records=records,
            duration_s=self._now_s(),
            num_steps=totals.num_steps - before.num_steps,
            num_scheduled_tokens=totals.num_scheduled_tokens - before.num_scheduled_tokens,
            num_recomputed_tokens=totals.num_recomputed_tokens - before.num_recomputed_tokens,
            num_preemptions=totals.num_preempted - before.num_preempted,
            busy_s=(busy_s,),
        )

    def _send(self, sent_s: float, index: int, before: tuple[int, ...]) -> None:
        request = _greedy(self._prompts.request(index, before))
        try:
            slot = self._engine.add(request)
        except RequestError as error:
            if isinstance(error.__cause__, StepFailedError):  # the policy failed; the request was not refused
                raise error.__cause__ from None
            self._failed(index, sent_s, str(error))
            return
        self._sent[slot] = _Sent(index=index, prompt=request.prompt_token_ids, sent_s=sent_s)

    def _step(self) -> None:
        """Run one step; end outputs that have reached their length in the workload, which the engine does not know."""
        deltas = self._engine.step()
        now_s = self._now_s()
        ended = {end.slot: end for end in deltas.finished}
        for slot, num_tokens in zip(deltas.slots.tolist(), deltas.num_tokens.tolist(), strict=True):
            sent = self._sent.get(slot)
            if sent is None:
                continue
            if not sent.num_tokens:
                sent.first_token_s = now_s
            sent.num_tokens += num_tokens
            if self._token_times:
                sent.token_times_s += [now_s] * num_tokens
            request = self._requests[sent.index]
            if slot not in ended and sent.num_tokens >= request.num_output_tokens:
                end = self._engine.stop(request.request_id)
                if end is not None:
                    ended[slot] = end
        for slot, end in ended.items():
            self._end(self._sent.pop(slot), end, now_s)

    def _end(self, sent: _Sent, end: FinishedSequence, now_s: float) -> None:
        request = self._requests[sent.index]
        if end.finish_reason in (FinishReason.ERROR, FinishReason.INVALID):
            self._failed(sent.index, sent.sent_s, end.error or end.finish_reason.value)
            return
        num_tokens = min(sent.num_tokens, request.num_output_tokens)
        self._records[sent.index] = RequestRecord(
            request=request,
            sent_s=sent.sent_s,
            first_token_s=sent.first_token_s,
            finished_s=now_s,
            num_cached_tokens=end.num_cached_tokens,
            num_output_tokens=num_tokens,
            num_preemptions=end.num_preemptions,
            token_times_s=np.array(sent.token_times_s[:num_tokens]) if self._token_times else None,
        )
        tokens = (*sent.prompt, *end.token_ids[:num_tokens].tolist())
        self._follow(request, now_s, tokens)

    def _failed(self, index: int, sent_s: float, error: str) -> None:
        request = self._requests[index]
        self._records[index] = RequestRecord(
            request=request, sent_s=sent_s, first_token_s=math.nan, finished_s=math.nan, error=error
        )
        for follower in self._followers.get(request.request_id, ()):
            self._failed(follower, math.nan, f"not sent: {request.request_id} failed")

    def _follow(self, request: WorkloadRequest, now_s: float, tokens: tuple[int, ...]) -> None:
        for index in self._followers.get(request.request_id, ()):
            follower = self._requests[index]
            sent_s = max(follower.arrival_s, now_s + follower.think_s)
            heapq.heappush(self._coming, (sent_s, index, tokens if follower.continues else ()))


def pieces_of(workload: Workload, num_pieces: int) -> list[Workload]:
    """Return consecutive parts of a workload, each beginning at time 0. Pure.

    Prompts of different parts share no content.

    Args:
        workload: Workload without sessions.
        num_pieces: Number of parts, at most the number of requests.

    Raises:
        ConfigError: There are too few requests, or requests that follow others.
    """
    requests = workload.requests
    if any(request.after for request in requests):
        raise ConfigError(
            f'workload "{workload.name}": its requests follow each other, and cannot be cut into pieces to be run in turns.',
            hint="Take a workload that is drawn from a seed.",
        )
    if len(requests) < num_pieces:
        raise ConfigError(
            f'workload "{workload.name}": {len(requests)} requests are too few for {num_pieces} pieces.',
            hint="Ask for fewer with --seeds.",
        )
    length = len(requests) // num_pieces
    pieces = []
    for number in range(num_pieces):
        own = requests[number * length : (number + 1) * length]
        moved = tuple(attrs.evolve(one, arrival_s=one.arrival_s - own[0].arrival_s) for one in own)
        pieces.append(attrs.evolve(workload, requests=moved, seed=number))
    return pieces
