"""An engine on a simulated device that computes steps at once between which nothing is decided.

    plan n ──▶ submit: n may go on ──▶ an arrival, or the end of the stretch: so many steps ──▶ commit them

A plan of decodes alone stays the same until a sequence comes or ends, blocks run out, or the policy would answer otherwise. Such a plan is
submitted as a stretch of steps. How many of them are computed is decided when the stretch is waited for, by ``Timeline.until_s``; if by
then the next plan would be another one, it is one step as any other.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import cast

import attrs
import numpy as np

from trencadis.api import Engine
from trencadis.interfaces import SupportsSteadySteps
from trencadis.records import Int32Array, Plan, TokenDeltas
from trencadis_tools.simulation.executor import SimulatedExecutor, Stretch

__all__ = ["MAX_STEADY_STEPS", "SteadyEngine"]

MAX_STEADY_STEPS = 64
"""Steps that an engine computes at once where nothing changes; what comes meanwhile leaves the times of the rest computed in vain."""

_EMPTY = np.empty(0, np.int32)
_NOTHING = TokenDeltas(slots=_EMPTY, num_tokens=_EMPTY, token_ids=_EMPTY)


class SteadyEngine(Engine):
    """An engine whose steps are those of any other, with the same tokens, blocks and totals; made with ``build_engine(kind=SteadyEngine)``.

    Until :meth:`skip_steps` is called each step is planned.
    """

    _device: SimulatedExecutor | None = None
    _max_steps = 1
    _open: Stretch | None = None  # the newest step in flight, if it may stand for several
    _known: Stretch | None = None  # the same, from the call before
    _num_appended = 0

    def skip_steps(self, device: SimulatedExecutor, *, max_steps: int) -> None:
        """Compute up to ``max_steps`` steps at once from now on, unless something looks at each step, or ranks have blocks of their own.

        Args:
            device: The engine's executor.
            max_steps: At least 1.
        """
        is_divided = len(self._state.blocks.parts) > 1
        is_watched = self._stages.after_step or self._accounting.is_watched or self._policy.beside is not None
        if not (is_watched or is_divided or self._state.on_filled or self._scheduler.propose):
            self._device, self._max_steps = device, max_steps
            self._in_flight.before_drain = self._before_drain
            self._scheduler.next_plan = functools.partial(self._next_plan, device, self._scheduler.next_plan)  # type: ignore[method-assign]

    @property
    def is_steady(self) -> bool:
        """True if nothing but a stretch is in flight, and :meth:`step` would wait for as many steps as have ended until now."""
        return self._open is not None and len(self._in_flight) == 1 and self._is_unchanged()

    def step(self) -> TokenDeltas:
        """Take a step as any engine; a stretch that was submitted alone is not waited for before the next call."""
        if self._open is not None and not self._is_unchanged():
            self._close()
        self._known = self._open
        return super().step()

    def _is_unchanged(self) -> bool:
        """Return whether another plan would equal that of the open step: the same sequences run, and none was added."""
        state = self._state
        return self._in_flight[-1].plan.slots is state.running and self._num_appended == state.waiting.num_appended

    def _close(self) -> None:
        """Have the open step be a step as any other."""
        assert self._open is not None, "only an open step is closed"
        self._open.close()
        self._open = None

    def _before_drain(self) -> None:
        if self._open is not None and len(self._in_flight) == 1:
            self._close()

    def _submit_next(self) -> bool:
        if self._open is not None:
            return False  # the next plan depends on how many steps this one stands for
        if not super()._submit_next():
            return False
        pending = self._in_flight[-1].pending if self._in_flight else None
        if isinstance(pending, Stretch):
            self._open, self._num_appended = pending, self._state.waiting.num_appended
        return True

    def _next_plan(
        self, device: SimulatedExecutor, next_plan: Callable[[Sequence[int]], Plan | None], suspects: Sequence[int]
    ) -> Plan | None:
        plan = next_plan(suspects)
        device.max_steps = 1 if plan is None else self._steady_steps(plan)
        return plan

    def _steady_steps(self, plan: Plan) -> int:
        """Return in how many steps nothing is to be decided: as the policy promises, none reaches its limit, and blocks are enough."""
        state, table, policy = self._state, self._state.table, self._policy
        if plan.slots is not state.running or not isinstance(policy.strategy, SupportsSteadySteps):
            return 1
        places, ends = plan.slots.astype(np.intp), plan.starts + 1
        most = min(self._max_steps, int((table.max_total_tokens[places] - ends).min()) - 1)
        if most < 2 or 1 in (ends <= table.num_prompt_tokens[places]).tobytes():
            return 1  # the last prompt token alone looks like a decode, and the token after it has a time of its own
        most = min(most, self._promised())
        held, size = table.num_blocks[places], state.block_size

        def lacks(num_steps: int) -> bool:  # for the step after them, planned before the last of them is committed
            return int(np.maximum(-(-(ends + num_steps) // size) - held, 0).sum()) > state.blocks.num_available

        return bisect_left(range(2, most + 1), True, key=lacks) + 1 if lacks(most) else most

    def _promised(self) -> int:
        """Return for how many steps the policy leaves room for all decodes.

        Raises:
            StepFailedError: It raised, or its answer is no whole number from 1 on.
        """
        return cast("SupportsSteadySteps", self._policy.ask).steady_steps(self._scheduler.views.view())

    def _commit_oldest(self) -> TokenDeltas:
        stretch = self._open
        if stretch is None or len(self._in_flight) > 1:
            return super()._commit_oldest()
        if stretch is not self._known:
            return self._stages.end_step(
                None, None, self._endings.announce_all(_NOTHING)
            )  # how many steps it has is decided when it is waited for
        deltas = self._stages.end_step(None, None, self._endings.announce_all(self._commit_stretch(stretch)))
        if self._depth > 1:
            self._submit_next()  # as it would have been before the last of these steps was over
        return deltas

    def _commit_stretch(self, stretch: Stretch) -> TokenDeltas:
        """Wait for the open step, and commit its tokens: several of each sequence, as of accepted drafts."""
        step = self._in_flight.popleft()
        output, self._open = stretch.wait(), None
        step.output_s, num_steps = self._time.hold(), stretch.num_steps
        self._progress.num_idle_steps = 0
        if num_steps > 1:
            self._grow(step.plan, num_steps)
            lengths: Int32Array = np.full(step.plan.num_sequences, num_steps, np.int32)
            step.plan = attrs.evolve(step.plan, num_scheduled=lengths, num_tokens=num_steps * len(lengths))
        deltas = self._committer.commit(step.plan, output)
        step.commit_s = self._clock.now_s() - step.output_s
        self._accounting.committed(step, output, deltas)
        self.totals.num_steps += num_steps - 1
        self.totals.num_sequence_steps += len(deltas.slots) * (num_steps - 1)
        return deltas

    def _grow(self, plan: Plan, num_steps: int) -> None:
        """Count the steps after the first one as planned, with blocks as these steps would have taken them one by one.

        Args:
            plan: Whose sequences still run, and no plan was made since.
            num_steps: That were computed, at least 2.
        """
        state, table, size = self._state, self._state.table, self._state.block_size
        places = plan.slots.astype(np.intp)
        firsts, ends = table.num_blocks[places], plan.starts + num_steps
        missing = np.maximum(-(-ends // size) - firsts, 0)
        number = int(missing.sum())
        if number:
            sequences = np.repeat(np.arange(len(places)), missing)
            columns = firsts[sequences] + np.arange(number) - np.repeat(np.cumsum(missing) - missing, missing)
            order = np.lexsort((sequences, columns * size - plan.starts[sequences]))  # by step, then as in the plan
            rows, columns = plan.rows[sequences[order]], columns[order].astype(np.int32)
            state.rows.write_blocks(rows, columns, state.blocks.allocate(number))
            table.num_blocks[places] += missing
        table.num_computed_tokens[places] += num_steps - 1
        table.num_tokens[places] += num_steps - 1
        self._scheduler.next_step += num_steps - 1
