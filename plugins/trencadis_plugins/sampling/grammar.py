"""Compiles structured-output constraints to grammars of llguidance, in the background and once for equal constraints.

    StructuredOutput ─▶ queue ─▶ thread: trial in a process that may be killed ─▶ LLMatcher, kept ─▶ a copy for each sequence

The library lets go of Python's lock, so that a thread blocks no other; but only a process can be stopped, which is what the trial is for.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import attrs

from trencadis.errors import InvalidRequestError, RequestRefusedError
from trencadis.interfaces import Vocabulary
from trencadis.processes import LineProcess
from trencadis.records import StructuredOutput
from trencadis_plugins.sampling import grammar_trial
from trencadis_plugins.sampling.grammar_tokens import TokenTable, allowed_by
from trencadis_plugins.sampling.grammar_trial import LIMITS, MAX_BYTES, MAX_CPU_S, reason_of

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["CompiledGrammar", "Grammars", "grammars_of"]

_MAX_KEPT = 256
_MAX_KEPT_BYTES = 64 << 20
_MAX_LIVE_BYTES = 2 << 30
"""Most memory of grammars that requests hold; one may take a hundred megabytes."""

_FAILURE_S = 60.0
"""How long a refusal is remembered, seconds: how much time a grammar takes may change with the machine's load."""

_NUM_THREADS = 3
"""Grammars that are compiled at once, of each tenant one: so one tenant holds up others only if there are three of its kind."""

_MAX_JOBS = 1024
_IDLE_S = 10.0
"""After which a thread without work ends, and its process with it."""

_WALL_S = 20 * MAX_CPU_S
"""The longest trial where others take the CPU: processes of trials give way to them."""

_MAX_REASON = 500


@lru_cache(maxsize=2)
def grammars_of(vocabulary: Callable[[], Vocabulary]) -> Grammars:
    """Return the compiler for a vocabulary, shared within this process."""
    return Grammars(vocabulary)


class CompiledGrammar:
    """A grammar at the beginning of a text.

    Attributes:
        num_bytes: Memory that it takes, about, before texts are read with it.
        is_spent: A text has failed with it: what it has learned from texts is shared by them all and has a bound, such as that of the
            lexer's states. The next request compiles it anew.
    """

    __slots__ = ("__weakref__", "_matcher", "is_spent", "num_bytes")

    def __init__(self, matcher: LLMatcher, num_bytes: int) -> None:
        self._matcher = matcher
        self.num_bytes = num_bytes
        self.is_spent = False

    def matcher(self) -> LLMatcher:
        """Return a new matcher at the beginning of a text; microseconds."""
        return self._matcher.deep_copy()


@attrs.define(eq=False)
class _Job:
    """A grammar to compile, its tenant, and the waiting requests."""

    wanted: StructuredOutput
    tenant: str
    size: int
    waiting: list[Future[CompiledGrammar]] = attrs.field(factory=list)


