"""Faults of plugins: which are contained, how errors and values are shown in messages, how often a fault is logged, how long a call may take.

What clients and plugins give is shown in bounded time, memory and length.
"""

from __future__ import annotations

import enum
import functools
import itertools
import logging
import math
import signal
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Generic, TypeVar
from weakref import WeakSet

import attrs
import numpy as np

from trencadis.activity import ACTIVITY, MonitoredThread
from trencadis.clock import Clock, SystemClock
from trencadis.errors import did_you_mean
from trencadis.pauses import PAUSES, thread_wait_s

__all__ = [
    "MAX_OVERRUNS",
    "REST_S",
    "WINDOW_S",
    "CallMeter",
    "Fallback",
    "FaultLog",
    "SwitchedOff",
    "as_words",
    "members_for",
    "cut",
    "num_switched_off",
    "reraise_interrupt",
    "shown",
    "switched_off",
]

S = TypeVar("S")

_MAX_ARGUMENTS: Final = 8
_MAX_SAID: Final = 600
_MAX_LISTED: Final = 1200
_MAX_NAME: Final = 100
_OURS: Final = __name__.partition(".")[0]
_DESCRIBED: Final = (property, functools.cached_property, types.FunctionType, classmethod)
_MAX_FRAMES: Final = 24
_MAX_CHAIN: Final = 4
_MAX_KEYS: Final = 256
_LOG_EVERY_S: Final = 60.0

MAX_OVERRUNS: Final = 3
"""So many calls over their budget within :data:`WINDOW_S` have a component switched off."""

WINDOW_S: Final = 60.0
"""Engine clock, seconds."""

_AT_ONCE: Final = 10
"""A single call that takes so many budgets has its component switched off, too."""

REST_S: Final = 60.0
"""How long a component is off the first time, seconds of the engine's clock; each time twice as long as before, up to an hour."""

_MAX_REST_S: Final = 3600.0

_BASE_S: Final = 0.01
"""How old the readings of a thread's time on a processor, and of its wait for one, may be when a call begins, seconds."""


# ------------------------------------------------------------------------------------------------------ containment


def reraise_interrupt(error: BaseException) -> None:
    """Raise ``error`` again if a signal raised it, such as the user's Ctrl-C; anything else that a plugin raised the caller contains.

    Python runs the handlers of signals on the main thread only, and a Ctrl-C raises nothing where SIGINT is ignored, as in an engine's
    own process: any other ``KeyboardInterrupt``, and each ``SystemExit`` that no handler raised, is the plugin's.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        raise error
    if _is_from_handler(error):
        raise error


def _is_from_handler(error: BaseException) -> bool:
    """Return whether the handler of a signal is in an error's traceback."""
    found = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in found} - {None}
    return bool(codes) and any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


# -------------------------------------------------------------------------------------------------------- in words


def as_words(error: BaseException) -> str:
    """Return ``ValueError: what it says``, at most some 600 characters, in bounded time. Pure.

    For a member that a record does not have, the nearest name follows, or the names it has: see :func:`members_for`.

    Args:
        error: Error of a plugin; its arguments may be as large as they like.
    """
    near, listed = _members(error)
    return f"{_raised(error)} ({near or listed})" if listed else _raised(error)


def _raised(error: BaseException) -> str:
    kind = type(error)
    try:
        small = all(type(item) in (str, int, float, bool, type(None)) for item in error.args)
        plain = kind.__str__ in (BaseException.__str__, KeyError.__str__, OSError.__str__)
        text = str(error) if small or not plain else ", ".join(shown(item) for item in error.args[:_MAX_ARGUMENTS])
    except Exception:
        text = "its text cannot be read"
    return f"{kind.__name__}: {cut(text, _MAX_SAID)}" if text else kind.__name__


def members_for(error: BaseException) -> str:
    """Return the nearest name and all names there are, where a member of a record or a view of Trencadís does not exist; else nothing.

    An :class:`AttributeError` has the object: so the records themselves need no ``__getattr__``, which would make each read of a
    field five times as slow. Bounded; pure.

    Args:
        error: Any.
    """
    near, listed = _members(error)
    return f"{near[:1].upper()}{near[1:]} {listed}.".lstrip() if listed else ""


