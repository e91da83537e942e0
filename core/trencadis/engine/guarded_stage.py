"""Stages of other distributions, guarded: a fault of one ends no step, and no request but the one that it is about.

    accept         ▶ the request is refused
    added, claim   ▶ the request ends with the error, and so it does if its claim cannot be begun
    after_build    ▶ the step fails: its sequences are computed anew
    after_step     ▶ tokens are shown as they were
    leaving        ▶ nothing is kept of the sequence
    all others     ▶ the step goes on

A stage that fails three times in a row at one moment is switched off for good; one that defines ``accept`` guards something, so every new
request is refused instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any, Final

import attrs

from trencadis.engine.guard import Guard, logger
from trencadis.engine.sequences import Claim, Leaving, Sequence, SequenceState, When
from trencadis.engine.stage import EngineParts, Stage
from trencadis.engine.step import SubmittedStep
from trencadis.errors import (
    BackendError,
    ContractError,
    PluginError,
    RanksLostError,
    RequestError,
    RequestRefusedError,
    StepFailedError,
    did_you_mean,
)
from trencadis.faults import as_words, reraise_interrupt, shown
from trencadis.interfaces import SchedulerView
from trencadis.interfaces.laws import Rule, rules_of
from trencadis.records import EngineGauges, FinishReason, StepStats

__all__ = ["MAX_FAULTS", "StageGuard", "guarded"]

MAX_FAULTS: Final = 3
"""So many faults in a row at one moment are too many."""

_MEANS: Final = {
    "accept": "the request is refused",
    "added": "the request ends",
    "claim": "the request ends",
    "begin": "the request ends",
    "after_build": "the step fails, and its sequences are computed anew",
    "after_step": "tokens are shown as they were",
    "leaving": "nothing is kept of the sequence",
}
_MEANT: Final[Mapping[str, type[Exception]]] = {"after_build": BackendError, "before_step": RanksLostError}
_GONE: Final = Claim()
_GONE.when = When.GONE
_STEP_MOMENTS: Final = frozenset({"after_plan", "after_build", "received", "after_step"})
_SEALED: Final = "_guarded_by"
_CLAIM_RULES: Final = rules_of(Claim)


_OWN: Final = frozenset(
    {
        "start_s",
        "num_admitted",
        "num_compilations",
        "num_quarantined",
        "passes",
        "num_bucket_hits",
        "num_fallbacks",
        "num_substituted",
        "num_unprepared",
    }
)
"""Fields of ``StepStats`` with a default that the engine fills in itself."""


def _optional(kind: type) -> dict[str, type]:
    """Return the fields of a record that are a number or a tuple of numbers, 0 or empty by default, and which."""
    return {
        field.name: tuple if isinstance(field.default, tuple) else Real
        for field in attrs.fields(kind)
        if isinstance(field.default, int | float | tuple)
    }


_GAUGES: Final = {name: kind for name, kind in _optional(EngineGauges).items() if name in _optional(StepStats)}
_STATS: Final = {name: kind for name, kind in _optional(StepStats).items() if name not in _OWN | _GAUGES.keys()}
_SHOWN: Final = _optional(SchedulerView)


def _asking(name: str) -> property:
    """Return what asks a stage a question that is an attribute; False where it raises, or is off."""

    def ask(guard: StageGuard) -> bool:
        if guard.fault and not guard.is_guarding:
            return False
        try:
            return bool(getattr(guard.strategy, name))
        except BaseException as error:
            reraise_interrupt(error)
            guard.note_fault(name, error)
            return False

    return property(ask, doc=f"Whether it {name.replace('_', ' ')}; see ``Stage``.")


class StageGuard(Guard[Stage]):
    """Calls a stage of another distribution.

    Args:
        stage: It is not bound yet.

    Attributes:
        fault: Why the stage is switched off, or new requests are refused; empty: it is neither.
        is_guarding: It defines ``accept``, so it is not switched off.
    """

    def __init__(self, stage: Stage) -> None:
        self.fault = ""
        self._in_a_row: Counter[str] = Counter()
        self._failing: dict[int, tuple[Sequence, str]] = {}  # by slot: who is to end, and why
        self._aside: dict[int, int] = {}  # by slot: epoch of a sequence that the stage set aside
        self._before: tuple[int, Mapping[str, Any] | None] = 0, None
        self.is_guarding = type(stage).accept is not Stage.accept
        super().__init__(Stage, stage.label, stage)
        self.name, self.accepts_last = stage.name, stage.accepts_last

    def bind(self, engine: EngineParts) -> None:
        """Bind it.

        Raises:
            PluginError: It raised, or shows a number that nobody knows.
        """
        self._state, self._ended, self._wake = engine.state, engine.ended, engine.wake
        try:
            self._strategy.bind(engine)
            self._check_numbers(None)
        except Exception as error:
            raise PluginError(f"{self.label} raised {as_words(error)} in bind().", hint=self._hint) from error

    def end_failed(self) -> None:
        """End the requests that its faults were about; what it had begun to load for others is computed."""
        state = self._state
        while self._failing:
            slot, (sequence, why) = self._failing.popitem()
            if state.table.sequences[slot] is not sequence:
                continue
            if sequence.claim is not None and sequence.state is SequenceState.ASIDE:
                state.drop_claim(sequence)
                state.resume(sequence, front=True)
            else:
                self._ended.append(state.finish(sequence, FinishReason.ERROR, error=why))

    def dump(self, reason: str, cause: str) -> Path | None:
        """Have it write a file, from any thread; None where it raises."""
        try:
            return self._strategy.dump(reason, cause)
        except BaseException as error:
            reraise_interrupt(error)
            self.note_fault("dump", error)
            return None

    wants_step, has_orders, awaits = _asking("wants_step"), _asking("has_orders"), _asking("awaits")

    # ------------------------------------------------------------------------------------------------------ faults

    def _failed(self, rule: Rule, error: BaseException, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        method = rule.method
        if method == "accept" and isinstance(error, RequestError):
            raise error  # its answer
        if isinstance(error, _MEANT.get(method, ())):
            raise error  # it fails the step, or has ranks started again, because it means to
        said = self.note_fault(method, error)
        match method:
            case "accept":
                raise RequestRefusedError(
                    f"request {args[0].request_id!r} was refused: {said}.", hint=self._hint
                ) from error
            case "added" | "begin":
                self._fail(args[0], said)
                return f"{self.label} failed" if method == "added" else False
            case "claim":
                if self._is_live(args[0]):
                    self._ended.append(self._state.finish(args[0], FinishReason.ERROR, error=f"{said}. {self._hint}"))
                return _GONE
            case "after_build":
                raise StepFailedError(f"{said}.", hint=self._hint) from error
            case "leaving":
                self._undo(args[1])
                return None
            case _:
                return self._instead(rule, args, named)

    def _instead(self, rule: Rule, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if rule.method == "accept":
            raise RequestRefusedError(
                f"request {args[0].request_id!r} was refused: {self.label} {self.fault}, and what it guards cannot be checked.",
                hint=self._hint,
            )
        return args[2] if rule.method == "after_step" else rule.otherwise

    def _readiness(self, rule: Rule) -> Callable[[], bool] | None:
        if rule.always or (self.is_guarding and rule.method != "accept"):
            return None
        return lambda: not self.fault

    def _further(self, rule: Rule) -> Callable[..., Any]:
        check, method = super()._further(rule), rule.method

        def accepted(answer: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
            self._check_numbers(args[0] if method in _STEP_MOMENTS else None)
            if check is not None:
                answer = check(answer, args, named)
            self._in_a_row.pop(method, None)
            return answer

        return accepted

    def _note_slow(self, rule: Rule, took_s: float, num_budgets: float) -> None:
        """Do nothing: stages have no budget."""

    def note_fault(self, method: str, error: BaseException) -> str:
        """Log a fault and count it; returns it in words."""
        self._strategy.num_faults += 1
        said = f"{self.label} raised {as_words(error)} in {method}()"
        means = _MEANS.get(method, "the step goes on")
        self._faults.say(f"{self.label}.{method}", f"{said}; {means}. {self._hint}", error=error)
        self._in_a_row[method] += 1
        if self._in_a_row[method] >= MAX_FAULTS and not self.fault:
            self._switch_off(f"raised {MAX_FAULTS} times in a row in {method}()")
        return said

    def _switch_off(self, fault: str) -> None:
        self.fault = fault
        self._meter.switch_off(fault, for_good=True)
        if self.is_guarding:
            logger.error("%s %s: it guards requests, so every new one is refused. %s", self.label, fault, self._hint)
            return
        logger.error("%s %s: it is switched off for good. %s", self.label, fault, self._hint)
        for slot, epoch in self._aside.items():
            if slot in self._state.aside and self._state.table.epoch[slot] == epoch:
                self._fail(self._state.table.sequence(slot), f"{self.label} {fault}, and the request waited for it")

    def _fail(self, sequence: Sequence, why: str) -> None:
        """End a request, and no other, at the start of the next step."""
        self._failing[sequence.slot] = sequence, f"{why}. {self._hint}"
        self._wake()

    @property
    def _hint(self) -> str:
        return self._strategy.remedy

    def _check_numbers(self, step: SubmittedStep | None) -> None:
        _check_names("state.gauges", self._state.gauges, _GAUGES)
        _check_names("state.shown", self._state.shown, _SHOWN)
        if step is not None:
            _check_names("step.stats", step.stats, _STATS)

    # ------------------------------------------------------------------------------------------------ claims and blocks

    def _made(self, rule: Rule, call: Callable[..., Any]) -> Callable[..., Any]:
        if rule.method != "leaving":
            return super()._made(rule, call)

        def remembered(sequence: Sequence, leaving: Leaving) -> Any:
            self._before = leaving.num_kept_blocks, leaving.transfer_params
            return call(sequence, leaving)

        return super()._made(rule, remembered)

    def _undo(self, leaving: Leaving) -> None:
        leaving.num_kept_blocks, leaving.transfer_params = self._before

    def _check_added(self, answer: str, args: tuple[Any, ...], named: Mapping[str, Any]) -> str:
        if answer:
            self._note_aside(args[0])
        return answer

    def _check_claim(self, answer: Claim | None, args: tuple[Any, ...], named: Mapping[str, Any]) -> Claim | None:
        is_gone = answer is not None and answer.when is When.GONE
        if is_gone is self._is_live(args[0]):
            raise ContractError(
                "it ended a sequence and did not say so"
                if not is_gone
                else "it says that a sequence has ended that lives"
            )
        if not is_gone and args[0].state is not SequenceState.WAITING:
            raise ContractError("it moved the sequence, which has to wait until the claim is begun")
        return self._sealed(answer)

    def _check_leaving(self, answer: Claim | None, args: tuple[Any, ...], named: Mapping[str, Any]) -> Claim | None:
        sequence, leaving = args
        if leaving.num_kept_blocks < self._before[0]:
            raise ContractError(f"num_kept_blocks was {self._before[0]}, and another stage counts on it")
        answer = self._sealed(answer)
        if not self.fault or self.is_guarding:
            return answer
        self._undo(leaving)  # nobody would give it back
        if answer is not None:
            answer.drop(sequence)
        return None

    def _check_begin(self, answer: bool, args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
        if args[0].slot in self._failing:
            return False
        if answer and args[0].state is SequenceState.ASIDE:
            self._note_aside(args[0])
        return answer

    def _is_live(self, sequence: Sequence) -> bool:
        return self._state.table.sequences[sequence.slot] is sequence

    def _note_aside(self, sequence: Sequence) -> None:
        self._aside[sequence.slot] = int(self._state.table.epoch[sequence.slot])

    def _sealed(self, claim: Claim | None) -> Claim | None:
        """Return a claim whose methods are guarded as the moments are."""
        if claim is not None and vars(claim).get(_SEALED) is not self:
            for name, rule in _CLAIM_RULES.items():
                if getattr(type(claim), name) is not getattr(Claim, name):
                    call = getattr(type(claim), name).__get__(claim)
                    object.__setattr__(claim, name, super()._made(rule, call))
            object.__setattr__(claim, _SEALED, self)
        return claim


def guarded(stage: Stage) -> Stage | StageGuard:
    """Return what is called in the place of a stage: itself if it is built in."""
    return StageGuard(stage) if stage.label else stage


def _check_names(where: str, numbers: dict[str, Any], known: Mapping[str, type]) -> None:
    """Take out what nobody could show.

    Raises:
        ContractError: Something was taken out.
    """
    wrong = [name for name, value in numbers.items() if name not in known or not _is_a(known[name], value)]
    for name in wrong:
        value = numbers.pop(name)
    if wrong and wrong[0] in known:
        lacks = "no number" if known[wrong[0]] is Real else "no tuple of numbers"
        raise ContractError(f"{where}[{wrong[0]!r}] is {shown(value)}, {lacks}")
    if wrong:
        names = ", ".join(sorted(known))
        raise ContractError(f"{where} has no {shown(wrong[0])}.{did_you_mean(str(wrong[0]), known)} There are: {names}")


def _is_a(kind: type, value: object) -> bool:
    return isinstance(value, kind) and (not isinstance(value, tuple) or all(isinstance(one, Real) for one in value))
