"""Tables of a workload file, and the requests that they describe.

[trace] or num_requests ▶ [lengths] ▶ [tenants] [priorities] [targets] ▶ [prefixes] ▶ [arrivals] ▶ [sessions] ▶ limit
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import attrs
import numpy as np
from attrs.validators import ge

from trencadis.errors import ConfigError, ConfigValueError
from trencadis.records import Int64Array
from trencadis_tools.workloads.arrivals import Arrivals, arrival_times, stretch
from trencadis_tools.workloads.distributions import Distribution
from trencadis_tools.workloads.draws import Stream, uniforms
from trencadis_tools.workloads.sessions import Sessions, session_calls
from trencadis_tools.workloads.terms import (
    Prefixes,
    Priorities,
    Targets,
    Tenants,
    with_prefixes,
    with_priorities,
    with_targets,
    with_tenants,
)
from trencadis_tools.workloads.traces import Trace, TraceSource, read_trace
from trencadis_tools.workloads.workload import Workload, WorkloadRequest

__all__ = ["Lengths", "Recipe"]

Length = Distribution | Literal["recorded", "resampled"]


@attrs.frozen(kw_only=True)
class Lengths:
    """Table ``[lengths]``: how long prompts and answers are.

    Attributes:
        prompt: Prompt length, tokens: a distribution or a number; recorded: that of the trace; resampled: that of a request drawn
            from the trace.
        output: Length of the answer, tokens, likewise. If both are resampled, they come from the same request.
        max_tokens: ``max_tokens`` of every request, as policies see it; 0: that of the trace, else the longest answer of the
            workload.
    """

    prompt: Length = "recorded"
    output: Length = "recorded"
    max_tokens: int = attrs.field(default=0, validator=ge(0))


@attrs.frozen(kw_only=True)
class Recipe:
    """Top level of a workload file, where the key ``base`` names another file to extend.

    Attributes:
        name: Name in tables and records; default: that of the file.
        seed: Seed of all draws.
        num_requests: Number of requests or sessions to draw; 0: those of the trace.
        limit: Number of requests taken from the start, including those of sessions; 0: all. The rate of recorded times is that of
            these requests.
        trace: Source of recorded requests.
        arrivals: Arrival times.
        lengths: Lengths of prompts and answers.
        tenants: Tenants of the requests.
        priorities: Priorities of the requests.
        targets: Latency targets of the requests.
        prefixes: Shared prefixes of prompts.
        sessions: Follow-up requests of each session; None: none.
    """

    name: str
    seed: int = attrs.field(default=0, validator=ge(0))
    num_requests: int = attrs.field(default=0, validator=ge(0))
    limit: int = attrs.field(default=0, validator=ge(0))
    trace: TraceSource = attrs.field(factory=TraceSource)
    arrivals: Arrivals = attrs.field(factory=Arrivals)
    lengths: Lengths = attrs.field(factory=Lengths)
    tenants: Tenants = attrs.field(factory=Tenants)
    priorities: Priorities = attrs.field(factory=Priorities)
    targets: Targets = attrs.field(factory=Targets)
    prefixes: Prefixes = attrs.field(factory=Prefixes)
    sessions: Sessions | None = None

    def make(self) -> Workload:
        """Return the workload, equal on every machine.

        Raises:
            ConfigError: The trace cannot be read, or tables contradict each other or the trace.
        """
        trace = read_trace(self.trace) if self.trace.file else None
        requests = self._sized(trace)
        requests = self._owned(requests)
        if self.sessions is None:
            # Before times are stretched, since the rate is that of the requests kept.
            requests = requests[: self.limit or None]
        requests = self._timed(requests, has_times=trace is not None and trace.has_times)
        if self.sessions is not None:
            requests = self._with_sessions(requests, self.sessions)
        requests.sort(key=lambda request: request.arrival_s)
        block_tokens = self.prefixes.tokens or (trace.block_tokens if trace else 16)
        requests = requests[: self.limit or None]
        return Workload(name=self.name, requests=tuple(requests), block_tokens=block_tokens, seed=self.seed)

    # ---------------------------------------------------------------------------------------------- lengths

    def _sized(self, trace: Trace | None) -> list[WorkloadRequest]:
        """Return requests with lengths that are recorded, resampled from the trace, or drawn."""
        recorded = trace.requests if trace else []
        if trace is None or self.num_requests:
            count = self.num_requests
            if not count:
                raise self._wrong("names no [trace] file and num_requests = 0.", "Say one of the two.")
            self._check_drawn_from(trace)
            requests = [
                WorkloadRequest(request_id=str(index), arrival_s=0.0, num_prompt_tokens=1, num_output_tokens=1)
                for index in range(count)
            ]
        else:
            requests = recorded
            if self.lengths.prompt != "recorded" and any(one.after or one.block_ids for one in requests):
                raise self._wrong(
                    f"draws prompts, but requests of {self.trace.file} share blocks or go on from each other.",
                    "Ignore those columns of the trace, or leave lengths.prompt recorded.",
                )
            if self.lengths.output != "recorded" and any(one.continues for one in requests):
                raise self._wrong(
                    f"draws answers, but prompts of {self.trace.file} contain the recorded ones.",
                    "Ignore the columns of sessions, or leave lengths.output recorded.",
                )
        if trace and not trace.has_outputs and not isinstance(self.lengths.output, Distribution):
            raise self._wrong(
                f"takes answers from {self.trace.file}, which does not tell how long they were.",
                "Say lengths.output, such as { mean = 200 }.",
            )
        prompts = self._lengths(self.lengths.prompt, Stream.PROMPTS, len(requests), recorded, "num_prompt_tokens")
        outputs = self._lengths(self.lengths.output, Stream.OUTPUTS, len(requests), recorded, "num_output_tokens")
        if prompts is None and outputs is None and not self.lengths.max_tokens:
            return requests
        made = []
        for index, one in enumerate(requests):
            made.append(
                attrs.evolve(
                    one,
                    num_prompt_tokens=one.num_prompt_tokens if prompts is None else int(prompts[index]),
                    num_output_tokens=one.num_output_tokens if outputs is None else int(outputs[index]),
                    max_tokens=self.lengths.max_tokens or one.max_tokens,
                )
            )
        return made

    def _check_drawn_from(self, trace: Trace | None) -> None:
        """Refuse recorded or resampled lengths without a trace, or with another number of requests than it has."""
        for key in ("prompt", "output"):
            length = getattr(self.lengths, key)
            if length == "recorded" or (length == "resampled" and trace is None):
                raise self._wrong(
                    f'draws {self.num_requests} requests, but lengths.{key} = "{length}" takes them from '
                    f"{'the requests of the trace as they are' if trace else 'a trace, and there is none'}.",
                    'Say a distribution, such as { kind = "lognormal", mean = 1000, cv = 1.2 }'
                    + (', or "resampled".' if trace else "."),
                )

    def _lengths(
        self, length: Length, stream: Stream, num: int, recorded: Sequence[WorkloadRequest], field: str
    ) -> Int64Array | None:
        """Return drawn lengths; None for recorded ones."""
        if isinstance(length, Distribution):
            # The third key is the number of the call in a session; 0 for requests without one.
            return length.draw_tokens(self.seed, stream, np.arange(num), 0)
        if length == "recorded":
            return None
        drawn = (uniforms(self.seed, Stream.KEPT, np.arange(num)) * len(recorded)).astype(np.int64)
        return np.array([getattr(one, field) for one in recorded], np.int64)[drawn]

    # ---------------------------------------------------------------------------------------------- who, and what is shared

    def _owned(self, requests: list[WorkloadRequest]) -> list[WorkloadRequest]:
        """Return the requests with tenants, priorities, targets and prefixes."""
        drawn = (
            ("tenants", "[tenants]", self.tenants.num, any(one.tenant != "default" for one in requests)),
            ("priorities", "[priorities]", self.priorities.shares, any(one.priority for one in requests)),
            ("prefixes", "[prefixes]", self.prefixes.tokens, any(one.block_ids for one in requests)),
        )
        for what, table, is_asked, is_told in drawn:
            if is_asked and is_told:
                raise self._wrong(
                    f"draws {what}, but {self.trace.file} tells {'what prompts share' if what == 'prefixes' else 'them'}.",
                    f"Ignore its column in [trace], or leave {table} out.",
                )
        if self.tenants.num:
            requests = with_tenants(requests, self.tenants, seed=self.seed)
        if self.priorities.shares:
            requests = with_priorities(requests, self.priorities, seed=self.seed)
        if self.targets != Targets():
            requests = with_targets(requests, self.targets)
        if self.prefixes.tokens:
            requests = with_prefixes(requests, self.prefixes, seed=self.seed)
        return requests

    # ---------------------------------------------------------------------------------------------- when

    def _timed(self, requests: list[WorkloadRequest], *, has_times: bool) -> list[WorkloadRequest]:
        """Return the requests with arrival times; followers arrive with the first request of their chain."""
        keeps_times = has_times and not self.num_requests
        if self.arrivals.times == "recorded" and not keeps_times:
            raise self._wrong('says arrivals.times = "recorded", but there are none.', "Say a rate, or rate = inf.")
        roots = [one for one in requests if not one.after]
        if self.arrivals.times != "drawn" and (keeps_times or not self.arrivals.rate):
            if not keeps_times and not self.trace.file:
                raise self._wrong("says no [arrivals] rate.", 'Say how many a second, or rate = inf for "all at once".')
            self._check_pattern_unused()
            factor = stretch([one.arrival_s for one in roots], self.arrivals.rate)
            return [attrs.evolve(one, arrival_s=one.arrival_s * factor) for one in requests]
        times = arrival_times(self.arrivals, self.seed, len(roots)).tolist()
        began = {one.request_id: time_s for one, time_s in zip(roots, times, strict=True)}
        for one in requests:
            if one.after:
                began[one.request_id] = began[one.after]
        return [attrs.evolve(one, arrival_s=began[one.request_id]) for one in requests]

    def _check_pattern_unused(self) -> None:
        """Refuse settings of drawn times if times are recorded, since they would be ignored."""
        plain = Arrivals(times=self.arrivals.times, rate=self.arrivals.rate)
        if self.arrivals != plain:
            raise self._wrong(
                "says how times are drawn, but takes those of the trace.",
                'Say arrivals.times = "drawn", or leave that out.',
            )

    def _with_sessions(self, requests: Sequence[WorkloadRequest], sessions: Sessions) -> list[WorkloadRequest]:
        """Return the requests, each with the follow-up requests of its session."""
        if any(one.session for one in requests):
            raise self._wrong(
                f"describes [sessions], but {self.trace.file} tells them.",
                "Ignore its column in [trace], or leave the table out.",
            )
        if not isinstance(self.lengths.output, Distribution):
            raise self._wrong(
                "describes [sessions], whose later answers have no length.", "Say lengths.output as a distribution."
            )
        return [
            call
            for index, one in enumerate(requests)
            for call in session_calls(sessions, one, self.lengths.output, seed=self.seed, index=index)
        ]

    def _wrong(self, what: str, hint: str) -> ConfigError:
        return ConfigValueError(f"workload {self.name} {what}", hint=hint)