def _members(error: BaseException) -> tuple[str, str]:
    """Return ``did you mean "x"?`` and ``Record has: x, y``, or two empty texts."""
    if not isinstance(error, AttributeError) or not isinstance(error.name, str):
        return "", ""
    kind = type(error.obj)
    if kind.__module__.partition(".")[0] != _OURS:
        return "", ""
    named = [field.name for field in attrs.fields(kind)] if attrs.has(kind) else list(getattr(kind, "_fields", ()))
    for base in kind.__mro__[:-1]:
        named += [name for name, value in vars(base).items() if isinstance(value, _DESCRIBED) and value.__doc__]
    public = sorted({name for name in named if not name.startswith("_")})
    near = did_you_mean(cut(error.name, _MAX_NAME), public).strip()
    return (
        f"d{near[1:]}" if near else "",
        f"{kind.__name__} has: {cut(', '.join(public), _MAX_LISTED)}" if public else "",
    )


# ---------------------------------------------------------------------------------------------------------- logging


class FaultLog:
    """Logs faults that may come with every step: the first with its traceback, then one line a minute that counts. From any thread.

    Args:
        logger: Gets the lines.
        timer: Seconds of real time; for tests.
    """

    def __init__(self, logger: logging.Logger, *, timer: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._timer = timer
        self._lock = threading.Lock()
        self._logged: dict[tuple[str, str], _Logged] = {}

    def say(
        self, fault: str, message: str, *, error: BaseException | None = None, level: int = logging.WARNING
    ) -> None:
        """Log a fault, unless the same was logged within the last minute: then it is counted.

        Args:
            fault: Key of equal faults, beside the class of ``error``: component and method.
            message: Who did what.
            error: Error that was raised; its traceback follows the first line.
            level: Level of the line.
        """
        key, now_s = (fault, type(error).__name__), self._timer()
        with self._lock:
            known = self._logged.get(key)
            if known is None:
                if len(self._logged) >= _MAX_KEYS:
                    del self._logged[next(iter(self._logged))]
                self._logged[key] = _Logged(now_s)
            elif now_s - known.since_s < _LOG_EVERY_S:
                known.num_more += 1
                return
            else:
                message = f"{message} ({known.num_more + 1} times since this was logged last.)"
                known.since_s, known.num_more = now_s, 0
        if known is None and error is not None:
            message = f"{message}\n{_traceback(error)}"
        self._logger.log(level, "%s", message)


@attrs.define
class _Logged:
    since_s: float
    num_more: int = 0


def _traceback(error: BaseException) -> str:
    """Return a traceback with its causes; unlike ``traceback.format_exception`` it does not print whole arguments."""
    text = ""
    current: BaseException | None = error
    for _ in range(_MAX_CHAIN):
        if current is None:
            break
        frames = "".join(traceback.format_tb(current.__traceback__, -_MAX_FRAMES))
        members = members_for(current)
        said = f"{_raised(current)}\n{members}" if members else _raised(current)
        text = f"Traceback (most recent call last):\n{frames}{said}{text}"
        link = "\n\nThe above exception was the direct cause of the following exception:\n\n"
        if current.__cause__ is None:
            link = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)
        text = text if current is None else link + text
    return text.lstrip()


# ---------------------------------------------------------------------------------------------------------- budgets


@attrs.frozen(kw_only=True)
class SwitchedOff:
    """A component that is not called at the moment.

    Attributes:
        component: With its distribution.
        cause: Why it was switched off, in words.
        for_s: Until it is called again, seconds; infinity: it is not.
    """

    component: str
    cause: str
    for_s: float


_METERS: Final[WeakSet[CallMeter]] = WeakSet()
_COUNTED = [0]


def switched_off() -> tuple[SwitchedOff, ...]:
    """Return the components of this process that are off at the moment, by name."""
    found = (meter.off for meter in tuple(_METERS))
    return tuple(sorted((one for one in found if one is not None), key=lambda one: one.component))


def num_switched_off() -> int:
    """Return how often a component of this process was switched off."""
    return _COUNTED[0]


