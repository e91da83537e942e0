"""What policies declare of themselves, and changes of the work that must not matter to any: part of the suite.

A policy that declares an order is held to it: from the outside, in whole engines, whatever it keeps inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import RequestRefusedError
from trencadis.interfaces import PendingStep, SchedulerView, SchedulingPolicy
from trencadis.records import Batch, FinishReason, Int32Array, Request, SamplingParams, TokenDeltas
from trencadis_testing.engines import make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend

if TYPE_CHECKING:
    from trencadis.engine.engine import Engine

__all__ = ["DeclaredBehaviour"]

_MAX_STEPS = 4000
_PROMPT_PRICE, _OUTPUT_PRICE = 1.0, 2.0


@attrs.frozen
class _Planned:
    """The decisions of one plan.

    Attributes:
        names: Live requests by slot.
        before: Requests that ran before it, by admission.
        admitted: Requests that it let run, in order.
        preempted: Requests that it preempted, in order.
    """

    names: dict[int, str]
    before: list[str]
    admitted: list[str]
    preempted: list[str]


class _Watched(FakeExecutor):
    """Calls a function with every batch."""

    def __init__(self, backend: FakeBackend, on_submit: Callable[[], None]) -> None:
        super().__init__(backend)
        self._on_submit = on_submit

    def submit(self, batch: Batch) -> PendingStep:
        self._on_submit()
        return super().submit(batch)


class _Scene:
    """An engine whose plans are kept, by request; it makes one plan a step."""

    def __init__(self, policy: SchedulingPolicy, *, block_size: int = 4, **sizes: Any) -> None:
        self.clock = SimulatedClock()
        backend = FakeBackend(eos=-1, max_model_len=sizes["num_blocks"] * block_size)
        self.engine: Engine = make_engine(
            policy=policy,
            executor=_Watched(backend, self._planned),
            clock=self.clock,
            warmup=False,
            block_size=block_size,
            async_scheduling=False,
            max_wait_s=1e9,
            **sizes,
        )
        self.first_served: list[str] = []
        self.plans: list[_Planned] = []
        self._before = self.running()

    def add(self, name: str, prompt: Sequence[int], num_tokens: int, **fields: Any) -> bool:
        """Add a request; False if the policy refuses it."""
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
        try:
            self.engine.add(Request(request_id=name, prompt_token_ids=tuple(prompt), params=params, **fields))
        except RequestRefusedError:
            return False
        return True

    def steps(self, count: int) -> TokenDeltas:
        """Take steps, while time stands still; returns what came of the last one."""
        deltas = None
        for _ in range(count):
            self._before = self.running()
            deltas = self.engine.step()
            faults = {end.error for end in deltas.finished if end.finish_reason is FinishReason.ERROR}
            assert not faults, faults
        assert deltas is not None
        return deltas

    def end(self) -> list[str]:
        """Serve all; returns the requests in the order in which they were first admitted."""
        for _ in range(_MAX_STEPS):
            if not self.engine.has_work:
                return self.first_served
            self.steps(1)
        raise AssertionError(f"20: after {_MAX_STEPS} steps there is work")

    def waiting(self) -> list[str]:
        """Return the waiting requests all of whose tokens are known: only room may keep them."""
        now = self.engine.inspect()
        waiting = [now.by_slot[slot] for slot in now.waiting]
        return [one.request.request_id for one in waiting if one.num_tokens == one.num_known_tokens]

    def running(self) -> list[str]:
        """Return the running requests, by admission."""
        now = self.engine.inspect()
        return [now.by_slot[slot].request.request_id for slot in now.running]

    def _planned(self) -> None:
        """Note the plan that is about to be submitted."""
        now, before = self.engine.inspect(), self._before
        names = {sequence.slot: name for name, sequence in now.sequences.items()}
        admitted = [names[slot] for slot in now.running if names[slot] not in before]
        # Each preempted sequence goes to the head of the queue.
        preempted = [names[slot] for slot in reversed(now.waiting) if names[slot] in before]
        self.plans.append(_Planned(names, before, admitted, preempted))
        self.first_served += [name for name in admitted if name not in self.first_served]


class _AskedAgain(SchedulingPolicy):
    """Asks a policy four times for the first order, which the engine then does not use.

    Attributes:
        orders: The different answers.
    """

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self.orders: set[tuple[int, ...]] = set()

    def on_added(self, *, slot: int, request: Request) -> None:
        self._policy.on_added(slot=slot, request=request)

    def order(self, view: SchedulerView) -> Int32Array:
        if not self.orders:
            self.orders = {tuple(self._policy.order(view).tolist()) for _ in range(4)}
        return view.waiting


class DeclaredBehaviour:
    """Tests of orders that a policy declares, and of changes that no policy may mind.

    ``declares`` may hold ``arrival_order`` (who comes first is admitted first, and the youngest is preempted), ``priority_order`` (the
    smallest number is admitted first, and the largest is preempted) and ``fairness`` (tenants with work get equal service by weight,
    prompt tokens at 1 and output tokens at 2). ``counts_tokens`` says that it has constants in tokens, so that their unit matters.
    """

    declares: ClassVar[frozenset[str]] = frozenset()
    counts_tokens = False

    def make(self) -> SchedulingPolicy:
        """Return a fresh policy."""
        raise NotImplementedError(f"{type(self).__name__} needs make = YourPolicy, or a method make(self)")

    def test_declared_order_of_arrival_is_kept(self) -> None:
        """15, 23: first served as they came, and of those that run the youngest is preempted."""
        self._needs("arrival_order")
        names = [str(number) for number in range(30)]
        scene = _Scene(self.make(), num_blocks=24, max_num_seqs=4, max_num_batched_tokens=16)
        for number, name in enumerate(names):
            scene.add(name, _prompt(number, 3 + number * 7 % 19), 4 + number * 5 % 23, priority=-number, tenant=name)
        assert scene.end() == names, "23: not first come, first served"
        self._check_victims(scene, {name: number for number, name in enumerate(names)})

    def test_declared_priorities_are_kept(self) -> None:
        """15, 24: nobody is admitted before a more urgent one, and the least urgent one is preempted."""
        self._needs("priority_order")
        scene = _Scene(self.make(), num_blocks=16, max_num_seqs=3, max_num_batched_tokens=64)
        urgency = {}
        for number in range(40):
            name = str(number)
            urgency[name] = number * 13 % 7
            scene.add(name, _prompt(number, 3 + number * 7 % 9), 4 + number * 5 % 23, priority=urgency[name])
            if number % 3 == 0:
                scene.steps(1)
                self._check_urgency(scene, urgency)
        while scene.engine.has_work:
            scene.steps(1)
            self._check_urgency(scene, urgency)
        self._check_victims(scene, urgency)

    def test_declared_priorities_are_kept_of_those_that_run(self) -> None:
        """24: with a policy that preempts, nobody goes on running for long while somebody more urgent waits."""
        self._needs("priority_order")
        policy = self.make()
        if not policy.preempts:
            pytest.skip("the policy declares that nothing is preempted")
        scene = _Scene(policy, num_blocks=60, max_num_seqs=2, max_num_batched_tokens=24)
        for number, name in enumerate(("late", "later", "urgent")):
            scene.add(name, _prompt(number, 9), 30, priority=9 - 4 * number)
            scene.steps(2)
        assert set(scene.running()) == {"later", "urgent"}, "24: somebody less urgent goes on running"

    @pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0)])
    def test_declared_fairness_is_bounded(self, weights: tuple[float, float]) -> None:
        """25: two tenants with work in the queue drift apart by no more than the bound, across preemptions too.

        The bound is ``2 × max(prompt price × longest prompt, output price × tokens in the cache)``, over the smallest weight.
        Source: Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, theorem 4.4.
        """
        self._needs("fairness")
        num_blocks, longest = 20, 12
        scene = _Scene(self.make(), num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=32)
        weight_of = dict(zip("ab", weights, strict=True))
        prompts = {}
        for number in range(160):
            # One tenant's requests came first, are long, and are preempted most.
            name = f"{'a' if number < 80 else 'b'} {number}"
            prompts[name] = longest if number < 80 else 4
            scene.add(name, _prompt(number, prompts[name]), 24, tenant=name[0], weight=weight_of[name[0]])
        bound = 2 * max(_PROMPT_PRICE * longest, _OUTPUT_PRICE * num_blocks * 4) / min(weights)
        service: dict[str, float] = dict.fromkeys("ab", 0.0)
        seen: set[str] = set()
        while {name[0] for name in scene.waiting()} == {"a", "b"}:
            deltas = scene.steps(1)
            for name in set(scene.first_served) - seen:
                service[name[0]] += _PROMPT_PRICE * prompts[name] / weight_of[name[0]]
                seen.add(name)
            names = scene.plans[-1].names
            for slot, count in zip(deltas.slots.tolist(), deltas.num_tokens.tolist(), strict=True):
                tenant = names[slot][0]
                service[tenant] += _OUTPUT_PRICE * count / weight_of[tenant]
            gap = abs(service["a"] - service["b"])
            assert gap <= bound, f"25: {gap:.0f} apart, the bound is {bound:.0f}"
        assert min(service.values()) > 2 * bound, "25: too little was served to tell"

    def test_arrivals_split_over_two_steps_that_admit_nobody_are_served_the_same(self) -> None:
        """Metamorphic: when the rows are taken, it does not matter in which of two steps somebody came."""

        def served(*, second_half_after: bool) -> list[str]:
            scene = self._full_scene()
            for number in range(12):
                if number == 6 and second_half_after:
                    scene.steps(1)
                self._add(scene, str(number), number)
            if not second_half_after:
                scene.steps(1)
            return scene.end()

        assert served(second_half_after=False) == served(second_half_after=True)

    def test_lengths_and_blocks_of_another_unit_are_served_the_same(self) -> None:
        """Metamorphic: all lengths, the block and the budget four times as long, and the order is the same."""
        if self.counts_tokens:
            pytest.skip("the policy has constants in tokens")

        def served(unit: int) -> list[str]:
            scene = _Scene(
                self.make(), num_blocks=80, block_size=4 * unit, max_num_seqs=3, max_num_batched_tokens=8 * unit
            )
            for number in range(12):
                prompt = [token for token in _prompt(number, 2 + number * 5 % 11) for _ in range(unit)]
                scene.add(str(number), prompt, 1, tenant="ab"[number % 2], priority=number * 7 % 3)
            return scene.end()

        assert served(1) == served(4), (
            "another unit of length is another order; a policy with constants in tokens sets counts_tokens"
        )

    def test_a_tenant_that_is_idle_changes_nothing_for_the_others(self) -> None:
        """Metamorphic: somebody who was here once and has no work now."""
        if self._draws_lots():
            pytest.skip("the policy puts the same queue in another order each time: whoever was here changes its draws")

        def served(*, with_idle: bool) -> list[str]:
            scene = _Scene(self.make(), num_blocks=60, max_num_seqs=2, max_num_batched_tokens=24)
            if with_idle:
                self._add(scene, "idle", 50, tenant="idle")
                scene.end()
            for number in range(12):
                self._add(scene, str(number), number)
            return [name for name in scene.end() if name != "idle"]

        assert served(with_idle=True) == served(with_idle=False)

    # ------------------------------------------------------------------------------------------------- innards

    def _needs(self, declared: str) -> None:
        if declared not in self.declares:
            pytest.skip(
                f"the policy does not promise {declared}; one that does sets "
                f'declares = frozenset({{"{declared}"}}) in its test class'
            )

    def _draws_lots(self) -> bool:
        asked = _AskedAgain(self.make())
        scene = _Scene(asked, num_blocks=60, max_num_seqs=2, max_num_batched_tokens=24)
        for number in range(12):
            self._add(scene, str(number), number)
        scene.steps(1)
        return len(asked.orders) > 1

    def _full_scene(self) -> _Scene:
        """Return an engine whose two rows are taken for the next steps."""
        scene = _Scene(self.make(), num_blocks=60, max_num_seqs=2, max_num_batched_tokens=24)
        for name in ("first", "second"):
            self._add(scene, name, len(name) + 60, priority=0)
        scene.steps(1)
        return scene

    @staticmethod
    def _add(scene: _Scene, name: str, number: int, **fields: Any) -> None:
        fields = {"tenant": "ab"[number % 2], "priority": number * 7 % 3} | fields
        scene.add(name, _prompt(number, 2 + number * 5 % 17), 12, **fields)

    @staticmethod
    def _check_urgency(scene: _Scene, urgency: dict[str, int]) -> None:
        waiting = [urgency[name] for name in scene.waiting()]
        admitted = [urgency[name] for name in scene.plans[-1].admitted]
        if waiting and admitted:
            assert max(admitted) <= min(waiting), "24: somebody less urgent was admitted first"

    @staticmethod
    def _check_victims(scene: _Scene, key: dict[str, int]) -> None:
        """The first victim of a step has the largest key of all that run."""
        num_checked = 0
        for plan in scene.plans:
            if plan.preempted:
                num_checked += 1
                victim, before = plan.preempted[0], plan.before
                assert key[victim] == max(key[name] for name in before), f"15: {victim} of {before}"
        assert num_checked, "15: nobody was preempted"


def _prompt(number: int, length: int) -> list[int]:
    """Return a prompt that begins like no other's."""
    return [(number * 11 + i * (number % 5 + 1)) % 97 for i in range(length)]
