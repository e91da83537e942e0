"""Random histories of an engine under a scheduling policy, as a hypothesis state machine.

Requests arrive, steps run, requests are aborted, blocks are taken away and given back, KV transfers arrive, fail or are late, drafts are
accepted in part, the engine pauses, time passes; after each of these every invariant is checked against books that are kept
outside. Imported by the suite when it is run: hypothesis is needed here and nowhere else.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from trencadis.clock import SimulatedClock
from trencadis.errors import PromptTooLongError, RequestRefusedError, StepFailedError
from trencadis.interfaces import ConnectorPair, SchedulingPolicy, Speculator
from trencadis.records import FinishedSequence, FinishReason, Int32Array, Request, SamplingParams, TokenDeltas
from trencadis_testing.doubles import LoopConnector, ScriptedSpeculator
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.invariants import broken_invariants
from trencadis_testing.scheduling_books import Books
from trencadis_testing.scheduling_watch import PlanWatch, StepWatch

__all__ = ["PolicyMachine", "World", "run_histories"]

_BLOCK_SIZE = 4
_SYSTEM = tuple(range(20, 28))
_MAX_DRAFTS = 3

_PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([2, 9, 25]),
    ignore_eos=st.booleans(),
    temperature=st.just(0.0),
)


@attrs.frozen
class World:
    """The engine that a history is about.

    Attributes:
        sizes: Fields of the tables ``[engine]`` and ``[cache]``.
        layout: Of the backend.
        has_drafts: Whether there is a speculator.
        transfers: What is said of a KV connector: ``delay``, ``pending``, ``holds``, and ``valid_tokens``, which the transfer ids take turns in (None:
            all are). None: there is no connector.
    """

    sizes: dict[str, Any]
    layout: str
    has_drafts: bool
    transfers: dict[str, Any] | None

    @classmethod
    def numbered(cls, number: int) -> World:
        """Return the world of a history. Few of them meet every feature already, and many every pair of features. Pure."""
        rng = random.Random(number)
        sizes = {
            "num_blocks": rng.choice([7, 10, 14, 20, 60]),
            "max_num_seqs": rng.choice([1, 3, 4, 6]),
            "max_num_batched_tokens": rng.choice([3, 16, 40]),
            "async_scheduling": rng.random() < 0.5,
            "prefix_caching": rng.random() < 0.7,
            "max_preemptions": rng.choice([1, 16]),
            "max_wait_s": rng.choice([0.5, 60.0]),
            "preemption": "swap" if number % 2 else "recompute",
            "swap_blocks": rng.choice([6, 64, 64]),
            "max_loras": rng.choice([0, 1, 2]),
            "max_adapter_skips": rng.choice([2, 64]),
            # A rule may let 100 s pass in a step, which costs an impatient engine its connector.
            "release_timeout_s": 1e6 if number % 4 < 2 else 60.0,
        }
        transfers = {
            "delay": rng.choice([1, 3]),
            "pending": rng.choice([0, 2]),
            "holds": rng.random() < 0.5,
            "valid_tokens": rng.choice([(None,), (None, 4, 0), (0,)]),
        }
        layout = rng.choice(["ragged", "padded"])
        return cls(sizes, layout, has_drafts=number % 3 == 1, transfers=transfers if number % 3 == 2 else None)

    def connector(self) -> ConnectorPair | None:
        """Return a new connector, if there is one."""
        if self.transfers is None:
            return None
        valid = self.transfers["valid_tokens"]
        more = {name: value for name, value in self.transfers.items() if name != "valid_tokens"}
        return LoopConnector(
            block_size=_BLOCK_SIZE, fail=lambda transfer_id: valid[transfer_id % len(valid)], **more
        ).pair()

    def speculator(self) -> Speculator | None:
        """Return a new speculator, if there is one: the first 0, 1, 2 or all 3 drafts are right, by the length of the text."""
        return ScriptedSpeculator(_drafts, max_draft_tokens=_MAX_DRAFTS) if self.has_drafts else None


def _drafts(tokens: Int32Array) -> list[int]:
    run, num_right = fake_text(tokens.tolist(), _MAX_DRAFTS, eos=-1), 5 * len(tokens) % (_MAX_DRAFTS + 1)
    return [token if i < num_right else (token + 1) % 97 for i, token in enumerate(run)]


class PolicyMachine(RuleBasedStateMachine):
    """One history. A subclass sets ``make`` and ``world``."""

    make: Callable[[], SchedulingPolicy]
    world: World
    may_refuse = False

    @initialize()
    def build(self) -> None:
        """Make the engine."""
        world, sizes = type(self).world, type(self).world.sizes
        note(f"{world}")
        self.clock = SimulatedClock()
        self.policy = type(self).make()
        self.max_model_len = sizes["num_blocks"] * _BLOCK_SIZE
        self.token_budget, self.has_adapters = sizes["max_num_batched_tokens"], sizes["max_loras"] > 0
        backend = FakeBackend(layout=world.layout, max_model_len=self.max_model_len, max_prefill_batch_size=2)
        self.watch = StepWatch(backend, token_budget=self.token_budget, max_num_seqs=sizes["max_num_seqs"])
        self.engine = make_engine(
            policy=self.policy,
            executor=self.watch,
            clock=self.clock,
            warmup=False,
            speculator=world.speculator(),
            connector=world.connector(),
            **sizes,
        )
        self.watch.state = self.engine._state  # noqa: SLF001 - shadow accounting looks inside
        self.plans = PlanWatch(
            self.engine, max_drafts=_MAX_DRAFTS if world.has_drafts else 0, max_loras=sizes["max_loras"]
        )
        self.books = Books(
            block_size=_BLOCK_SIZE, max_model_len=self.max_model_len, swaps=sizes["preemption"] == "swap"
        )
        self.num_seen = self.num_added = self.num_ended = self.num_idle = 0
        self.num_steps_owed = 0
        self.is_sound = True
        self.withheld: Any = np.empty(0, np.int32)
        self.engine._withheld_by_test = {}  # type: ignore[attr-defined] # noqa: SLF001

    # --------------------------------------------------------------------------------------------------- rules

    @rule(
        count=st.sampled_from([1, 3, 6]),
        num_steps=st.sampled_from([0, 1, 3]),
        kind=st.integers(0, 3),
        length=st.sampled_from([1, 4, 6, 8, 12, 23]),
        shares=st.booleans(),
        params=_PARAMS,
        priority=st.sampled_from([0, 0, 1, 7]),
        tenant=st.sampled_from(["", "blue", "green"]),
        cache_salt=st.sampled_from(["", "", "salt"]),
        adapter=st.sampled_from(["", "", "x", "y", "z"]),
        weight=st.sampled_from([1.0, 1.0, 4.0]),
        target_s=st.sampled_from([0.01, 0.4, float("inf")]),
    )
    def arrive(
        self,
        count: int,
        num_steps: int,
        kind: int,
        length: int,
        shares: bool,
        target_s: float,
        adapter: str,
        **more: Any,
    ) -> None:
        """Some requests come, perhaps with a prompt that was there before, and some steps run."""
        for number in range(count):
            own = tuple(((kind + number) % 4 * 13 + i * 7) % 97 for i in range(length))
            request = Request(
                request_id=f"request {self.num_seen}",
                prompt_token_ids=_SYSTEM + own if shares else own,
                ttft_target_s=target_s,
                tpot_target_s=target_s,
                adapter=adapter if self.has_adapters else "",
                **more,
            )
            self.num_seen += 1
            self._add(request)
        for _ in range(num_steps):
            self._step()

    def _add(self, request: Request) -> None:
        """Add a request; one that can never fit is refused at once (18)."""
        too_long = len(request.prompt_token_ids) >= self.max_model_len
        try:
            self.engine.add(request)
        except PromptTooLongError:
            assert too_long, "18: a request that fits was refused"
            return
        except RequestRefusedError as error:
            if isinstance(error.__cause__, StepFailedError):
                raise  # the policy failed: that is no refusal
            assert self.may_refuse, "admit() refuses; declare may_refuse"
            return
        assert not too_long, "18: a request that can never fit was taken"
        self.num_added += 1
        self.books.open(request)
        self.num_steps_owed += 2 * len(self.books.live[request.request_id].text) + 20
        self._check()

    @rule(count=st.sampled_from([2, 5, 12]), seconds=st.sampled_from([0.0, 0.0, 0.3, 100.0]))
    def step(self, count: int, seconds: float) -> None:
        """Steps run; before them time may pass."""
        self.clock.advance(seconds)
        for _ in range(count):
            self._step()

    @precondition(lambda self: bool(self.books.live))
    @rule(
        what=st.sampled_from(["abort", "squeeze", "drain", "abort", "squeeze", "pause"]),
        choice=st.integers(0, 1000),
        share=st.sampled_from([0.3, 0.7]),
    )
    def disturb(self, what: str, choice: int, share: float) -> None:
        """A client goes away, blocks are taken from outside and later given back, or the engine pauses for some steps."""
        if what == "squeeze":
            self._squeeze(share)
        elif what == "drain":
            self._drain(num_steps=4 + choice % 4)
        elif what == "pause":
            self._pause(1 + choice % 4)
        else:
            self._abort(sorted(self.books.live)[choice % len(self.books.live)])
        self._check()

    def _drain(self, *, num_steps: int) -> None:
        """All free blocks go, so that running sequences lose theirs; then the clients of those that did go away."""
        if not self.withheld.size:
            self._squeeze(1.0)
        for _ in range(num_steps):
            self._step()
        for name in [name for name, book in self.books.live.items() if book.is_preempted]:
            self._abort(name)
        if self.withheld.size:
            self._squeeze(0.0)

    def _abort(self, name: str) -> None:
        assert self.engine.abort("nobody") is None, "32: an unknown request was aborted"
        end = self.engine.abort(name)
        assert end is not None
        assert end.finish_reason is FinishReason.ABORT
        assert self.engine.abort(name) is None, "32: aborted twice"
        self._leave(name)

    def _pause(self, num_steps: int) -> None:
        """Nothing is planned while the engine is paused, and nobody is lost (35)."""
        self.engine.is_paused = True
        for _ in range(num_steps):
            assert not self._step(), "35: a step was planned in a pause"
        self.engine.is_paused = False

    def _squeeze(self, share: float) -> None:
        blocks = self.engine._state.blocks  # noqa: SLF001
        if self.withheld.size:
            blocks.release(self.withheld, now_s=self.clock.now_s())
            self.withheld = self.withheld[:0]
        else:
            self.withheld = blocks.allocate(int(blocks.num_available * share))
        self.engine._withheld_by_test = dict.fromkeys(self.withheld.tolist(), 1)  # type: ignore[attr-defined] # noqa: SLF001

    def teardown(self) -> None:
        """Everything that came ends (1, 20, 22), and no block is lost (12)."""
        if not getattr(self, "is_sound", False):
            return  # a check has failed already
        if self.withheld.size:
            self._squeeze(0.0)
        # Each alone takes at most a step a token; twice that is left for what preemptions compute again.
        for _ in range(self.num_steps_owed + 50):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.books.live, f"20: {sorted(self.books.live)} are not done"
        assert self.num_added == self.num_ended, "1: a request is lost"
        assert self.engine._state.blocks.num_used == 0, "12: a block did not come back"  # noqa: SLF001
        num_preempted = self.books.num_preempted
        assert num_preempted <= 20 * (self.num_added + 1), f"22: {num_preempted} preemptions"

    # -------------------------------------------------------------------------------------------------- checks

    def _step(self) -> bool:
        """Let the engine take a step, and check everything; True if one was planned."""
        self.is_sound = False
        names = {slot: name for name, slot in self.engine._state.slot_of.items()}  # noqa: SLF001
        deltas = self.engine.step()
        self.clock.advance(0.05)
        assert not self.engine.totals.num_failed_steps, "27: a step read what nobody had written there"
        plans = self.plans.take()
        for plan in plans:
            self.books.check_plan(plan, names, token_budget=self.token_budget, may_admit_beside=self.policy.preempts)
        for number, num_emitted in self.watch.take_outputs():
            self.books.committed(number, num_emitted)
        assert {names[slot] for slot in deltas.slots.tolist()} <= set(self.books.live), "32: output after the end"
        for end in deltas.finished:
            self._check_end(end)
            self._leave(end.request_id)
        self._check()
        self._check_progress(bool(plans), deltas)
        self.is_sound = True
        return bool(plans)

    def _check(self) -> None:
        assert broken_invariants(self.engine) == []
        assert self.watch.faults + self.plans.faults == []
        live = set(self.books.live)
        assert set(self.engine._state.slot_of) == live, "1, 3: who lives is not who came and did not end"  # noqa: SLF001

    def _check_progress(self, has_planned: bool, deltas: TokenDeltas) -> None:
        """With work, and nothing that keeps it, the engine does not idle (19)."""
        is_kept = self.withheld.size or self.engine.is_paused or self.engine.is_stalled
        could = self.engine.num_running or self.engine.num_waiting
        idles = could and not is_kept and not has_planned and not deltas.slots.size and not deltas.finished
        self.num_idle = self.num_idle + 1 if idles else 0
        assert self.num_idle < 3, "19: three steps in a row without work, and there is some"

    def _check_end(self, end: FinishedSequence) -> None:
        if end.finish_reason is FinishReason.ERROR:
            # Alone and still without room: that is for the blocks that were taken away here.
            assert self.withheld.size, end.error
            assert "has no room for this sequence alone" in end.error, end.error
            return
        assert end.token_ids.tolist() == self.books.true_output(end.request_id), f"27: the text of {end.request_id}"
        assert end.first_scheduled_s is not None
        assert end.first_token_s is not None
        times = (end.arrival_s, end.first_scheduled_s, end.first_token_s, end.finish_s, self.clock.now_s())
        assert list(times) == sorted(times), f"33: {times}"

    def _leave(self, name: str) -> None:
        self.books.close(name)
        self.num_ended += 1


def run_histories(
    make: Callable[[], SchedulingPolicy], *, may_refuse: bool, num_histories: int, num_rules: int
) -> None:
    """Run random histories, the same ones every time.

    Args:
        make: Makes a policy for each.
        may_refuse: Whether ``admit`` may refuse.
        num_histories: How many.
        num_rules: Most events of each.

    Raises:
        AssertionError: An invariant is broken; hypothesis prints the history.
    """
    body = {"make": staticmethod(make), "may_refuse": may_refuse, "__doc__": PolicyMachine.__doc__}
    for number in range(num_histories):
        machine = type("PolicyHistory", (PolicyMachine,), body | {"world": World.numbered(number)})
        run_state_machine_as_test(
            seed(number)(machine),
            settings=settings(
                max_examples=3,  # the first two are the shortest there are
                stateful_step_count=num_rules,
                database=None,
                deadline=None,
                phases=(Phase.explicit, Phase.generate),
                suppress_health_check=list(HealthCheck),
            ),
        )
