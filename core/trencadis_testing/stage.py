"""Conformance suite of stages."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import numpy as np
import pytest

from trencadis.engine.stage import MOMENTS, EngineParts, Stage
from trencadis.errors import BackendError, RanksLostError, RequestRefusedError
from trencadis.interfaces import AllocationPlan, PendingStep, StageDefinition
from trencadis.records import Batch, FinishedSequence, FinishReason, Pass, Request, SamplingParams, TokenDeltas
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.engines import make_engine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fake_model import fake_text
from trencadis_testing.fakes import FakeBackend
from trencadis_testing.resources import ends_its_threads, growth_bytes

if TYPE_CHECKING:
    from trencadis.engine.engine import Engine
    from trencadis.engine.sequences import Claim, Leaving
    from trencadis.engine.sequences import Sequence as LiveSequence
    from trencadis.engine.step import SubmittedStep
    from trencadis.records import StepOutput

__all__ = ["StageConformance"]

_SEEDS = range(6)
_NUM_BLOCKS = 24
_MAX_STEPS = 2000
_MAX_GROWTH_BYTES = 6.0
"""For each request: what is kept takes a place of 8 in a list at least."""


_BROKEN = "broken on purpose"


class Neighbour(Stage):
    """Another stage, which defines every moment, keeps nothing, and knows when an engine holds something.

    Args:
        refuses: Numbers of the batches that it refuses, counting those of two sequences or more: their steps fail without having run.
        turns_away: Numbers of the requests that it refuses.
        accepts_last: It refuses them after the scheduling policy has accepted them.
    """

    def __init__(
        self, refuses: Sequence[int] = (), turns_away: Collection[int] = (), *, accepts_last: bool = False
    ) -> None:
        self._refuses, self._turns_away = set(refuses), set(turns_away)
        self._num_batches = self._num_requests = 0
        self.accepts_last = accepts_last

    def bind(self, engine: EngineParts) -> None:
        """Take the state."""
        self._state = engine.state

    def accept(self, request: Request) -> Request:
        """Take it as it is, or refuse it."""
        self._num_requests += 1
        if self._num_requests in self._turns_away:
            raise RequestRefusedError(f"request {request.request_id!r} was refused: it is number {self._num_requests}.")
        return request

    def refused(self, request: Request) -> None:
        """Do nothing."""

    def added(self, sequence: LiveSequence) -> str:
        """Let it run."""
        return ""

    def before_step(self) -> None:
        """Do nothing."""

    def claim(self, sequence: LiveSequence, *, num_found: int) -> Claim | None:
        """Have nothing."""
        return None

    def after_plan(self, step: SubmittedStep | None) -> None:
        """Do nothing."""

    def after_build(self, step: SubmittedStep, batch: Batch) -> Batch | None:
        """Refuse some batches; a sequence that is alone in one that fails would be ended."""
        if len(step.plan.slots) < 2:
            return None
        self._num_batches += 1
        if self._num_batches in self._refuses:
            raise BackendError(f"batch {self._num_batches} is refused")
        return None

    def received(self, step: SubmittedStep, output: StepOutput) -> None:
        """Do nothing."""

    def after_step(self, step: SubmittedStep | None, output: StepOutput | None, deltas: TokenDeltas) -> TokenDeltas:
        """Change nothing."""
        return deltas

    def leaving(self, sequence: LiveSequence, leaving: Leaving) -> Claim | None:
        """Keep nothing."""
        return None

    def left(self, finished: FinishedSequence) -> None:
        """Do nothing."""

    def failed(self, plans: Any, error: Exception) -> None:
        """Do nothing."""

    def held(self, *, with_blocks: bool = True) -> list[str]:
        """Return what the engine holds, in words; empty: nothing. Pure."""
        state = self._state
        counts = {
            "live sequences": len(state.slot_of),
            "waiting sequences": len(state.waiting),
            "sequences aside": len(state.aside),
            "rows": len(state.rows.tokens) - state.rows.num_free,
        }
        if with_blocks:
            counts |= {
                "blocks with a reference": state.blocks.num_used,
                "kept blocks (num_kept_blocks)": state.num_kept_blocks,
            }
        return [f"{count} {name}" for name, count in counts.items() if count]


class StageConformance:
    """What every stage must do; inherit from it, and set ``definition``.

    Random but repeatable histories run in whole engines of fakes with few blocks, with the stage and without it. What the stage is good for
    is its own affair. Example::

        class TestTokenCap(StageConformance):
            definition = TOKEN_CAP
            engine = {"tables": {"token_cap": TokenCapConfig(max_tokens_per_tenant=20)}}

    Attributes:
        definition: The definition that the hook ``trencadis_stages`` yields.
        engine: Arguments of :func:`~trencadis_testing.engines.make_engine` with which an engine has the stage.
        backend: Arguments of :class:`~trencadis_testing.fakes.FakeBackend` with which it has.
        stands_beside_transfers: An engine may have it and a KV connector.
    """

    definition: ClassVar[StageDefinition]
    engine: ClassVar[Mapping[str, Any]] = {}
    backend: ClassVar[Mapping[str, Any]] = {}
    stands_beside_transfers: ClassVar[bool] = True

    def test_definition_is_complete(self) -> None:
        """A name that others can put in ``before``, a line for ``trencadis plugins``, and no order against itself."""
        definition = self.definition
        assert isinstance(definition, StageDefinition), f"definition is {definition!r}, no StageDefinition"
        assert re.fullmatch("[a-z][a-z0-9_]*", definition.name), (
            f"name {definition.name!r}: lower-case letters, digits, underscores"
        )
        assert len(definition.summary.splitlines()) == 1, "summary has to be one line"
        assert definition.name not in definition.before, "it cannot act before itself"

    def test_engine_has_the_stage_under_its_name(self) -> None:
        """``engine`` and ``backend`` of the suite must switch it on; a second engine has one of its own."""
        first, second = self._engine(), self._engine()
        name = self.definition.name
        for engine in (first, second):
            try:
                assert isinstance(engine.stage(name), Stage)
            except KeyError:
                raise AssertionError(
                    f"no stage of the engine has the name {name!r}: set engine and backend such that there is one, and let it keep its name"
                ) from None
        assert first.stage(name) is not second.stage(name), "two engines share one stage"

    @pytest.mark.parametrize("place", ["before", "after", "between"])
    @pytest.mark.parametrize("seed", _SEEDS)
    def test_no_text_changes_and_nothing_is_held_in_the_end(self, seed: int, place: str) -> None:
        """Texts are those of an engine without it, beside any other stage; requests come, are preempted, aborted and end."""
        history = _History(self._engine(place=place), seed)
        history.play()
        history.check()
        assert not history.engine.totals.num_failed_steps, "steps failed, though the device did not: see the log"

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_failed_steps_are_contained(self, seed: int) -> None:
        """A step may fail on the device or before it is submitted: its sequences are computed anew, and what was planned has not happened."""
        history = _History(
            self._engine(place="between", neighbour=Neighbour(refuses=(2, 30)), fails=_fails_at(15)), seed
        )
        history.play()
        history.check()

    @pytest.mark.parametrize("accepts_last", [False, True])
    @pytest.mark.parametrize("seed", _SEEDS)
    def test_refused_requests_leave_nothing(self, seed: int, accepts_last: bool) -> None:
        """Another stage may refuse a request that this one has accepted; ``refused`` says so, and no other request suffers."""
        given = Neighbour(turns_away=range(2, 100, 3), accepts_last=accepts_last)
        history = _History(self._engine(place="between", neighbour=given), seed)
        history.play()
        assert history.num_refused, "no request was refused"
        history.check()

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_lost_ranks_lose_no_text(self, seed: int) -> None:
        """With the ranks of a step all KV is lost; every sequence goes on with its tokens."""
        executor = _LosesRanks(self._backend, losses=(3, 12, 13))
        history = _History(self._engine(place="between", executor=executor), seed)
        history.play()
        assert executor.num_restarts, "no ranks were lost"
        history.check()

    @pytest.mark.parametrize("pending", [0, 2])
    @pytest.mark.parametrize("seed", _SEEDS)
    def test_it_stands_beside_kv_transfers(self, seed: int, pending: int) -> None:
        """A KV connector saves and loads blocks of the same sequences, in the stage ``transfer``."""
        if not self.stands_beside_transfers:
            pytest.skip("the stage and a KV connector exclude each other")
        connector = LoopConnector(pending=pending, holds=True)
        history = _History(self._engine(place="between", connector=connector.pair()), seed)
        history.play()
        history.check()

    @pytest.mark.parametrize("moment", MOMENTS)
    def test_faults_of_other_stages_reach_no_further(self, moment: str) -> None:
        """Another stage raises at a moment: a request may end at any of them, also while it is added or a plan is made."""
        given = _faulty(Neighbour, moment, calls=(1, 8))(refuses=(3,), turns_away=(5,))
        history = _History(self._engine(place="between", neighbour=given, contains_faults=True), seed=1)
        history.play()
        assert given.num_faults, f"{moment} was not called"
        history.check(tolerates=_BROKEN)
        stage = history.engine.stage(self.definition.name)
        assert not stage.num_faults, "it raised because another stage did: see the log"

    def test_its_own_faults_reach_no_further(self) -> None:
        """What it raises at a moment costs at most the requests that it was about; every other text is right, and the engine comes to rest."""
        kind = type(self._engine().stage(self.definition.name))
        for moment in MOMENTS:
            if getattr(kind, moment) is getattr(Stage, moment):
                continue
            definition = attrs.evolve(self.definition, make=_making_faulty(self.definition, moment))
            given = Neighbour(refuses=(3,), turns_away=(5,))
            engine = self._engine(place="between", neighbour=given, contains_faults=True, definition=definition)
            history = _History(engine, seed=1)
            history.play()
            history.check(tolerates=_BROKEN, with_blocks=False)  # what it did not give back while it failed

    @pytest.mark.parametrize("num_steps", [0, 1, 3, 6])
    def test_aborted_requests_leave_nothing(self, num_steps: int) -> None:
        """A request may be aborted in any state; the stage is told once, and lets go."""
        history = _History(self._engine(place="before"), num_steps, num_requests=8)
        history.add_all()
        history.step(num_steps)
        history.abort_all()
        history.check()

    def test_idle_engine_rests(self) -> None:
        """An engine without requests needs no step, and one more does no harm."""
        engine = self._engine()
        _rest(engine)
        engine.step()
        _rest(engine)

    @pytest.mark.parametrize("seed", _SEEDS)
    def test_same_requests_give_the_same_steps(self, seed: int) -> None:
        """Replay must agree: no wall clock, no global random source."""
        one, other = _History(self._engine(), seed), _History(self._engine(), seed)
        one.play()
        other.play()
        assert one.steps == other.steps, "two engines, one history: their steps differ"

    def test_engine_may_be_closed_with_live_requests(self) -> None:
        """Engines come and go in one process, and no thread outlives them."""
        with ends_its_threads("the stage"):
            history = _History(self._engine(), 0)
            history.add_all()
            history.step(2)
            history.engine.close()

    def test_nothing_is_kept_of_requests_that_ended(self) -> None:
        """An engine runs for months, and request ids never end: what grows has a bound."""
        growths, usual = [], []
        for number in range(3):  # the least counts, since what else lives in this process grows now and then
            growths.append(growth_bytes(_serve_one(self._engine()), warm=40, num=80))
            usual.append(growth_bytes(_serve_one(self._engine(is_on=False)), warm=40, num=80))
            if number and min(growths) - min(usual) < _MAX_GROWTH_BYTES:
                return
        raise AssertionError(f"it grows by {min(growths) - min(usual):.0f} bytes with each request")

    def _engine(
        self,
        *,
        is_on: bool = True,
        place: str = "after",
        neighbour: Neighbour | None = None,
        definition: StageDefinition | None = None,
        fails: Any = None,
        contains_faults: bool = False,
        **options: Any,
    ) -> Engine:
        """Return an engine of few blocks with the stage, or without it, and with neighbours at its place in the order."""
        definition = definition or self.definition
        if not is_on:
            definition = attrs.evolve(definition, when=lambda _: False)
        neighbours = []
        if place != "before":
            neighbours.append(_neighbour("neighbour", neighbour or Neighbour(), before={definition.name}))
        if place != "after":
            name = "neighbour" if place == "before" else "second_neighbour"
            neighbours.append(_neighbour(name, Neighbour()))
            definition = attrs.evolve(definition, before=definition.before | {name})
        # What keeps the last steps grows for thousands of them.
        neighbours += [_absent(name) for name in ("explain", "flight_recorder") if name != definition.name]
        sizes = {"num_blocks": _NUM_BLOCKS, "max_num_seqs": 4, "max_num_batched_tokens": 24, "warmup": False}
        if "executor" not in options:
            options["backend"] = self._backend(fails=fails)
        return make_engine(
            stages=[definition, *neighbours], contains_faults=contains_faults, **{**sizes, **self.engine, **options}
        )

    def _backend(self, **options: Any) -> FakeBackend:
        return FakeBackend(**{"eos": -1, "max_model_len": 64, **self.backend, **options})


class _History:
    """Random requests to one engine, and what became of them.

    Args:
        engine: It has a stage ``neighbour``.
        seed: Seed of the requests, of their times and of who is aborted.
        num_requests: Requests.

    Attributes:
        steps: For each step the slots that got tokens, their tokens, and who ended.
        num_refused: Requests that were refused.
    """

    def __init__(self, engine: Engine, seed: int, *, num_requests: int = 14) -> None:
        self.engine = engine
        self.steps: list[tuple[list[int], list[int], list[str]]] = []
        self.num_refused = 0
        self._random = random.Random(seed)
        self._requests = {one.request_id: one for one in _requests(self._random, num_requests)}
        self._left: Iterator[Request] = iter(list(self._requests.values()))
        self._slots: dict[int, str] = {}
        self._streamed: dict[str, list[int]] = {name: [] for name in self._requests}
        self._ended: dict[str, FinishedSequence] = {}

    def play(self) -> None:
        """Add requests between steps, abort some, and step until all have ended."""
        for request in self._left:
            self._add(request)
            self.step(self._random.randrange(3))
            if self._random.random() < 0.15 and self._slots:
                self._abort(self._random.choice(sorted(self._slots.values())))
        self.finish()

    def add_all(self) -> None:
        """Add all requests at once."""
        for request in self._left:
            self._add(request)

    def abort_all(self) -> None:
        """Abort what is live, and step until the engine rests."""
        for name in sorted(self._slots.values()):
            self._abort(name)
        self.finish()

    def finish(self) -> None:
        """Step until the engine rests."""
        for _ in range(_MAX_STEPS):
            if not self.engine.has_work:
                return
            self.step(1)
        raise AssertionError(
            f"the engine has not come to rest after {_MAX_STEPS} steps; live: {sorted(self._slots.values())}"
        )

    def step(self, num_steps: int) -> None:
        """Take steps, and keep what they yield."""
        for _ in range(num_steps):
            deltas = self.engine.step()
            ends = np.cumsum(deltas.num_tokens).tolist()
            tokens = deltas.token_ids.tolist()
            for slot, end, count in zip(deltas.slots.tolist(), ends, deltas.num_tokens.tolist(), strict=True):
                self._streamed[self._slots[slot]] += tokens[end - count : end]
            for finished in deltas.finished:
                self._end(finished)
            self.steps.append((deltas.slots.tolist(), tokens, [one.request_id for one in deltas.finished]))

    def check(self, *, tolerates: str = "", with_blocks: bool = True) -> None:
        """Check that every text is the model's, and that nothing is held.

        Args:
            tolerates: Requests may end with an error that says this; empty: none may.
            with_blocks: No block is held either.
        """
        for name, request in self._requests.items():
            assert name in self._ended, f"{name} has not ended, and its engine rests"
            ended, expected = self._ended[name], _text(request)
            output = ended.token_ids.tolist()
            is_cut = ended.finish_reason is FinishReason.ABORT
            if ended.finish_reason is FinishReason.ERROR:
                is_cut = bool(tolerates) and tolerates in ended.error
                assert is_cut, f"{name} ended by an error: {ended.error}"
            if is_cut:
                expected = expected[: len(output)]
            assert output == expected, f"{name}: its text is {output}, without the stage {expected}"
            streamed = self._streamed[name]
            if is_cut:
                expected = expected[: len(streamed)]
            assert streamed == expected, f"{name}: its client got {streamed}, without the stage {expected}"
        held = self.engine.stage("neighbour").held(with_blocks=with_blocks)
        assert not held, f"nothing runs, and the engine still holds {', '.join(held)}"

    def _add(self, request: Request) -> None:
        try:
            self._slots[self.engine.add(request)] = request.request_id
        except RequestRefusedError:  # by a neighbour; another error is the stage's
            self.num_refused += 1
            del self._requests[request.request_id], self._streamed[request.request_id]

    def _abort(self, name: str) -> None:
        finished = self.engine.abort(name)
        if finished is not None:
            self._end(finished)

    def _end(self, finished: FinishedSequence) -> None:
        assert finished.request_id not in self._ended, f"{finished.request_id} ended twice"
        self._ended[finished.request_id] = finished
        if self._slots.get(finished.slot) == finished.request_id:
            del self._slots[finished.slot]


def _absent(name: str) -> StageDefinition:
    return StageDefinition(name=name, make=lambda _: Stage(), summary="Is not there.", when=lambda _: False)


def _neighbour(name: str, stage: Neighbour, *, before: Iterable[str] = ()) -> StageDefinition:
    return StageDefinition(name=name, make=lambda _: stage, summary="Stands beside.", before=before)


def _faulty(kind: type[Stage], moment: str, *, calls: Collection[int]) -> Any:
    """Return a class of a stage that raises at some calls of a moment, before it does anything."""
    inherited = getattr(kind, moment)

    def raises(self: Any, *args: Any, **named: Any) -> Any:
        self.num_calls += 1
        if self.num_calls in calls:
            raise ValueError(_BROKEN)
        return inherited(self, *args, **named)

    return type(kind.__name__, (kind,), {moment: raises, "num_calls": 0})


def _making_faulty(definition: StageDefinition, moment: str) -> Any:
    """Return what makes the stage of a definition such that it raises at its second call of a moment."""

    def make(makings: Any) -> Any:
        stage = definition.make(makings)
        stage.__class__ = _faulty(type(stage), moment, calls={2})
        return stage

    return make


class _LosesRanks(FakeExecutor):
    """Loses its ranks at some steps.

    Args:
        make: Makes its backend.
        losses: Numbers of the steps.
    """

    def __init__(self, make: Any, losses: Collection[int]) -> None:
        super().__init__(make())
        self.num_restarts = 0
        self._make, self._losses = make, losses
        self._num_steps = 0

    def allocate(self, plan: AllocationPlan) -> None:
        """Keep the plan."""
        self._plan = plan
        super().allocate(plan)

    def submit(self, batch: Batch) -> PendingStep:
        """Run it, or lose the ranks."""
        self._num_steps += 1
        if self._num_steps in self._losses:
            raise RanksLostError("The ranks were lost: a test ended them.")
        return super().submit(batch)

    def restart(self) -> None:
        """Start others, whose memory is empty."""
        self.num_restarts += 1
        self.backend = self._make()
        super().allocate(self._plan)


def _requests(source: random.Random, num: int) -> Iterator[Request]:
    """Yield requests of several tenants, some with a beginning that others have too."""
    beginnings = [tuple(source.randrange(1, 97) for _ in range(12)) for _ in range(2)]
    for number in range(num):
        own = [source.randrange(1, 97) for _ in range(source.randint(1, 16))]
        yield Request(
            request_id=f"request {number}",
            prompt_token_ids=(*source.choice([(), *beginnings]), *own),
            params=SamplingParams(max_tokens=source.randint(1, 20), temperature=0),
            tenant=source.choice(["", "a", "b/one", "b/other"]),
            priority=source.randrange(2),
        )


def _text(request: Request) -> list[int]:
    """Return the model's text. Pure."""
    return fake_text(list(request.prompt_token_ids), request.params.max_tokens or 0, eos=-1)


def _fails_at(*passes: int) -> Any:
    """Return what fails the device's passes of these numbers, counting those of two sequences or more."""
    count = iter(range(1, 1_000_000))

    def fails(batch: Batch, one: Pass) -> None:
        number = next(count) if len(one.rows) > 1 else 0
        if number in passes:
            raise BackendError(f"pass {number} fails")

    return fails


def _rest(engine: Engine) -> None:
    for _ in range(_MAX_STEPS):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError(f"the engine has no request, and has not come to rest after {_MAX_STEPS} steps")


def _serve_one(engine: Engine) -> Any:
    """Return what serves a request of its number to its end."""
    params = SamplingParams(max_tokens=2, temperature=0)

    def serve(number: int) -> None:
        prompt = (number % 90 + 1, number // 90 + 1)
        engine.add(Request(request_id=f"request {number}", prompt_token_ids=prompt, params=params, tenant="a"))
        _rest(engine)

    return serve
