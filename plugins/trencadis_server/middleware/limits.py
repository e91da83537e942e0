"""Admission control: limits of requests, and of prompt tokens of requests that have no token yet.

One caller has at most a share of both, so that its requests do not keep all others out.

    hold ▶ waiting (its prompt tokens count) ─first_token▶ running ─the block ends▶ gone

The ``with`` block subtracts both counts, so they cannot leak. The suggested wait of a refusal is computed from how fast
requests finished recently.
"""

from __future__ import annotations

from collections import Counter, deque
from types import TracebackType
from typing import Self

import attrs

from trencadis.clock import Clock
from trencadis.errors import InvalidRequestError
from trencadis_server.errors import TooBusyError

__all__ = ["MAX_RETRY_AFTER_S", "MIN_RETRY_AFTER_S", "AdmissionControl", "DrainRate"]

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0

_MAX_QUOTED = 100

_WINDOW_S = 30.0
"""Time that the drain rate covers, seconds."""


class DrainRate:
    """Rate at which work is finished, over the last 30 s.

    Args:
        clock: Clock of the server.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._busy_since_s = clock.now_s()

    def restart(self) -> None:
        """Drop the past rate after an idle time."""
        self._left.clear()
        self._sum = 0
        self._busy_since_s = self._clock.now_s()

    def note(self, amount: int) -> None:
        """Record an amount of finished work."""
        self._left.append((self._clock.now_s(), amount))
        self._sum += amount

    def seconds_for(self, amount: int) -> float:
        """Return the predicted time for an amount, 1 .. 60 s; without measurements, the time since work began."""
        now_s = self._clock.now_s()
        while self._left and self._left[0][0] < now_s - _WINDOW_S:
            self._sum -= self._left.popleft()[1]
        span_s = now_s - max(self._busy_since_s, now_s - _WINDOW_S)
        estimate_s = amount * span_s / self._sum if self._sum else span_s
        return min(max(estimate_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)


class AdmissionControl:
    """Enforces the limits; the :class:`trencadis_server.context.Admission` of a server. Event loop only.

    Args:
        max_requests: Maximum number of engine requests at once.
        max_waiting_tokens: Maximum number of prompt tokens of requests without a token.
        clock: Clock of the drain rates.
        caller_share: Fraction of both limits that one caller may have, greater than 0, at most 1.

    Attributes:
        max_requests: Maximum number of engine requests at once.
        max_waiting_tokens: Maximum number of prompt tokens of requests without a token.
        num_requests: Engine requests held now.
        num_waiting_tokens: Prompt tokens of held requests without a token.
    """

    def __init__(self, *, max_requests: int, max_waiting_tokens: int, clock: Clock, caller_share: float = 1.0) -> None:
        self.max_requests = max_requests
        self.max_waiting_tokens = max_waiting_tokens
        self.num_requests = 0
        self.num_waiting_tokens = 0
        self._share = caller_share
        self._requests_limit = _Share("requests", "max_requests", max_requests, caller_share)
        self._tokens_limit = _Share("waiting prompt tokens", "max_waiting_tokens", max_waiting_tokens, caller_share)
        self._requests_of: Counter[str] = Counter()
        self._waiting_tokens_of: Counter[str] = Counter()
        self._requests_rate = DrainRate(clock)
        self._tokens_rate = DrainRate(clock)

    def hold(self, num_prompt_tokens: int, num_requests: int = 1, *, caller: str = "") -> AdmissionHold:
        """Return a place, to be acquired by ``with``; see :class:`trencadis_server.context.Admission`.

        Raises:
            TooBusyError: On entering: a limit is reached.
            InvalidRequestError: On entering: the request would not fit even an empty server.
        """
        return AdmissionHold(self, num_prompt_tokens, num_requests, caller)

    def enter(self, num_prompt_tokens: int, num_requests: int, caller: str) -> None:
        """Acquire a place; raises the errors of :meth:`hold`."""
        self.check(num_prompt_tokens, num_requests)
        excess = self.num_requests + num_requests - self.max_requests
        if excess > 0:
            this = f"; this request counts as {num_requests}" if num_requests > 1 else ""
            raise TooBusyError(
                f"The server has {self.num_requests} requests and takes {self.max_requests} at once (server.max_requests)"
                f"{this}.",
                retry_after_s=self._requests_rate.seconds_for(excess),
            )
        excess = self.num_waiting_tokens + num_prompt_tokens - self.max_waiting_tokens
        if excess > 0:
            raise TooBusyError(
                f"{self.num_waiting_tokens} prompt tokens wait, and the server lets {self.max_waiting_tokens} wait "
                f"(server.max_waiting_tokens); this request has {num_prompt_tokens}.",
                retry_after_s=self._tokens_rate.seconds_for(excess),
            )
        if self._share < 1:
            self._check_share(num_prompt_tokens, num_requests, caller)
        if not self.num_requests:
            self._requests_rate.restart()
        if not self.num_waiting_tokens:
            self._tokens_rate.restart()
        self.num_requests += num_requests
        self.num_waiting_tokens += num_prompt_tokens
        self._requests_of[caller] += num_requests
        self._waiting_tokens_of[caller] += num_prompt_tokens

    def check(self, num_prompt_tokens: int, num_requests: int) -> None:
        """Refuse a request that would not fit an empty server; see :class:`trencadis_server.context.Admission`.

        Raises:
            InvalidRequestError: The request is larger than a limit, or than one caller's share of it.
        """
        if num_requests > self.max_requests:
            raise InvalidRequestError(
                f"{num_requests} texts in one request, each choice of each prompt being one: "
                f"the server takes {self.max_requests} at once (server.max_requests).",
                hint="Ask for them in several requests.",
            )
        if num_prompt_tokens > self.max_waiting_tokens:
            raise InvalidRequestError(
                f"{num_prompt_tokens} prompt tokens in one request: the server lets {self.max_waiting_tokens} wait "
                "(server.max_waiting_tokens).",
                hint="Send fewer prompts, or shorter ones, in one request.",
            )
        for asked, limit in ((num_requests, self._requests_limit), (num_prompt_tokens, self._tokens_limit)):
            if asked > limit.cap:
                raise InvalidRequestError(
                    f"{asked} {limit.what} in one request: one API key may have {limit}.",
                    hint="Ask for less in one request.",
                )

    def stop_waiting(self, num_prompt_tokens: int, caller: str) -> None:
        """Subtract prompt tokens that were computed."""
        self.num_waiting_tokens -= num_prompt_tokens
        self._waiting_tokens_of[caller] -= num_prompt_tokens
        self._tokens_rate.note(num_prompt_tokens)

    def leave(self, num_requests: int, caller: str) -> None:
        """Subtract finished requests."""
        self.num_requests -= num_requests
        self._requests_of[caller] -= num_requests
        self._requests_rate.note(num_requests)

    def _check_share(self, num_prompt_tokens: int, num_requests: int, caller: str) -> None:
        """Refuse a caller above its share, to leave room for others.

        Raises:
            TooBusyError: The caller has its share.
        """
        for limit, held, asked, rate in (
            (self._requests_limit, self._requests_of, num_requests, self._requests_rate),
            (self._tokens_limit, self._waiting_tokens_of, num_prompt_tokens, self._tokens_rate),
        ):
            excess = held[caller] + asked - limit.cap
            if excess > 0:
                raise TooBusyError(
                    f"The API key {caller[:_MAX_QUOTED]!a} has {held[caller]} {limit.what} and may have {limit}; this request has "
                    f"{asked}.",
                    retry_after_s=rate.seconds_for(excess),
                )


@attrs.frozen
class _Share:
    """One caller's share of a limit.

    Attributes:
        what: Name of the counted items, for messages.
        setting: Name of the setting.
        most: Value of the setting.
        share: Fraction for one caller, greater than 0, at most 1.
    """

    what: str
    setting: str
    most: int
    share: float

    @property
    def cap(self) -> int:
        """Maximum for one caller."""
        return max(1, int(self.most * self.share))

    def __str__(self) -> str:
        """Return the cap and where it comes from."""
        return f"{self.cap} at once (server.key_share = {self.share:g} of server.{self.setting} = {self.most})"


class AdmissionHold:
    """One place; a context manager that is entered once.

    Args:
        admission: Admission control whose counts it changes.
        num_prompt_tokens: Prompt tokens of all its requests together.
        num_requests: Number of engine requests.
        caller: Name of the API key.
    """

    def __init__(self, admission: AdmissionControl, num_prompt_tokens: int, num_requests: int, caller: str) -> None:
        self._admission = admission
        self._caller = caller
        self._num_prompt_tokens = num_prompt_tokens
        self._num_requests = num_requests
        self._waits = False

    def first_token(self) -> None:
        """Mark the prompts as computed; a second call does nothing."""
        if self._waits:
            self._waits = False
            self._admission.stop_waiting(self._num_prompt_tokens, self._caller)

    def __enter__(self) -> Self:
        self._admission.enter(self._num_prompt_tokens, self._num_requests, self._caller)
        self._waits = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.first_token()
        self._admission.leave(self._num_requests, self._caller)
