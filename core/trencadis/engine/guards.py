"""Strategies, guarded: what they return is checked, what they raise is contained, and how long they take is measured.

A strategy that raises or breaks its contract in a step is quarantined: the configured fallback takes its place, loudly and for
good. Without a fallback the step fails, and the error names the component. One that is too slow is quarantined as well, once its
answer is used, but only for a while: then it is made anew and tried again. Without a fallback it is only warned about.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import index
from types import MappingProxyType, ModuleType
from typing import Generic, TypeVar

import attrs
import numpy as np

from trencadis.engine.restorable import Restorable
from trencadis.engine.scheduling.shadow import NO_SHADOW, Shadow, ShadowStep
from trencadis.errors import ContractError, StepFailedError
from trencadis.faults import CallMeter, FaultLog, as_words, reraise_interrupt, shown
from trencadis.interfaces import BucketingStrategy, EvictionPolicy, SchedulerView, SchedulingPolicy, TokenSplit
from trencadis.records import Bucket, Int32Array, Request, Shape, read_only

__all__ = ["Fallback", "Guarded", "GuardedBucketing", "GuardedEviction", "GuardedScheduling", "TooSlowError"]

logger = logging.getLogger("trencadis.engine")

_MAX_REFUSAL = 1000
_ORDERED_PER_STEP = 4096
"""Waiting sequences for each budget of an order: of more than that an order stands for several steps."""

S = TypeVar("S")
T = TypeVar("T")


class TooSlowError(Exception):
    """A strategy took too long, too often; says how long, and what it may take."""


@attrs.frozen
class Fallback(Generic[S]):
    """Makes what takes over from a strategy.

    Attributes:
        label: Names the component and its distribution in messages.
        make: Its factory.
        remake: Makes the strategy anew that it takes over from; None: that is not tried again.
    """

    label: str
    make: Callable[[], S]
    remake: Callable[[], S] | None = None

    def __call__(self) -> S:
        """Return a new one."""
        return self.make()


class Guarded(Generic[S]):
    """One strategy and its fallback.

    Args:
        label: Names the component and its distribution in messages.
        strategy: The chosen one.
        make_fallback: Makes the fallback; None if the config names none.
        meter: Measures its calls; None: nothing is measured.
        ends_if_slow: Fail when it is too slow and there is no fallback.

    Attributes:
        label: The argument, or the fallback's label once that is in place.
        strategy: The one in place.
        num_quarantined: Strategies that failed or were too slow.
        is_replaced: A fallback is in place.
    """

    def __init__(
        self,
        label: str,
        strategy: S,
        make_fallback: Callable[[], S] | None = None,
        *,
        meter: CallMeter | None = None,
        ends_if_slow: bool = False,
    ) -> None:
        self.label = label
        self.strategy = strategy
        self.num_quarantined = 0
        self._make_fallback = make_fallback
        self._meter = meter or CallMeter(label)
        self._ends_if_slow = ends_if_slow
        self._faults = FaultLog(logger)
        self._resting: tuple[str, Fallback[S]] | None = None
        self.is_replaced = False

    def quarantine(self, cause: BaseException) -> None:
        """Put the fallback in the strategy's place.

        Raises:
            StepFailedError: There is none, or the fallback itself failed.
        """
        fault = str(cause) if isinstance(cause, TooSlowError) else f"raised {as_words(cause)}"
        if self._make_fallback is None:
            raise StepFailedError(
                f"{self.label} {fault}.",
                hint="Mend or replace the component, or name a fallback in its config table.",
            ) from cause
        make_fallback, self._make_fallback = self._make_fallback, None
        traced: BaseException | None = cause
        how_long = "for good"
        if isinstance(cause, TooSlowError):
            traced = self._resting = None
            if isinstance(make_fallback, Fallback) and make_fallback.remake is not None:
                self._resting = self.label, make_fallback
            how_long = self._meter.switch_off(fault, for_good=self._resting is None)
        self._faults.say(
            self.label, f"{self.label} {fault}; its fallback takes over {how_long}.", error=traced, level=logging.ERROR
        )
        self.num_quarantined += 1
        self.is_replaced = True
        try:
            self.strategy = make_fallback()
        except Exception as error:
            raise StepFailedError(f"the fallback of {self.label} could not be built: {as_words(error)}.") from error
        own = make_fallback.label if isinstance(make_fallback, Fallback) else ""
        self._put(f"{own} (fallback of {self.label})" if own else f"fallback of {self.label}")

    def try_again(self) -> None:
        """Put a strategy that was too slow back in place, made anew, once it has rested; 0.1 µs if there is none."""
        if self._resting is None or not self._meter.is_due:
            return
        label, fallback = self._resting
        self._resting = None
        self._meter.switch_on()
        try:
            assert fallback.remake is not None
            self._put_back(label, fallback.remake(), fallback)
        except BaseException as error:
            reraise_interrupt(error)
            logger.error("%s could not be made anew: its fallback stays. %s", label, as_words(error))
        else:
            logger.warning("%s is tried again.", label)

    def _put_back(self, label: str, strategy: S, fallback: Fallback[S]) -> None:
        """Put the chosen strategy in place again."""
        self._put(label)
        self.strategy, self._make_fallback, self.is_replaced = strategy, fallback, False

    def guarded(
        self, method: str, call: Callable[[S], T], check: Callable[[T], str] | None = None, *, num_budgets: float = 1
    ) -> T:
        """Call the strategy and check its answer; on failure quarantine it and ask the fallback.

        Args:
            method: That is called, for messages.
            call: Calls it.
            check: Returns what is wrong with an answer, or an empty string.
            num_budgets: Budgets of time that this call may take.
        """
        meter = self._meter
        while True:
            began = meter.begin()
            try:
                answer = call(self.strategy)
                took_s = meter.end(began)
                fault = check(answer) if check is not None else ""
                if fault:
                    raise ContractError(fault)
            except BaseException as error:
                meter.end(began)
                reraise_interrupt(error)
                self.quarantine(error)
            else:
                if took_s > meter.budget_s:
                    self._note_slow(method, took_s, num_budgets=num_budgets)
                return answer

    def _tell(self, tell: Callable[[S], None], method: str) -> None:
        """Tell the strategy something; on failure quarantine it, and do not tell its fallback."""
        meter = self._meter
        began = meter.begin()
        try:
            tell(self.strategy)
            took_s = meter.end(began)
        except BaseException as error:
            meter.end(began)
            reraise_interrupt(error)
            self.quarantine(error)
        else:
            if took_s > meter.budget_s:
                self._note_slow(method, took_s)

    def _note_slow(self, method: str, took_s: float, *, num_budgets: float = 1) -> None:
        """Warn of a slow call, and quarantine the strategy if there were too many."""
        fault = self._meter.overran(method, took_s, num_budgets=num_budgets)
        if not fault:
            return
        if self._make_fallback is not None or self._ends_if_slow:
            self.quarantine(TooSlowError(fault))
        else:
            self._faults.say(
                f"{self.label}.{method} is too slow",
                f"{self.label} {fault}; steps go on waiting for it. Mend it, or name a fallback in its config table.",
            )

    def _put(self, label: str) -> None:
        """Call what is in place by another name."""
        self.label = label
        self._meter.rename(label)


class GuardedScheduling(Guarded[SchedulingPolicy], Restorable):
    """A scheduling policy whose answers are legal. Another one may take its place at any time between two calls.

    A policy that takes over, a fallback included, is told of every live request, in the order of arrival.

    Args:
        label: See :class:`Guarded`.
        strategy: The chosen one.
        make_fallback: See :class:`Guarded`.

    Attributes:
        name: Of the policy in force, in short.
        live: Returns slot and request of all that are in the engine, in the order of arrival.
        shadow: Asked beside the chosen one, or None.
        quarantines: Who was quarantined and why, the last 16.
    """

    def __init__(
        self,
        label: str,
        strategy: SchedulingPolicy,
        make_fallback: Callable[[], SchedulingPolicy] | None = None,
        *,
        meter: CallMeter | None = None,
    ) -> None:
        super().__init__(label, strategy, make_fallback, meter=meter)
        self.name = label
        self.live: Callable[[], Iterable[tuple[int, Request]]] = tuple
        self.shadow: Shadow | None = None
        self.quarantines: deque[tuple[str, str]] = deque(maxlen=16)

    def replace(
        self, label: str, strategy: SchedulingPolicy, make_fallback: Callable[[], SchedulingPolicy] | None, *, name: str
    ) -> None:
        """Put another policy in place.

        Raises:
            ContractError: It raised when it was told of the live requests; nothing has changed.
        """
        try:
            self._introduce(strategy)
        except BaseException as error:
            reraise_interrupt(error)
            raise ContractError(
                f"{label} raised {as_words(error)} when it was told of the live requests.",
                hint="The policy that was in force still is.",
            ) from error
        if self._resting is not None:
            self._resting = None
            self._meter.switch_on()
        self._put(label)
        self.name = name
        self.strategy, self._make_fallback, self.is_replaced = strategy, make_fallback, False

    def _put_back(self, label: str, strategy: SchedulingPolicy, fallback: Callable[[], SchedulingPolicy]) -> None:
        self.replace(label, strategy, fallback, name=self.name.removeprefix("fallback of "))

    def quarantine(self, cause: BaseException) -> None:
        """Put the fallback in place and tell it of the live requests."""
        self.quarantines.append((self.label, as_words(cause)))
        super().quarantine(cause)
        self.name = f"fallback of {self.name}"
        try:
            self._introduce(self.strategy)
        except BaseException as error:
            reraise_interrupt(error)
            self.quarantine(error)

    def introduce_live(self) -> None:
        """Tell the policy of every live request."""
        self._introduce(self.strategy)

    def take_shadow_step(self) -> ShadowStep:
        """Return what the shadow would have done otherwise in the step that was planned."""
        return NO_SHADOW if self.shadow is None else self.shadow.take_step()

    def _is_default(self, method: str) -> bool:
        """Return whether the policy leaves a method as the contract defines it: then there is nothing to call or to guard."""
        own, default = getattr(type(self.strategy), method, None), getattr(SchedulingPolicy, method)
        return own is default and method not in getattr(self.strategy, "__dict__", ())

    def _introduce(self, strategy: SchedulingPolicy) -> None:
        for slot, request in self.live():
            strategy.on_added(slot=slot, request=request)

    def admit(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        """Return why the request is refused, or an empty string."""
        if self.shadow is None and self._is_default("admit"):
            return ""
        refusal = self.guarded(
            "admit",
            lambda policy: policy.admit(request, num_waiting=num_waiting, num_waiting_tokens=num_waiting_tokens),
            _no_text,
        )
        if self.shadow is not None:
            self.shadow.admit(refusal, request, num_waiting=num_waiting, num_waiting_tokens=num_waiting_tokens)
        return refusal

    def admit_tenant(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        """Return why the request is refused for what its tenant has waiting, or an empty string."""
        if self._is_default("admit_tenant"):
            return ""
        refusal: str = self.guarded(
            "admit_tenant",
            lambda policy: policy.admit_tenant(request, num_waiting=num_waiting, num_waiting_tokens=num_waiting_tokens),
            partial(_no_text, method="admit_tenant"),
        )
        return refusal

    @property
    def preempts(self) -> bool:
        """Whether the policy lets running sequences give way to waiting ones."""
        try:
            return bool(self.strategy.preempts)
        except BaseException as error:
            reraise_interrupt(error)
            self.quarantine(error)
            return self.preempts

    def on_added(self, *, slot: int, request: Request) -> None:
        """Tell the policy of a new request, which is live already."""
        if self.shadow is not None:
            self.shadow.on_added(slot=slot, request=request)
        if not self._is_default("on_added"):  # a fallback is told of it with all others
            self._tell(lambda policy: policy.on_added(slot=slot, request=request), "on_added")

    def give_way(self, view: SchedulerView, *, slot: int, candidates: Int32Array) -> int:
        """Return one of the candidates, or -1."""
        candidates = read_only(candidates)

        def check(victim: int) -> str:
            known = victim == -1 or victim in candidates
            return (
                "" if known else f"give_way() returned {shown(victim)}, no candidate of {shown(candidates)} and not -1"
            )

        victim = int(
            self.guarded("give_way", lambda policy: policy.give_way(view, slot=slot, candidates=candidates), check)
        )
        if self.shadow is not None:
            self.shadow.give_way(victim, view, slot=slot, candidates=candidates)
        return victim

    def order(self, view: SchedulerView) -> Int32Array:
        """Return a permutation of ``view.waiting``."""

        def check(order: Int32Array) -> str:
            if order is view.waiting:
                return ""
            if (
                len(order) == len(view.waiting)
                and np.asarray(order).dtype.kind in "iu"
                and np.array_equal(np.sort(order), np.sort(view.waiting))
            ):
                return ""
            return f"order() returned {shown(order)}, no permutation of {shown(view.waiting)}"

        num_budgets = max(1.0, len(view.waiting) / _ORDERED_PER_STEP)
        order = np.asarray(self.guarded("order", lambda policy: policy.order(view), check, num_budgets=num_budgets))
        if self.shadow is not None:
            self.shadow.order(order, view)
        return order

    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        """Return budgets of 0 or more."""
        self.try_again()  # between two steps
        if self.shadow is None and self._is_default("split"):
            return TokenSplit(decode=token_budget, prefill=token_budget)
        # Once per step on the hot path: written out, without the closures of guarded().
        meter = self._meter
        began = meter.begin()
        fault: BaseException | None = None
        try:
            split = self.strategy.split(view, token_budget=token_budget)
            took_s = meter.end(began)
            decode, prefill = index(split.decode), index(split.prefill)
            if decode < 0 or prefill < 0:
                fault = ContractError(f"split() returned {shown(split)}: negative")
            elif decode > token_budget or prefill > token_budget:  # the same, in numbers that can be reckoned with
                split = TokenSplit(min(decode, token_budget), min(prefill, token_budget))
        except BaseException as error:
            meter.end(began)
            reraise_interrupt(error)
            fault = error
        if fault is not None:
            self.quarantine(fault)
            return self.split(view, token_budget=token_budget)
        if took_s > meter.budget_s:
            self._note_slow("split", took_s)
        if self.shadow is not None:
            self.shadow.split(split, view, token_budget=token_budget)
        return split

    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        """Return 0 .. min(num_remaining, token_budget)."""
        most = min(num_remaining, token_budget)
        if self.shadow is None and self._is_default("chunk"):
            return most

        def check(chunk: int) -> str:
            return "" if 0 <= chunk <= most else f"chunk() returned {shown(chunk)}, allowed are 0 to {most}"

        chunk = int(
            self.guarded(
                "chunk",
                lambda policy: policy.chunk(view, slot=slot, num_remaining=num_remaining, token_budget=token_budget),
                check,
            )
        )
        if self.shadow is not None:
            self.shadow.chunk(chunk, view, slot=slot, num_remaining=num_remaining, token_budget=token_budget)
        return chunk

    def victim(self, view: SchedulerView, *, candidates: Int32Array) -> int:
        """Return one of the candidates."""
        candidates = read_only(candidates)

        def check(victim: int) -> str:
            return (
                ""
                if victim in candidates
                else f"victim() returned {shown(victim)}, no candidate of {shown(candidates)}"
            )

        victim = int(self.guarded("victim", lambda policy: policy.victim(view, candidates=candidates), check))
        if self.shadow is not None:
            self.shadow.victim(victim, view, candidates=candidates)
        return victim

    def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
        """Tell the policy that a sequence left."""
        if self.shadow is not None:
            self.shadow.on_finished(slot=slot, tenant=tenant, num_output_tokens=num_output_tokens)
        if not self._is_default("on_finished"):  # a fallback never knew it
            self._tell(
                lambda policy: policy.on_finished(slot=slot, tenant=tenant, num_output_tokens=num_output_tokens),
                "on_finished",
            )


def _no_text(refusal: object, *, method: str = "admit") -> str:
    """Return what is wrong with a refusal, which a client is to read. Pure."""
    if not isinstance(refusal, str):
        return f"{method}() returned {shown(refusal)}, which is no text"
    if len(refusal) > _MAX_REFUSAL or not refusal.isprintable():
        return f"{method}() returned {shown(refusal)}: no more than {_MAX_REFUSAL} printable characters"
    return ""


class GuardedEviction(Guarded[EvictionPolicy]):
    """An eviction policy whose victims are candidates. A fallback is shown the candidates before it is asked.

    A policy knows a content by one id, wherever it lies: contents that moved are translated on the way in and out.

    Attributes:
        wants_uses: The policy defines ``on_use``, which is called for every block that fills up; without, it need not be called.
    """

    _stale = False
    _id_of: Mapping[int, int] = MappingProxyType({})  # of blocks whose content moved
    _block_of: Mapping[int, int] = MappingProxyType({})

    def __init__(
        self,
        label: str,
        strategy: EvictionPolicy,
        make_fallback: Callable[[], EvictionPolicy] | None = None,
        *,
        meter: CallMeter | None = None,
    ) -> None:
        super().__init__(label, strategy, make_fallback, meter=meter)
        self.wants_uses = type(strategy).on_use is not EvictionPolicy.on_use

    def show_anew(self) -> None:
        """Show the policy all candidates when it is next asked: it has been told of none."""
        self._stale = True

    @property
    def known_ids(self) -> dict[int, int]:
        """By which id the policy knows the content of a block, of those that moved."""
        return dict(self._id_of)

    def restore_ids(self, ids: Mapping[int, int]) -> None:
        """Take the ids that another engine's policy knew."""
        self._id_of = dict(ids)
        self._block_of = {known: block for block, known in ids.items()}

    def twin(self) -> GuardedEviction:
        """Return one that knows the same and learns on its own, without a fallback.

        Raises:
            ContractError: The policy cannot be copied.
        """
        known = vars(self.strategy) if hasattr(self.strategy, "__dict__") else {}
        shared = {id(value): value for value in known.values() if isinstance(value, ModuleType)}
        try:
            made = GuardedEviction(self.label, copy.deepcopy(self.strategy, shared))
        except Exception as error:
            raise ContractError(f"{type(self.strategy).__name__} cannot be copied: {as_words(error)}") from error
        made.restore_ids(self.known_ids)
        made._stale = self._stale
        return made

    def swap(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Exchange the contents of two blocks in each pair, without the policy's knowledge."""
        ids = dict(self._id_of)
        for one, other in pairs:
            ids[one], ids[other] = ids.get(other, other), ids.get(one, one)
        self.restore_ids({block: known for block, known in ids.items() if block != known})

    def on_use(
        self, blocks: Sequence[int], *, keys: Sequence[bytes], depths: Sequence[int], salt: str, now_s: float
    ) -> None:
        """Tell what blocks in use hold."""
        ids = self._ids(blocks)
        self._tell_informed(
            lambda policy: policy.on_use(ids, keys=keys, depths=depths, salt=salt, now_s=now_s), "on_use"
        )

    def on_free(self, blocks: Sequence[int], *, depths: Sequence[int], now_s: float) -> None:
        """Tell of new candidates."""
        ids = self._ids(blocks)
        self._tell_informed(lambda policy: policy.on_free(ids, depths=depths, now_s=now_s), "on_free")

    def on_hit(self, blocks: Sequence[int], *, now_s: float) -> None:
        """Tell of candidates that are referenced again."""
        ids = self._ids(blocks)
        self._tell_informed(lambda policy: policy.on_hit(ids, now_s=now_s), "on_hit")

    def forget(self, blocks: Sequence[int]) -> None:
        """Tell of candidates that were taken away."""
        ids = self._ids(blocks)
        self._tell_informed(lambda policy: policy.forget(ids), "forget")

    def victims(self, num_blocks: int, *, candidates: set[int]) -> list[int]:
        """Return ``num_blocks`` different candidates."""
        self.try_again()

        def check(victims: list[int]) -> str:
            if len(victims) == num_blocks == len(set(victims)) and candidates.issuperset(self._blocks(victims)):
                return (
                    ""
                    if all(isinstance(one, int | np.integer) for one in victims)
                    else f"victims() returned {shown(victims)}"
                )
            return f"victims({num_blocks}) returned {shown(victims)}; they must be {num_blocks} different candidates"

        chosen = self.guarded("victims", lambda policy: self._informed(policy, candidates).victims(num_blocks), check)
        return self._blocks(chosen)

    def quarantine(self, cause: BaseException) -> None:
        """Put the fallback in place; it is told of the candidates when it is next asked."""
        super().quarantine(cause)
        self._show_candidates()

    def _put_back(self, label: str, strategy: EvictionPolicy, fallback: Fallback[EvictionPolicy]) -> None:
        super()._put_back(label, strategy, fallback)
        self._show_candidates()

    def _show_candidates(self) -> None:
        """Show the policy in place all candidates when it is next asked."""
        self.wants_uses = type(self.strategy).on_use is not EvictionPolicy.on_use
        self._stale = True

    def _ids(self, blocks: Collection[int]) -> list[int]:
        ids = self._id_of
        return [ids.get(block, block) for block in blocks] if ids else list(blocks)

    def _blocks(self, ids: Sequence[int]) -> list[int]:
        blocks = self._block_of
        return [blocks.get(known, known) for known in ids] if blocks else list(ids)

    def _tell_informed(self, tell: Callable[[EvictionPolicy], None], method: str) -> None:
        if not self._stale:  # a fresh fallback is shown all candidates at once when it is asked for victims
            self._tell(tell, method)

    def _informed(self, policy: EvictionPolicy, candidates: set[int]) -> EvictionPolicy:
        if self._stale:
            blocks = sorted(self._ids(candidates))
            policy.on_free(blocks, depths=[0] * len(blocks), now_s=0.0)
            self._stale = False
        return policy


class GuardedBucketing(Guarded[BucketingStrategy]):
    """A bucketing strategy whose buckets cover what they are asked for."""

    def bucket_for(self, shape: Shape) -> Bucket:
        """Return a bucket that covers ``shape``."""
        self.try_again()
        # Once per pass on the hot path: written out, without the closures of guarded().
        meter = self._meter
        began = meter.begin()
        fault: BaseException | None = None
        try:
            bucket = self.strategy.bucket_for(shape)
            took_s = meter.end(began)
            if not isinstance(bucket, Bucket) or not bucket.covers(shape):
                fault = ContractError(f"bucket_for({shown(shape)}) returned {shown(bucket)}, which does not cover it")
        except BaseException as error:
            meter.end(began)
            reraise_interrupt(error)
            fault = error
        if fault is not None:
            self.quarantine(fault)
            return self.bucket_for(shape)
        if took_s > meter.budget_s:
            self._note_slow("bucket_for", took_s)
        return bucket

    def observe(self, shape: Shape, bucket: Bucket) -> None:
        """Tell the strategy which bucket was used."""
        self.guarded("observe", lambda strategy: strategy.observe(shape, bucket))
