"""Worker processes in which chat templates are rendered, each job with a deadline, shared by the tenants of this process.

submit() ─▶ queue by tenant ─▶ thread ═ pipe ═▶ template_worker.py ─▶ future
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import attrs

from trencadis.errors import InvalidRequestError, RequestRefusedError
from trencadis.processes import LineProcess

__all__ = ["MAX_CPU_S", "Render", "Rendered", "TemplatePool", "TemplateStoppedError", "template_pool"]

MAX_CPU_S: Final = 2.0
"""Limit of one conversation, seconds of CPU; one of a megabyte takes 0.02."""

_WALL_S = 15 * MAX_CPU_S
"""The longest rendering where others take the CPU."""

_NUM_WORKERS = 3
"""Conversations rendered at once; of a tenant all but one, so that none holds up all others."""

_MAX_JOBS = 1024
_IDLE_S = 60.0
"""After which a worker without work ends, all but the last."""

_MAX_REASON = 500

_WORKER: Final = Path(__file__).with_name("template_worker.py")
"""Not imported: it imports Jinja."""


@attrs.frozen(kw_only=True)
class Rendered:
    """What a template made of a conversation.

    Attributes:
        text: The prompt.
        lost: Numbers of the texts that were to appear in it, and do not.
    """

    text: str
    lost: tuple[int, ...] = ()


class Render(Protocol):
    """Renders a template in a worker process, and waits for it."""

    def __call__(self, template: str, variables: Mapping[str, Any], *, texts: Sequence[str] = ()) -> Rendered:
        """Return what a template writes.

        Args:
            template: The source.
            variables: The names that it may use; values as JSON has them.
            texts: Texts that are looked for in what it writes.

        Raises:
            InvalidRequestError: The template refuses the conversation, or a variable is nothing that JSON has.
            TemplateStoppedError: It takes too much time or memory.
        """


class TemplateStoppedError(InvalidRequestError):
    """A template took too much time or memory."""


_T = TypeVar("_T")


@attrs.define(eq=False)
class _Job(Generic[_T]):
    work: Callable[[Render], _T]
    tenant: str
    future: Future[_T]


class TemplatePool:
    """Renders chat templates in processes that start when there is work, and again when one was killed. May be used from several threads.

    Args:
        max_cpu_s: The most that one rendering may take, seconds of CPU, above 0.

    Attributes:
        num_started: Processes that were started so far.
    """

    def __init__(self, *, max_cpu_s: float = MAX_CPU_S) -> None:
        self.max_cpu_s = max_cpu_s
        self.num_started = 0
        self._changed = threading.Condition()
        self._queue: deque[_Job[Any]] = deque()
        self._busy: Counter[str] = Counter()
        self._num_threads = self._num_idle = 0

    def submit(self, work: Callable[[Render], _T], *, tenant: str = "") -> Future[_T]:
        """Return a future of what ``work`` returns. Does not wait.

        Args:
            work: Called on a thread of the pool with what renders templates in a process of the pool.
            tenant: Who asks.

        Returns:
            Fails with what ``work`` raises. May be cancelled.

        Raises:
            RequestRefusedError: Too many conversations wait.
        """
        job = _Job(work, tenant, Future())
        with self._changed:
            if len(self._queue) >= _MAX_JOBS:
                raise RequestRefusedError(f"{_MAX_JOBS} conversations wait already for the model's chat template.")
            self._queue.append(job)
            if len(self._queue) > self._num_idle and self._num_threads < _NUM_WORKERS:
                self._num_threads += 1
                threading.Thread(target=self._serve, name="trencadis-templates", daemon=True).start()
            self._changed.notify_all()
        return job.future

    # ---------------------------------------------------------------------------------------------- threads

    def _serve(self) -> None:
        """Render queued conversations in one process; ends when the queue was empty for a while."""
        worker = _Worker(self)
        while (job := self._next()) is not None:
            start_s = time.monotonic()
            try:
                job.future.set_result(job.work(worker.render))
            except InvalidRequestError as error:
                error.cost_s = time.monotonic() - start_s
                job.future.set_exception(error)
            except Exception as error:
                job.future.set_exception(error)
            with self._changed:
                self._busy -= Counter([job.tenant])
                self._changed.notify_all()
        worker.close()

    def _next(self) -> _Job[Any] | None:
        """Return the oldest job of a tenant that does not hold all other workers; None: there was none for a while."""
        with self._changed:
            self._num_idle += 1
            try:
                while True:
                    job = next((one for one in self._queue if self._busy[one.tenant] < _NUM_WORKERS - 1), None)
                    if job is not None:
                        self._queue.remove(job)
                        if job.future.set_running_or_notify_cancel():
                            self._busy[job.tenant] += 1
                            return job
                    elif not self._changed.wait(_IDLE_S) and not self._queue and self._num_threads > 1:
                        self._num_threads -= 1
                        return None
            finally:
                self._num_idle -= 1


@functools.cache
def template_pool() -> TemplatePool:
    """Return the pool of this process; it has no worker until there is work."""
    return TemplatePool()


# -------------------------------------------------------------------------------------------------------- processes

_KEPT_VARIABLES = ("LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "TZ")
"""What a template's time of day depends on, and nothing else of this process's environment, which may hold keys."""


class _Worker:
    """Renders in a process. One thread."""

    def __init__(self, pool: TemplatePool) -> None:
        self._pool = pool
        kept = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        self._process = LineProcess(_WORKER, environment=kept, setup=self._count)
        self.close = self._process.close

    def render(self, template: str, variables: Mapping[str, Any], *, texts: Sequence[str] = ()) -> Rendered:
        """Return what a template writes; see :class:`Render`."""
        line = _line(template, variables, texts, self._pool.max_cpu_s)
        answer = self._process.ask(line, timeout_s=_WALL_S)
        if answer == 0:  # it has left after a conversation that took much memory
            answer = self._process.ask(line, timeout_s=_WALL_S)
        if isinstance(answer, int):
            raise self._stopped(answer)
        return _rendered(answer)

    def _count(self) -> bytes:
        self._pool.num_started += 1
        return b""

    def _stopped(self, code: int) -> TemplateStoppedError:
        if code in (-signal.SIGPROF, -signal.SIGKILL):
            why = f"ran longer than {self._pool.max_cpu_s:g} s and was stopped"
        elif code == -signal.SIGABRT:
            from trencadis.text.template_worker import MAX_BYTES  # which imports Jinja

            why = f"took more than {MAX_BYTES >> 20} MiB of memory and was stopped"
        else:
            why = f"ended its process (exit code {code})"
        return TemplateStoppedError(
            f"the model's chat template {why}.",
            hint="Send a shorter conversation; if short ones fail as well, the template that came with the model is at fault.",
        )


def _line(template: str, variables: Mapping[str, Any], texts: Sequence[str], max_cpu_s: float) -> bytes:
    job = {"template": template, "variables": variables, "texts": list(texts), "max_cpu_s": max_cpu_s}
    try:
        return json.dumps(job).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"messages or arguments for the chat template hold what JSON has not: {error}.",
            hint="Give texts, numbers, lists and tables.",
        ) from None


def _rendered(answer: bytes) -> Rendered:
    told: dict[str, Any] = json.loads(answer)
    if "error" in told:
        raise InvalidRequestError(f"the model's chat template refused the messages: {_short(told['error'])}.")
    return Rendered(text=told["text"], lost=tuple(told["lost"]))


def _short(reason: str) -> str:
    reason = reason.strip().removesuffix(".")
    return reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]} ..."