class Grammars:
    """Compiled grammars for one vocabulary. May be used from several threads.

    Args:
        vocabulary: Reads that of the model; called by a thread of the compiler when the first grammar is wanted.
        max_cpu_s: The most that a trial may take, seconds of CPU, rounded up.

    Attributes:
        num_compiled: Grammars that were compiled, or refused, since the start.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary], *, max_cpu_s: float = MAX_CPU_S) -> None:
        self._read = vocabulary
        self._max_cpu_s = max_cpu_s
        self._loading = threading.Lock()
        self._tokenizer: Any = None
        self._kept: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()
        self._live: WeakValueDictionary[StructuredOutput, CompiledGrammar] = WeakValueDictionary()
        self._refused: OrderedDict[StructuredOutput, tuple[InvalidRequestError, float]] = OrderedDict()
        self._jobs: dict[StructuredOutput, _Job] = {}
        self._queue: list[_Job] = []
        self._busy: Counter[str] = Counter()
        self._num_threads = self._num_idle = 0
        self._changed = threading.Condition()
        self.num_compiled = 0

    @property
    def vocabulary(self) -> Vocabulary:
        """The model's vocabulary; the first call reads it, which takes up to seconds."""
        return self._read()

    @property
    def eos_token_id(self) -> int:
        """The token that a mask allows where the text may end.

        Raises:
            InvalidRequestError: The tokenizer has none.
        """
        return _end_of(self.vocabulary)

    def begin(self, wanted: StructuredOutput, *, tenant: str = "") -> Future[CompiledGrammar]:
        """Return a future of the compiled grammar, complete if it is cached. Does not wait.

        Short ones come first, and one of a tenant at a time.

        Returns:
            Fails with ``InvalidRequestError`` if the library cannot read the schema, regex or grammar, if no text is of that kind, or
            if compiling takes too much time or memory; with ``RequestRefusedError`` if there is no room now. May be cancelled.
        """
        future: Future[CompiledGrammar] = Future()
        with self._changed:
            known = self._find(wanted)
            if isinstance(known, CompiledGrammar) and not known.is_spent:
                future.set_result(known)
            elif isinstance(known, InvalidRequestError):
                future.set_exception(known)
            elif len(self._jobs) >= _MAX_JOBS and wanted not in self._jobs:
                future.set_exception(RequestRefusedError(f"structured output: {_MAX_JOBS} grammars wait already."))
            else:
                self._queue_up(wanted, tenant).waiting.append(future)
        return future

    def matcher(self, wanted: StructuredOutput) -> LLMatcher:
        """Return a new matcher at the beginning of a text; waits for the grammar if it is not compiled.

        Raises:
            RequestError: See :meth:`begin`.
        """
        with self._changed:
            live = self._live.get(wanted)
        # A spent one serves what was prepared with it: to wait for another would hold up the engine.
        return (live or self.begin(wanted).result()).matcher()

    def spend(self, wanted: StructuredOutput) -> None:
        """Remove a grammar on which the library failed: the next request compiles it anew."""
        with self._changed:
            live = self._live.get(wanted)
            if live is not None:
                live.is_spent = True
                self._kept.pop(wanted, None)

    # ---------------------------------------------------------------------------------------------- what is known

    def _find(self, wanted: StructuredOutput) -> CompiledGrammar | InvalidRequestError | None:
        live = self._live.get(wanted)
        if live is not None:
            if not live.is_spent:
                self._keep(wanted, live)
            return live
        error, until_s = self._refused.get(wanted, (None, 0.0))
        if error is None or time.monotonic() >= until_s:
            return None
        again = copy(error)
        again.cost_s = 0.0  # it was found out before
        return again

    def _keep(self, wanted: StructuredOutput, grammar: CompiledGrammar) -> None:
        kept = self._kept
        kept[wanted] = self._live[wanted] = grammar
        kept.move_to_end(wanted)
        while len(kept) > _MAX_KEPT or (
            len(kept) > 1 and sum(one.num_bytes for one in kept.values()) > _MAX_KEPT_BYTES
        ):
            kept.popitem(last=False)

    def _note(self, job: _Job, outcome: CompiledGrammar | Exception) -> None:
        del self._jobs[job.wanted]
        self._busy -= Counter([job.tenant])
        self.num_compiled += 1
        if isinstance(outcome, CompiledGrammar):
            self._keep(job.wanted, outcome)
        elif isinstance(outcome, InvalidRequestError):
            # A copy has no traceback, and so does not hold what the frames of all who raised it hold.
            self._refused[job.wanted] = copy(outcome), time.monotonic() + _FAILURE_S
            self._refused.move_to_end(job.wanted)
            if len(self._refused) > _MAX_KEPT:
                self._refused.popitem(last=False)
        self._changed.notify_all()

    # ---------------------------------------------------------------------------------------------- threads

    def _queue_up(self, wanted: StructuredOutput, tenant: str) -> _Job:
        job = self._jobs.get(wanted)
        if job is None:
            size = len(wanted.text) + sum(map(len, wanted.choices))
            job = self._jobs[wanted] = _Job(wanted, tenant, size)
            self._queue.append(job)
            if len(self._queue) > self._num_idle and self._num_threads < _NUM_THREADS:
                self._num_threads += 1
                threading.Thread(target=self._serve, name="trencadis-grammars", daemon=True).start()
            self._changed.notify_all()
        return job

    def _serve(self) -> None:
        """Compile queued grammars; ends when the queue was empty for a while."""
        trial = LineProcess(
            Path(grammar_trial.__file__),
            environment=os.environ,
            setup=lambda: _setup(self.vocabulary, self.eos_token_id, max_cpu_s=self._max_cpu_s),
        )
        while (job := self._next()) is not None:
            outcome = self._outcome(job, trial)
            with self._changed:
                self._note(job, outcome)
            for future in job.waiting:
                if future.set_running_or_notify_cancel():
                    if isinstance(outcome, CompiledGrammar):
                        future.set_result(outcome)
                    else:
                        future.set_exception(outcome)
        trial.close()

    def _next(self) -> _Job | None:
        """Return the shortest grammar of a tenant without a running job; None: the queue was empty for a while."""
        with self._changed:
            self._num_idle += 1
            try:
                while True:
                    free = [job for job in self._queue if not self._busy[job.tenant]]
                    if free:
                        job = min(free, key=lambda one: one.size)
                        self._queue.remove(job)
                        if all(future.cancelled() for future in job.waiting):
                            del self._jobs[job.wanted]
                            continue
                        self._busy[job.tenant] += 1
                        return job
                    if not self._changed.wait(_IDLE_S) and not self._queue:
                        self._num_threads -= 1
                        return None
            finally:
                self._num_idle -= 1

    def _outcome(self, job: _Job, trial: LineProcess) -> CompiledGrammar | Exception:
        start_s = time.monotonic()
        try:
            self._check_vocabulary()
            start_s = time.monotonic()  # reading the vocabulary is no work of the request's
            return self._compiled(job.wanted, trial)
        except InvalidRequestError as error:
            error.cost_s = time.monotonic() - start_s
            return error
        except Exception as error:
            return error

    def _check_vocabulary(self) -> None:
        """Refuse a tokenizer whose texts are not the bytes of its tokens: the library would keep to another text than clients read."""
        fault = self.vocabulary.fault()
        if fault:
            raise InvalidRequestError(
                f"structured output cannot be served with this model's tokenizer, whose texts are not those of its tokens: {fault}.",
                hint="Leave the field out, or ask the operator for a tokenizer without such a rule in model.tokenizer.",
                field="structured",
            )

    def _compiled(self, wanted: StructuredOutput, trial: LineProcess) -> CompiledGrammar:
        library = _llguidance()
        vocabulary, eos_token_id = self.vocabulary, self.eos_token_id
        tried = _tried(wanted, trial, max_cpu_s=self._max_cpu_s)
        reason, num_bytes = tried.get("reason", ""), tried.get("num_bytes", 0)
        if reason:
            raise _refusal(wanted, reason)
        with self._changed:
            if sum(one.num_bytes for one in self._live.values()) + num_bytes > _MAX_LIVE_BYTES:
                self._kept.clear()
            if sum(one.num_bytes for one in self._live.values()) + num_bytes > _MAX_LIVE_BYTES:
                raise RequestRefusedError("structured output: the grammars of other requests take too much memory.")
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = library.LLTokenizer(library.TokenizerWrapper(TokenTable(vocabulary, eos_token_id)))
        limits = library.LLParserLimits(**LIMITS)
        matcher: LLMatcher = library.LLMatcher(self._tokenizer, tried["grammar"], log_level=0, limits=limits)
        reason = reason_of(matcher)
        if reason:
            raise _refusal(wanted, reason)
        if not allowed_by(matcher, vocabulary).any():
            raise _refusal(wanted, "no token of this model's tokenizer begins a text of this kind.")
        return CompiledGrammar(matcher, num_bytes)