class CallMeter:
    """Measures the calls of one component, publishes which one is being called, so that a stall can be attributed, and says when it is off. One thread.

    A call over the budget is warned about, with the time that it took. Three such calls within a minute, or one that takes ten budgets,
    are too many: the component is off for a while, and then tried again. What counts is the time that the component itself
    took: processor time of its thread, and waiting that it chose; not that in which the whole process stood still, or the thread had no
    processor. Time is the engine's clock: real time where clients are served; a simulated clock stands still during a call, so that
    budgets change no simulation and no replay.

    Args:
        label: Names the component and its distribution.
        clock: The engine's; None: nothing is measured.
        budget_s: For one call, seconds; infinity: none.
        setting: Where the budget is set, for messages.
        log: For warnings.
        thread: Thread that calls; None: the engine's.
        num_forgiven: Calls over the budget that are only warned about: the first of a component that compiles when it is first used.
        max_overruns: So many calls over the budget within :data:`WINDOW_S` are too many.
        at_once: A call of more than so many budgets is too many.

    Attributes:
        budget_s: Limit of a call in seconds: callers compare, so that a call within it costs no more than reading the clock.
        is_off: Whether the component is off; :meth:`is_due` says whether it is time to try it again.
    """

    def __init__(
        self,
        label: str,
        *,
        clock: Clock | None = None,
        budget_s: float = math.inf,
        setting: str = "",
        log: FaultLog | None = None,
        thread: MonitoredThread | None = None,
        num_forgiven: int = 0,
        max_overruns: int = MAX_OVERRUNS,
        at_once: float = _AT_ONCE,
    ) -> None:
        self.budget_s = budget_s
        self._now_s = clock.now_s if clock is not None else float
        self._setting = setting
        self._log = log or FaultLog(logging.getLogger("trencadis.engine"))
        self._overruns_s: deque[float] = deque(maxlen=max_overruns)
        self._at_once = at_once
        self._num_forgiven = num_forgiven
        self._thread = thread or ACTIVITY.engine
        self._before = 0
        self.is_off = False
        self._cause, self._off_label, self._back_s, self._num_rests = "", "", math.inf, 0
        self._is_real = isinstance(clock, SystemClock)
        self._base_s = self._used_s = self._waited_s = -math.inf
        if self._is_real:
            PAUSES.watch()
        _METERS.add(self)
        self.rename(label)

    def rename(self, label: str) -> None:
        """Measure another component from now on."""
        self.label = label
        self._number = ACTIVITY.label(label)
        self._overruns_s.clear()

    def begin(self) -> float:
        """Note that the component is called; returns when, for :meth:`end`. Together 0.6 µs."""
        # Written out, as MonitoredThread.enter and leave: this is done for every call of a component.
        thread = self._thread
        words, place = thread.words, thread.place
        self._before = words[place]
        words[place] = self._number
        now_s = self._now_s()
        if self._is_real and now_s - self._base_s > _BASE_S:
            self._base_s, self._used_s, self._waited_s = now_s, time.thread_time(), thread_wait_s()
        return now_s

    def end(self, began_s: float) -> float:
        """Note that it has returned; returns the seconds that it took. A second call changes nothing."""
        thread = self._thread
        thread.words[thread.place] = self._before
        return self._now_s() - began_s

    def charged_s(self, took_s: float) -> float:
        """Return how many seconds of a call that has just ended are the component's own.

        Args:
            took_s: From :meth:`end`.
        """
        if not self._is_real:
            return took_s
        used_s, waited_s = time.thread_time() - self._used_s, thread_wait_s() - self._waited_s
        return min(took_s, max(used_s, took_s - waited_s - PAUSES.within(took_s)))

    def overran(self, method: str, took_s: float, *, num_budgets: float = 1) -> str:
        """Warn of a call that took longer than its budget; returns why the component is to be switched off, or an empty string.

        Args:
            method: That was called.
            took_s: Seconds.
            num_budgets: Number of budgets that this call may take.
        """
        budget_s = self.budget_s * num_budgets
        if took_s <= budget_s or (took_s := self.charged_s(took_s)) <= budget_s:
            return ""
        now_s = self._now_s()
        said = f"took {took_s:.3g} s in {method}(), over its budget of {budget_s:.3g} s ({self._setting})"
        is_forgiven, self._num_forgiven = self._num_forgiven > 0, self._num_forgiven - 1
        if not is_forgiven:
            self._overruns_s.append(now_s)
        is_full = len(self._overruns_s) == self._overruns_s.maxlen and now_s - self._overruns_s[0] <= WINDOW_S
        if is_forgiven or (took_s <= self._at_once * budget_s and not is_full):
            self._log.say(f"{self.label}.{method} is slow", f"{self.label} {said}; steps wait for it.")
            return ""
        self._overruns_s.clear()
        often = f"{said}, {self._overruns_s.maxlen} times within {WINDOW_S:g} s"
        return said if took_s > self._at_once * budget_s else often

    # ---------------------------------------------------------------------------------------------------- off

    def switch_off(self, cause: str, *, for_good: bool = False) -> str:
        """Note that the component is not called for a while; returns for how long, in words.

        Args:
            cause: Why it is switched off, in words.
            for_good: It is not tried again.
        """
        rest_s = math.inf if for_good else min(REST_S * 2**self._num_rests, _MAX_REST_S)
        self._num_rests += 1
        self.is_off, self._cause, self._off_label, self._back_s = True, cause, self.label, self._now_s() + rest_s
        _COUNTED[0] += 1
        return "for good" if for_good else f"for {rest_s:g} s"

    @property
    def is_due(self) -> bool:
        """Whether the component is off and it is time to try it again."""
        return self.is_off and self._now_s() >= self._back_s

    def switch_on(self) -> None:
        """Note that the component is called again."""
        self.is_off, self._back_s = False, math.inf
        self._overruns_s.clear()

    @property
    def off(self) -> SwitchedOff | None:
        """The component that is off, or None."""
        if not self.is_off:
            return None
        return SwitchedOff(component=self._off_label, cause=self._cause, for_s=self._back_s - self._now_s())


