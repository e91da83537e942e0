"""Random histories in which everything happens together: no text is wrong, nobody is lost, nothing is left.

Steps that fail, plans that are refused and copies that fail, while KV is loaded and held, sequences are swapped out, drafts are verified,
clients leave, and the store is slow or lies.
"""

from __future__ import annotations

import random
from typing import Any

import attrs
import numpy as np
import pytest

from support.core.invariants import broken_invariants
from trencadis.clock import SimulatedClock
from trencadis.engine.engine import Engine
from trencadis.errors import UnpreparedShapeError
from trencadis.interfaces import AllocationPlan, BlockCopies, Lookup, PendingStep, SchedulerView, SchedulingPolicy
from trencadis.records import (
    Batch,
    FinishedSequence,
    FinishReason,
    FirstToken,
    Int32Array,
    Pass,
    Plan,
    Request,
    SamplingParams,
    TokenDeltas,
)
from trencadis_testing.doubles import LoopConnector, ScriptedSpeculator, ScriptedTrees
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.staged_executor import StagedExecutor

MAX_STEPS = 3000


class Pushy(SchedulingPolicy):
    """Who matters more takes the place of who matters less."""

    preempts = True

    def order(self, view: SchedulerView) -> Int32Array:
        waiting = view.waiting
        ordered: Int32Array = waiting[np.lexsort((view.arrival_s[waiting], view.priority[waiting]))]
        return ordered

    def give_way(self, view: SchedulerView, *, slot: int, candidates: Int32Array) -> int:
        worse = candidates[view.priority[candidates] > view.priority[slot]]
        return int(worse[-1]) if worse.size else -1


class Store(LoopConnector):
    """Brings a first token with half of what it finds."""

    def __init__(self, chance: random.Random, brings: bool, **options: Any) -> None:
        super().__init__(**options)

        class Side(type(self.scheduler)):  # type: ignore[misc]
            def lookup(self, request: Request, **known: Any) -> Lookup:
                found: Lookup = super().lookup(request, **known)
                if not brings or not found.num_tokens or chance.random() < 0.5:
                    return found
                (token,) = fake_text(request.prompt_token_ids, 1, eos=-1)
                return attrs.evolve(found, first_token=FirstToken(token_id=token))

        self.scheduler.__class__ = Side