def _setup(vocabulary: Vocabulary, eos_token_id: int, *, max_cpu_s: float) -> bytes:
    """Return what a process for trials is sent first. Pure."""
    special = [(token, vocabulary.tokens[token].decode("latin-1")) for token in vocabulary.special_token_ids]
    setup = {
        "num_tokens": len(vocabulary.tokens),
        "eos_token_id": eos_token_id,
        "special": special,
        "max_cpu_s": max_cpu_s,
    }
    return json.dumps(setup).encode() + b"\n"


def _tried(wanted: StructuredOutput, trial: LineProcess, *, max_cpu_s: float) -> dict[str, Any]:
    """Return ``grammar`` in the library's format and ``num_bytes``, or ``reason``."""
    line = json.dumps({"kind": wanted.kind, "text": wanted.text, "choices": wanted.choices}).encode() + b"\n"
    answer = trial.ask(line, timeout_s=_WALL_S)
    if isinstance(answer, bytes):
        result: dict[str, Any] = json.loads(answer)
        return result
    if answer in (-signal.SIGXCPU, -signal.SIGKILL):
        return {"reason": f"it takes longer than {max_cpu_s:g} s to compile."}
    if answer == -signal.SIGABRT:
        return {"reason": f"it takes more than {MAX_BYTES >> 20} MiB to compile."}
    return {"reason": f"the library crashed (exit code {answer})."}


def _end_of(vocabulary: Vocabulary) -> int:
    if vocabulary.eos_token_id is None:
        raise InvalidRequestError(
            "structured output: the tokenizer names no end-of-sequence token, so that no text could end.",
            hint="Set eos_token in the model's tokenizer_config.json, or leave the field out.",
            field="structured",
        )
    return vocabulary.eos_token_id


def _refusal(wanted: StructuredOutput, reason: str) -> InvalidRequestError:
    reason = reason.strip()
    shown = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]} ..."
    return InvalidRequestError(f"structured output ({wanted.kind}) cannot be served: {shown}", field="structured")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise InvalidRequestError(
            f"structured output needs llguidance, which cannot be imported: {error}.",
            hint='The operator can add it: pip install "trencadis[structured]".',
            field="structured",
        ) from error
    return llguidance