# ------------------------------------------------------------------------------------------------------ values in messages

_MAX_ITEMS: Final = 8
_MAX_DEPTH: Final = 3
_MAX_TEXT: Final = 120
_MAX_SHOWN: Final = 300


def shown(value: object) -> str:
    """Return a value of a client or a plugin for a message: some 300 characters at most, in bounded time and memory. Pure.

    Of a long sequence the first items and the number of all are shown; of objects of unknown classes the class alone, since their
    ``__repr__`` may do anything.
    """
    try:
        return cut(_shown(value, _MAX_DEPTH), _MAX_SHOWN)
    except Exception:  # a class whose attributes raise
        return f"<{type(value).__name__}>"


def cut(text: str, most: int) -> str:
    """Return a text; of one that is longer than ``most`` characters its beginning and how many it has. Pure."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def _shown(value: object, depth: int) -> str:
    kind = type(value)
    if value is None or kind in (bool, float, complex):
        return repr(value)
    if kind is int:
        return _shown_int(value)  # type: ignore[arg-type] # told by its exact class
    if kind is str or kind is bytes:
        return _shown_text(value)  # type: ignore[arg-type] # the same
    if isinstance(value, type):
        return value.__qualname__
    if isinstance(value, enum.Enum):
        return f"{kind.__name__}.{value.name}"
    if isinstance(value, Path):
        return _shown_text(str(value))
    if isinstance(value, np.generic):
        return _shown(value.item(), depth)
    if isinstance(value, np.ndarray):
        return _shown_array(value, depth)
    if not depth:
        return "…"
    return _shown_items(value, depth - 1)


def _shown_int(value: int) -> str:
    bits = value.bit_length()
    return str(value) if bits <= 256 else f"<int of {bits} bits>"


def _shown_text(value: str | bytes) -> str:
    if len(value) <= _MAX_TEXT:
        return repr(value)
    return f"{value[:_MAX_TEXT]!r}… ({len(value)} {'characters' if isinstance(value, str) else 'bytes'})"


def _shown_array(value: np.ndarray[Any, Any], depth: int) -> str:
    if value.ndim == 1 and value.size <= _MAX_ITEMS:
        return _shown(value.tolist(), max(1, depth))
    first = ", ".join(_shown(item, 0) for item in itertools.islice(value.flat, _MAX_ITEMS))
    return f"[{first}{', …' if value.size > _MAX_ITEMS else ''}] (shape {value.shape}, {value.dtype})"


def _shown_items(value: Any, depth: int) -> str:
    kind = type(value)
    if kind in (list, tuple, set, frozenset, deque, range):
        left, right = "()" if kind is tuple else "{}" if kind in (set, frozenset) else "[]"
        return left + _listed((_shown(item, depth) for item in itertools.islice(value, _MAX_ITEMS)), len(value)) + right
    if kind is dict:
        pairs = itertools.islice(value.items(), _MAX_ITEMS)
        return "{" + _listed((f"{_shown(key, depth)}: {_shown(item, depth)}" for key, item in pairs), len(value)) + "}"
    names = getattr(kind, "__struct_fields__", None) or getattr(kind, "_fields", None)
    if attrs.has(kind):
        names = [field.name for field in attrs.fields(kind)]
    if names and kind.__module__.partition(".")[0] == "trencadis":
        fields = (f"{name}={_shown(getattr(value, name), depth)}" for name in names[:_MAX_ITEMS])
        return f"{kind.__name__}({_listed(fields, len(names))})"
    return f"<{kind.__qualname__}>"


def _listed(items: Iterable[str], number: int) -> str:
    return ", ".join(items) + (f", … {number} in all" if number > _MAX_ITEMS else "")


@attrs.frozen
class Fallback(Generic[S]):
    """Makes what takes over from a component.

    Attributes:
        label: Names the component and its distribution in messages.
        make: Factory of the component.
        remake: Makes the component anew that it takes over from; None: that is not tried again.
    """

    label: str
    make: Callable[[], S]
    remake: Callable[[], S] | None = None

    def __call__(self) -> S:
        """Return a new one."""
        return self.make()