class RanksWithOwnSequences(FakeBackend):
    """Stands for several ranks: a row and all its blocks are one rank's, and the bucket of a pass has room for each rank's part."""

    num_ranks = 1

    def allocate(self, plan: AllocationPlan) -> None:
        super().allocate(plan)
        self._sizes = np.array([plan.num_rows, plan.num_blocks, plan.num_host_blocks]) // self.num_ranks

    def submit(self, batch: Batch) -> PendingStep:
        writes, (rows, blocks, _) = batch.table_writes, self._sizes
        assert (writes.rows // rows == writes.block_ids // blocks).all(), "a block of another rank"
        return super().submit(batch)

    def copy_blocks(self, *, sources: Int32Array, targets: Int32Array) -> None:
        assert (sources // self._sizes[1] == targets // self._sizes[1]).all(), "a block moves to another rank"
        super().copy_blocks(sources=sources, targets=targets)

    def swap_blocks(self, *, outs: BlockCopies, ins: BlockCopies) -> None:
        _, blocks, hosted = self._sizes
        for device, host in ((outs.sources, outs.targets), (ins.targets, ins.sources)):
            assert (device // blocks == host // hosted).all(), "a copy of another rank's block"
        super().swap_blocks(outs=outs, ins=ins)

    def _check_bucket(self, one: Pass) -> None:
        rows, blocks, _ = self._sizes
        tables = self._tables.copy()
        for rank in range(self.num_ranks):
            is_there = one.rows // rows == rank
            if is_there.any():
                self._tables = tables - rank * blocks
                arrays = ("indices", "rows", "starts", "query_lens", "num_logits", "num_prompt_logits")
                super()._check_bucket(attrs.evolve(one, **{name: getattr(one, name)[is_there] for name in arrays}))
        self._tables = tables


class History:
    """One engine, drawn at random, and what becomes of its requests.

    Args:
        seed: Of everything.
        has_stages: It is a pipeline, without a KV connector.
        num_ranks: With sequences of their own; several go without KV connector.
    """

    def __init__(self, seed: int, *, has_stages: bool = False, num_ranks: int = 1) -> None:
        self.seed, self.has_stages, self.num_ranks = seed, has_stages, num_ranks
        self.draw, self.chance = random.Random(seed), random.Random(seed + 1)
        self.clock = SimulatedClock()
        self.requests: dict[str, Request] = {}
        self.told: dict[str, list[int]] = {}
        self.ends: dict[str, FinishedSequence] = {}
        self.left: set[str] = set()
        self.blamed: set[str] = set()
        self.families = [[self.draw.randrange(97) for _ in range(30)] for _ in range(3)]
        pick = self.draw.choice
        self.failing, self.refusing, self.leaving = pick([0, 0.05, 0.15]), pick([0, 0.05, 0.15]), pick([0, 0.05])
        self.forgets = self.draw.random() < 0.3
        self.engine = self.made(pick([0, 0.2]))
        self.watch()

    def made(self, failing_copies: float) -> Engine:
        pick, is_true = self.draw.choice, lambda probability: self.draw.random() < probability
        layout = pick(["ragged", "ragged", "padded", "unified"])

        def fails(batch: Batch, one: Any) -> None:
            chance = random.Random(self.seed * 100_000 + batch.step) if self.has_stages else self.chance
            if chance.random() < self.failing:  # on all stages or on none
                raise RuntimeError("injected")

        def fails_to_swap() -> None:
            if self.chance.random() < failing_copies:
                raise RuntimeError("injected copies")

        max_prefills = pick([1, 2])
        kind = (
            FakeBackend
            if self.num_ranks == 1
            else type("Backend", (RanksWithOwnSequences,), {"num_ranks": self.num_ranks})
        )

        def backend() -> FakeBackend:
            return kind(
                max_model_len=48,
                layout=layout,
                max_prefill_batch_size=max_prefills,
                fails=fails,
                fails_to_swap=fails_to_swap,
            )

        num_stages = pick([2, 3, 4]) if self.has_stages else 1
        staged = StagedExecutor(clock=self.clock, num_stages=num_stages, make_backend=backend)
        return make_engine(
            backend=backend(),
            executor=staged if self.has_stages else None,
            pipeline=num_stages,
            clock=self.clock,
            connector=self.store().pair() if is_true(0.7) and not self.has_stages and self.num_ranks == 1 else None,
            speculator=self.speculator(layout),
            policy=pick([None, Pushy()]),
            num_blocks=pick([14, 20, 30, 60] if self.num_ranks == 1 else [12, 13, 16]),
            max_num_seqs=pick([2, 3, 6]) * self.num_ranks,
            max_num_batched_tokens=pick([6, 12, 24, 64]),
            max_preemptions=pick([1, 4]),
            preemption=pick(["swap", "recompute"]),
            swap_blocks=pick([64, 7, 3]),
            async_scheduling=is_true(0.5) or self.has_stages,
            prefix_caching=is_true(0.7),
            release_timeout_s=pick([1e6, 2.0, 5.0]),
            load_timeout_s=pick([0.2, 1.0, 1e6]),
            max_waiting_loads=pick([1, 2, 256]),
            layer_wait_s=0.01,
            attention_ranks=self.num_ranks,
            defragmenter={"enabled": "on", "trigger": "threshold", "threshold": 2}
            if is_true(0.3) and self.num_ranks > 1
            else {},
        )

    def store(self) -> Store:
        pick, lies, known = self.draw.choice, self.draw.choice([0, 0, 0.2]), dict[int, int | None]()

        def fail(transfer_id: int) -> int | None:
            if transfer_id not in known:
                known[transfer_id] = self.chance.choice([0, 4, 8]) if self.chance.random() < lies else None
            return known[transfer_id]

        return Store(
            self.chance,
            brings=self.draw.random() < 0.3,
            delay=pick([1, 2, 5]),
            pending=pick([0, 0, 1, 3]),
            holds=self.draw.random() < 0.3,
            by_layer=self.draw.random() < 0.5,
            fail=fail,
        )

    def speculator(self, layout: str) -> Any:
        def tree(tokens: Any) -> list[tuple[int, int]]:
            right = fake_text(tokens.tolist(), 2, eos=-1)
            return [(3, -1), (right[0], -1), (5, 1), (right[1], 1)]

        kind = self.draw.choice(["none", "none", "line", "tree"])
        if kind == "none":
            return None
        if kind == "tree" and layout == "ragged":
            return ScriptedTrees(tree)
        return ScriptedSpeculator(lambda tokens: [*fake_text(tokens.tolist(), 1 + len(tokens) % 3), 3][:3])

    def watch(self) -> None:
        """Refuse plans of several, and note who was alone in one that failed: it may end with that."""
        engine = self.engine
        build, step_failed = engine._batches.build, engine._failures.step_failed

        def refusing(plan: Plan) -> Batch:
            if plan.num_sequences > 1 and self.chance.random() < self.refusing:
                raise UnpreparedShapeError("refused")
            return build(plan)

        def noting(plan: Plan, error: Exception, **how: bool) -> None:
            assert str(error).endswith(("refused", "injected", "injected copies")), error
            if plan.num_sequences == 1 and not plan.preempted.size:
                self.blamed |= {name for name, slot in engine._state.slot_of.items() if slot == plan.slots[0]}
            step_failed(plan, error, **how)

        engine._batches.build, engine._failures.step_failed = refusing, noting

    def happen(self) -> None:
        """Live through it."""
        num_left = self.draw.randint(5, 14) * self.num_ranks
        for _ in range(MAX_STEPS):
            while num_left and self.draw.random() < 0.4:
                num_left -= 1
                self.add()
            running = sorted(self.engine.inspect().sequences)
            if running and self.draw.random() < self.leaving:
                self.left.add(self.draw.choice(running))
                self.engine.abort(*(self.left & set(running)))
            if self.forgets and self.draw.random() < 0.1:
                self.engine._state.blocks.reset_cache()
            names = {slot: name for name, slot in self.engine._state.slot_of.items()}
            self.tell(self.engine.step(), names)
            self.clock.advance(0.05)
            assert broken_invariants(self.engine) == []
            self.check_partitions()
            if not num_left and not self.engine.has_work:
                return
        raise AssertionError("it never ends")

    def add(self) -> None:
        draw, name = self.draw, f"r{len(self.requests)}"
        prompt = draw.choice(self.families)[: draw.randint(1, 26)]
        prompt += [draw.randrange(97) for _ in range(draw.choice([0, 0, 1, 3]))]
        params = SamplingParams(
            max_tokens=min(draw.choice([1, 3, 8, 16]), 47 - len(prompt)),
            logprobs=draw.choice([None, None, 1]),
            prompt_logprobs=0 if draw.random() < 0.15 else None,
        )
        self.requests[name] = Request(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            params=params,
            cache_salt=draw.choice(["", "", "s"]),
            priority=draw.randrange(3),
        )
        self.told[name] = []
        self.engine.add(self.requests[name])

    def tell(self, deltas: TokenDeltas, names: dict[int, str]) -> None:
        tokens = iter(deltas.token_ids.tolist())
        assert len(set(deltas.slots.tolist())) == len(deltas.slots), "one entry for each sequence"
        for slot, number in zip(deltas.slots.tolist(), deltas.num_tokens.tolist(), strict=True):
            self.told[names[slot]] += [next(tokens) for _ in range(number)]
        assert next(tokens, None) is None
        self.ends.update({end.request_id: end for end in deltas.finished})

    def check_partitions(self) -> None:
        """See that a sequence has all that it has in one partition, that nothing free went elsewhere, and that a hit is one of its own."""
        now = self.engine.inspect()
        host = now.stages.get("swap")
        num_hosted, swapped = (host.num_blocks, host.held) if host else (self.num_ranks, {})
        rows, blocks, hosted = (size // self.num_ranks for size in (now.num_rows, now.blocks.num_blocks, num_hosted))
        for one in now.sequences.values():
            own = {block // blocks for block in one.block_table} | ({one.row // rows} if one.row >= 0 else set())
            own |= {block // hosted for block in swapped.get(one.slot, ())}
            assert len(own) <= 1, one
        parts = getattr(self.engine._state.blocks, "parts", [self.engine._state.blocks])
        for number, part in enumerate(parts):
            found = part.inspect()
            ids = {*found.free, *found.cached, *found.hashes}
            assert ids <= set(range(number * blocks, number * blocks + blocks))
            assert found.num_free + found.num_cached + found.num_used == blocks
            assert {*found.previous.values(), *found.previous} <= set(found.hashes.values()), (
                "a chain within the partition"
            )

    def check(self) -> None:
        state = self.engine._state
        assert state.blocks.num_used == 0
        swap = self.engine.inspect().stages.get("swap")
        assert swap is None or len(swap.free) == swap.num_blocks
        for name, request in self.requests.items():
            text = fake_text(request.prompt_token_ids, request.params.max_tokens)
            assert self.told[name] == text[: len(self.told[name])], name
            if name in self.left:
                continue
            end = self.ends[name]
            if end.finish_reason is FinishReason.ERROR:
                assert name in self.blamed, end.error
            else:
                assert end.token_ids.tolist() == text == self.told[name], name


def live_through(seeds: range, **kind: Any) -> None:
    for seed in seeds:
        history = History(seed, **kind)
        try:
            history.happen()
            history.check()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        history.engine.close()


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(50, 400, 50))])
def test_whatever_happens_texts_are_right_and_nothing_is_left(first: int) -> None:
    live_through(range(first, first + 50))


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(25, 400, 25))])
def test_whatever_happens_in_a_pipeline_texts_are_right_and_nothing_is_left(first: int) -> None:
    live_through(range(first, first + 25), has_stages=True)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(10, 200, 10))])
@pytest.mark.representatives(1)
def test_ranks_with_sequences_of_their_own_give_each_other_nothing(first: int, num_ranks: int) -> None:
    live_through(range(first, first + 10), num_ranks=num_ranks)
