"""What the engine of a process is doing right now, in memory that its parent process can read even while the engine hangs.

    engine   ACTIVITY.begin(FORWARD)    ACTIVITY.engine.enter(label) … leave      a few stores to memory each
                    │
               shared memory
                    │
    parent   ActivityView.read() ▶ "step 8123 in backend.forward, calling scheduling policy X of package Y 1.2"

An engine in the process of its user writes to memory of its own: the code is the same, and only its own process reads it.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import tempfile
import threading
from typing import Final

import attrs

__all__ = ["ACTIVITY", "Activity", "ActivityReading", "ActivityView", "EnginePhase", "MonitoredThread"]

_BEAT: Final = 0
_STEP: Final = 1
_PHASE: Final = 2
_SLOW_STEP: Final = 3
_THREADS: Final = 4
"""Places of 8 bytes: the components that two threads are calling, from here on."""
_DONE: Final = 6
_TOTAL: Final = 7
_PART: Final = 8
"""The label of the part of a long phase that runs, such as reading weights."""

_THREAD_NAMES: Final = "engine", "device"
_LABELS: Final = 72
"""First byte of the labels."""

_LABEL_BYTES: Final = 256
_MAX_LABELS: Final = 255
_LENGTH: Final = struct.Struct("<H")
_SIZE: Final = _LABELS + (1 + _MAX_LABELS) * _LABEL_BYTES
_NONE: Final = 0

_DECAY: Final = 0.99
"""Factor by which the slow step decays with each step: after 70 faster ones half of it is left."""


class EnginePhase(enum.IntEnum):
    """What an engine does; the names are read by operators."""

    STARTING = 0
    LOADING = 1
    COMPILING = 2
    IDLE = 3
    REQUESTS = 4
    SCHEDULING = 5
    FORWARD = 6
    COMMITTING = 7
    SENDING = 8
    CLOSING = 9
    RESTARTING = 10

    @property
    def text(self) -> str:
        """The phase as messages name it."""
        return "backend.forward" if self is EnginePhase.FORWARD else self.name.lower()

    @property
    def has_no_limit(self) -> bool:
        """Whether it may rightly take minutes without a sign of progress."""
        return self in _WITHOUT_LIMIT


_WITHOUT_LIMIT: Final = frozenset(
    {EnginePhase.STARTING, EnginePhase.LOADING, EnginePhase.COMPILING, EnginePhase.CLOSING, EnginePhase.RESTARTING}
)


class MonitoredThread:
    """Notes which component one thread is calling. Calls may nest: give :meth:`leave` what :meth:`enter` returned.

    Args:
        place: Place of the thread in the memory.

    Attributes:
        words: The memory; another one after :meth:`attach`.
    """

    __slots__ = ("place", "words")

    def __init__(self, place: int) -> None:
        self.place = place
        self.words: memoryview

    def attach(self, words: memoryview) -> None:
        """Write to this memory from now on."""
        self.words = words

    def enter(self, label: int) -> int:
        """Note that a component is called; 0.1 µs.

        Args:
            label: From :meth:`Activity.label`.

        Returns:
            The label that was noted before, for :meth:`leave`.
        """
        words, place = self.words, self.place
        before: int = words[place]
        words[place] = label
        return before

    def leave(self, before: int = _NONE) -> None:
        """Note that the component has returned; 0.1 µs."""
        self.words[self.place] = before


class Activity:
    """Written by an engine: the entry of each monitored thread by that thread, everything else by the engine's.

    Attributes:
        engine: Calls on the engine's thread: scheduling, eviction, bucketing, drafts, observers.
        device: Calls on the thread of the backend: the backend, samplers, processors.
    """

    def __init__(self) -> None:
        self.engine, self.device = threads = [
            MonitoredThread(_THREADS + number) for number in range(len(_THREAD_NAMES))
        ]
        self._threads = threads
        self._labels: dict[str, int] = {}
        self._beat = 0
        self._slow_step_s = 0.0
        self._attach(memoryview(bytearray(_SIZE)))

    def share(self, file: int) -> None:
        """Write to the memory of an :class:`ActivityView` from now on.

        Args:
            file: The view's.
        """
        shared = memoryview(mmap.mmap(file, _SIZE))
        shared[:] = self._bytes
        self._attach(shared)

    def label(self, text: str) -> int:
        """Return the number of a component's name, for :meth:`MonitoredThread.enter`; the same text has the same number.

        Call it when a component is built. Cut to 250 bytes; 0, which names nothing, once there are 255 names.
        """
        number = self._labels.get(text, _NONE)
        if not number and len(self._labels) < _MAX_LABELS:
            number = self._labels[text] = 1 + len(self._labels)
            _write_label(self._bytes, number, text)
        return number

    def begin(self, phase: EnginePhase) -> None:
        """Note another phase, which is progress; 0.1 µs."""
        words = self._words
        words[_PHASE] = phase
        self._beat = beat = self._beat + 1
        words[_BEAT] = beat

    @property
    def num_beats(self) -> int:
        """Signs of progress so far."""
        return self._beat

    def advance(self, done: int, total: int | None = None) -> None:
        """Note how much of a long phase is done, and how much there is, if that is known; progress as well."""
        words = self._words
        words[_DONE], words[_TOTAL] = done, total or 0
        self.beat()

    def begin_part(self, text: str) -> None:
        """Note which part of a long phase begins, such as ``weights``; progress as well."""
        self._words[_PART] = self.label(text)
        self.beat()

    def read(self) -> ActivityReading:
        """Return what is noted, for the process of the engine itself. From any thread."""
        return _reading(self._bytes)

    def beat(self) -> None:
        """Note progress within a phase."""
        self._beat = beat = self._beat + 1
        self._words[_BEAT] = beat

    def begin_step(self, step: int, phase: EnginePhase) -> None:
        """Note which step is waited for, and another phase."""
        words = self._words
        words[_STEP], words[_PHASE] = step, phase
        self._beat = beat = self._beat + 1
        words[_BEAT] = beat

    def end_step(self, phase: EnginePhase, *, took_s: float | None) -> None:
        """Note another phase, and how long the step before it took: later ones may take many times as long.

        Args:
            phase: That begins.
            took_s: Duration, seconds; None: the step compiled something, which says nothing about later ones.
        """
        if took_s is not None:
            self._slow_step_s = slow_s = max(took_s, self._slow_step_s * _DECAY)
            self._floats[_SLOW_STEP] = slow_s
        words = self._words
        words[_PHASE] = phase
        self._beat = beat = self._beat + 1
        words[_BEAT] = beat

    def _attach(self, memory: memoryview) -> None:
        self._bytes = memory
        self._words = memory[:_LABELS].cast("q")
        self._floats = memory[:_LABELS].cast("d")
        for thread in self._threads:
            thread.attach(self._words)


ACTIVITY: Final = Activity()
"""The activity of this process."""


@attrs.frozen(kw_only=True)
class ActivityReading:
    """What an engine did at one moment.

    Attributes:
        beat: Changes with each sign of progress.
        step: The last step that was waited for.
        phase: Phase that the thread is in.
        done: How much of a long phase is done, such as buckets.
        total: How much there is; 0 if that is not known.
        part: The part of a long phase that runs, or the last one, such as ``weights``; empty if none was named.
        calls: Names of the components that are being called, the engine's thread first.
        slow_step_s: About the longest of the recent steps, seconds.
    """

    beat: int = 0
    step: int = 0
    phase: EnginePhase = EnginePhase.STARTING
    done: int = 0
    total: int = 0
    part: str = ""
    calls: tuple[str, ...] = ()
    slow_step_s: float = 0.0

    @property
    def called(self) -> str:
        """The components that are being called: `` while X was being called``, or nothing."""
        return f" while {' and '.join(self.calls)} was being called" if self.calls else ""


class ActivityView:
    """The parent's side: memory for one engine. Any thread may read.

    Attributes:
        file: To be inherited by the engine's process, and given to :meth:`Activity.share` there.
    """

    def __init__(self) -> None:
        # Never a file on a disk: a store to it would wait for the disk whenever the page is written back.
        if hasattr(os, "memfd_create"):
            self.file = os.memfd_create("trencadis-activity")
        else:
            self.file, path = tempfile.mkstemp(prefix="trencadis-")
            os.unlink(path)
        os.ftruncate(self.file, _SIZE)
        self._memory = mmap.mmap(self.file, _SIZE, prot=mmap.PROT_READ)
        self._last: ActivityReading | None = None
        self._lock = threading.Lock()

    def read(self) -> ActivityReading:
        """Return what the engine does now; the last that it did, once it has ended or the view is closed."""
        with self._lock:
            return self._last or _reading(self._memory)

    def close(self) -> None:
        """Give the memory back, which holds a descriptor of its own; may be called twice."""
        with self._lock:
            self._last = self._last or _reading(self._memory)
            self._memory.close()
        self.close_file()

    def close_file(self) -> None:
        """Close the file, which the engine's process has inherited by now; the memory can still be read."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def _reading(memory: mmap.mmap | memoryview) -> ActivityReading:
    words = struct.unpack_from(f"={_LABELS // 8}q", memory)
    try:
        phase = EnginePhase(words[_PHASE])
    except ValueError:  # another component wrote over it
        phase = EnginePhase.STARTING
    labels = [_read_label(memory, number) for number in words[_THREADS:_DONE] if 0 < number <= _MAX_LABELS]
    return ActivityReading(
        beat=words[_BEAT],
        step=words[_STEP],
        phase=phase,
        done=words[_DONE],
        total=words[_TOTAL],
        part=_read_label(memory, words[_PART]) if 0 < words[_PART] <= _MAX_LABELS else "",
        calls=tuple(labels),
        slow_step_s=struct.unpack_from("=d", memory, 8 * _SLOW_STEP)[0],
    )


def _write_label(memory: memoryview, number: int, text: str) -> None:
    data = text.encode("utf-8", "replace")[: _LABEL_BYTES - _LENGTH.size - 4]
    start = _LABELS + number * _LABEL_BYTES
    _LENGTH.pack_into(memory, start, len(data))
    start += _LENGTH.size
    memory[start : start + len(data)] = data


def _read_label(memory: mmap.mmap | memoryview, number: int) -> str:
    start = _LABELS + number * _LABEL_BYTES
    (length,) = _LENGTH.unpack_from(memory, start)
    start += _LENGTH.size
    return bytes(memory[start : start + min(length, _LABEL_BYTES)]).decode("utf-8", "replace")
