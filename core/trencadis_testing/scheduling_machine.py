"""Random histories of an engine under a scheduling policy, as a hypothesis state machine.

Requests arrive, steps run, requests are aborted, KV transfers arrive, fail or are late, drafts are accepted in part, the engine
pauses, time passes, and the KV cache is too small for all. A policy may not fail, stop the work, or preempt without end. Imported by
the suite when it is run: hypothesis is needed here and nowhere else.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import attrs
from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from trencadis.clock import SimulatedClock
from trencadis.errors import PromptTooLongError, RequestRefusedError, StepFailedError
from trencadis.interfaces import ConnectorPair, SchedulingPolicy, Speculator
from trencadis.records import FinishedSequence, FinishReason, Int32Array, Request, SamplingParams, TokenDeltas
from trencadis_testing.doubles import LoopConnector, ScriptedSpeculator
from trencadis_testing.engines import make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend, fake_text

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
        layout: Layout of the backend.
        has_drafts: Whether there is a speculator.
        transfers: Answers of a KV connector: ``delay``, ``pending``, ``holds``, and ``valid_tokens``, which the transfer ids take turns in
            (None: all are). None: there is no connector.
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
    """One history. A subclass sets ``make`` and ``world``; engine tests add checks of the engine itself in further subclasses."""

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
        self.token_budget = sizes["max_num_batched_tokens"]
        backend = FakeBackend(layout=world.layout, max_model_len=self.max_model_len, max_prefill_batch_size=2)
        self.engine = make_engine(
            policy=self.policy,
            executor=self.executor_of(backend),
            clock=self.clock,
            warmup=False,
            speculator=world.speculator(),
            connector=world.connector(),
            **sizes,
        )
        self.live: dict[str, Request] = {}
        self.num_seen = self.num_added = self.num_ended = self.num_idle = 0
        self.num_steps = self.num_steps_owed = self.num_withheld_blocks = 0
        self.is_sound = True

    def executor_of(self, backend: FakeBackend) -> FakeExecutor:
        """Return the executor of a history."""
        return FakeExecutor(backend)

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
        self.live[request.request_id] = request
        self.num_steps_owed += 2 * (len(request.prompt_token_ids) + (request.params.max_tokens or 0)) + 20
        self._added(request)

    @rule(count=st.sampled_from([2, 5, 12]), seconds=st.sampled_from([0.0, 0.0, 0.3, 100.0]))
    def step(self, count: int, seconds: float) -> None:
        """Steps run; before them time may pass."""
        self.clock.advance(seconds)
        for _ in range(count):
            self._step()

    @precondition(lambda self: bool(self.live))
    @rule(event=st.sampled_from(["abort", "abort", "abort preempted", "pause"]), choice=st.integers(0, 1000))
    def disturb(self, event: str, choice: int) -> None:
        """A client goes away, all clients of preempted requests go away, or the engine pauses for some steps."""
        if event == "abort":
            self._abort(sorted(self.live)[choice % len(self.live)])
        elif event == "abort preempted":
            self._abort_preempted()
        else:
            self._pause(1 + choice % 4)

    def _abort_preempted(self) -> None:
        for name, sequence in self.engine.inspect().sequences.items():
            if sequence.num_preemptions and sequence.state != "running":
                self._abort(name)

    def _abort(self, name: str) -> None:
        end = self.engine.abort(name)
        assert end is not None
        assert end.finish_reason is FinishReason.ABORT
        self._leave(name)

    def _pause(self, num_steps: int) -> None:
        self.engine.is_paused = True
        for _ in range(num_steps):
            self._step()
        self.engine.is_paused = False

    def teardown(self) -> None:
        """Everything that came ends (1, 20), and preemptions come to rest (22)."""
        if not getattr(self, "is_sound", False):
            return  # a check has failed already
        # Each alone takes at most a step a token; twice that is left for what preemptions compute again.
        for _ in range(self.num_steps_owed + 50):
            if not self.engine.has_work:
                break
            self._step()
        assert not self.live, f"20: {sorted(self.live)} are not done"
        assert self.num_added == self.num_ended, "1: a request is lost"
        num_preempted = self.engine.totals.num_preempted
        assert num_preempted <= 20 * (self.num_added + 1), f"22: {num_preempted} preemptions"

    # -------------------------------------------------------------------------------------------------- checks

    def _step(self) -> None:
        """Let the engine take a step, and check what came of it."""
        self.is_sound = False
        deltas = self.engine.step()
        self.clock.advance(0.05)
        assert not self.engine.totals.num_failed_steps, "27: a step failed"
        self._stepped(deltas)
        for end in deltas.finished:
            self._check_end(end)
            self._leave(end.request_id)
        self._check_progress(deltas)
        self.is_sound = True

    def _added(self, request: Request) -> None:
        """Called after a request was accepted."""

    def _stepped(self, deltas: TokenDeltas) -> None:
        """Called after a step."""

    def _check_progress(self, deltas: TokenDeltas) -> None:
        """With work that can run, the engine does not idle (19)."""
        is_kept = self.num_withheld_blocks or self.engine.is_paused or self.engine.is_stalled
        could = self.engine.num_running or self.engine.num_waiting
        has_run, self.num_steps = self.engine.totals.num_steps > self.num_steps, self.engine.totals.num_steps
        idles = could and not is_kept and not has_run and not deltas.finished
        self.num_idle = self.num_idle + 1 if idles else 0
        assert self.num_idle < 3, "19: three steps in a row without work, and there is some"

    def _check_end(self, end: FinishedSequence) -> None:
        assert end.finish_reason is not FinishReason.ERROR, end.error
        request = self.live[end.request_id]
        prompt, params = list(request.prompt_token_ids), request.params
        most = min(params.max_tokens or 0, self.max_model_len - len(prompt))
        text = fake_text(prompt, most, eos=-1 if params.ignore_eos else 0)
        assert end.token_ids.tolist() == text, f"27: the text of {end.request_id}"

    def _leave(self, name: str) -> None:
        del self.live[name]
        self.num_ended += 1


def run_histories(
    make: Callable[[], SchedulingPolicy],
    *,
    may_refuse: bool,
    num_histories: int,
    num_rules: int,
    machine: type[PolicyMachine] = PolicyMachine,
) -> None:
    """Run random histories, the same ones every time.

    Args:
        make: Makes a policy for each.
        may_refuse: Whether ``admit`` may refuse.
        num_histories: How many.
        num_rules: Most events of each.
        machine: Makes and checks them.

    Raises:
        AssertionError: A check failed; hypothesis prints the history.
    """
    body = {"make": staticmethod(make), "may_refuse": may_refuse, "__doc__": machine.__doc__}
    for number in range(num_histories):
        history = type("PolicyHistory", (machine,), body | {"world": World.numbered(number)})
        run_state_machine_as_test(
            seed(number)(history),
            settings=settings(
                max_examples=3,  # the first two are the shortest there are
                stateful_step_count=num_rules,
                database=None,
                deadline=None,
                phases=(Phase.explicit, Phase.generate),
                suppress_health_check=list(HealthCheck),
            ),
        )
