"""A first token that a connector brings is one like any other, and nothing else gets in by that door."""

from __future__ import annotations

import math
from typing import Any

import attrs
import msgspec
import pytest

from support.core.invariants import broken_invariants
from trencadis.clock import SimulatedClock
from trencadis.engine.engine import Engine
from trencadis.interfaces import Lookup
from trencadis.records import (
    FinishedSequence,
    FinishReason,
    FirstToken,
    Request,
    RowStart,
    SamplingParams,
    TokenLogprobs,
)
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

VOCAB_SIZE = 97
PROMPT = tuple(range(1, 22))
FULL = tuple(range(1, 21))  # five blocks, none of them begun


class Bringer(LoopConnector):
    """Brings a first token with every hit on a prompt that it knows one for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.firsts: dict[str, Any] = {}
        self.abandoned: list[str] = []
        self.layerwise: list[int] = []
        bringer = self

        class Side(type(self.scheduler)):  # type: ignore[misc]
            def lookup(self, request: Request, **known: Any) -> Lookup:
                found = super().lookup(request, **known)
                return (
                    attrs.evolve(found, first_token=bringer.firsts.get(request.request_id))
                    if found.num_tokens
                    else found
                )

            def on_abandoned(self, request: Request) -> None:
                bringer.abandoned.append(request.request_id)

            def on_layerwise(self, transfer_id: int) -> None:
                bringer.layerwise.append(transfer_id)
                super().on_layerwise(transfer_id)

        self.scheduler.__class__ = Side


class Scene:
    """An engine whose connector has the KV of some prompts, and what came out of it, step by step."""

    def __init__(self, *prompts: tuple[int, ...], eos: int = -1, **options: Any) -> None:
        connector = {name: options.pop(name) for name in ("delay", "fail", "by_layer") if name in options}
        self.bringer, self.clock = Bringer(**connector), SimulatedClock()
        given = {"prefix_caching": False, "backend": FakeBackend(eos=eos), "clock": self.clock, **options}
        self.engine: Engine = make_engine(connector=self.bringer.pair(), **given)
        self.ends: dict[str, FinishedSequence] = {}
        self.said: dict[int, list[list[int]]] = {}
        self.logprobs: list[tuple[int, TokenLogprobs]] = []
        for number, prompt in enumerate(prompts or (PROMPT,)):
            # One token more, so that the block at the end of the prompt is saved, too.
            self.add(f"before {number}", prompt, max_tokens=4)
        self.run()
        self.said.clear()

    def add(self, name: str, prompt: tuple[int, ...] = PROMPT, *, first: Any = None, **params: Any) -> int:
        if first is not None:
            self.bringer.firsts[name] = FirstToken(token_id=first) if isinstance(first, int) else first
        return self.engine.add(Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**params)))

    def step(self) -> None:
        deltas = self.engine.step()
        tokens = iter(deltas.token_ids.tolist())
        assert len(set(deltas.slots.tolist())) == len(deltas.slots), "one entry for each sequence"
        for slot, num in zip(deltas.slots.tolist(), deltas.num_tokens.tolist(), strict=True):
            self.said.setdefault(slot, []).append([next(tokens) for _ in range(num)])
        self.logprobs += [(int(deltas.slots[entry.index]), entry) for entry in deltas.logprobs]
        self.ends.update({end.request_id: end for end in deltas.finished})
        self.clock.advance(0.01)
        assert broken_invariants(self.engine) == []

    def run(self) -> None:
        for _ in range(300):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("it does not come to rest")

    def texts(self, slot: int) -> list[int]:
        return [token for run in self.said[slot] for token in run]

    @property
    def results(self) -> dict[str, int]:
        return dict(self.engine.stage("transfer").first_tokens.results)


def truth(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return fake_text(list(prompt), num_tokens, eos=-1)


def with_logprobs(token: int, num: int, **changes: Any) -> FirstToken:
    entry = TokenLogprobs(
        index=9,
        position=3,
        token_id=token,
        logprob=-0.25,
        rank=1,
        top_token_ids=tuple(range(num)),
        top_logprobs=(-0.5,) * num,
    )
    return FirstToken(token_id=token, logprobs=msgspec.structs.replace(entry, **changes))


@pytest.mark.parametrize("depth", [False, True])
@pytest.mark.parametrize("prompt", [PROMPT, FULL])
def test_token_is_shown_at_once_and_the_text_goes_on_behind_it(prompt: tuple[int, ...], depth: bool) -> None:
    """The fake model reads every entry of the cache: a token in the wrong place would change the rest."""
    scene = Scene(prompt, delay=5, async_scheduling=depth)
    loads = scene.engine.stage("transfer").transfers.num_loads
    slot = scene.add("r", prompt, first=truth(prompt, 1)[0], max_tokens=6)
    scene.step()
    assert scene.said == {slot: [truth(prompt, 1)]}, "before its blocks are here"
    assert len(scene.engine.inspect().stages["transfer"].waiting) == 1
    scene.run()
    assert scene.texts(slot) == truth(prompt, 6) == scene.ends["r"].token_ids.tolist()
    assert scene.ends["r"].num_cached_tokens == (len(prompt) - 1) // 4 * 4
    assert scene.engine.stage("transfer").transfers.num_loads == loads + 1
    assert scene.results == {"taken": 1}


def test_token_that_another_engine_drew_otherwise_stands() -> None:
    """Whoever drew it, what follows follows from it."""
    scene = Scene()
    other = (truth(PROMPT, 1)[0] + 1) % VOCAB_SIZE
    slot = scene.add("r", first=other, max_tokens=5)
    scene.run()
    assert scene.texts(slot) == [other, *truth((*PROMPT, other), 4)]


@pytest.mark.parametrize("valid", [0, 8])
def test_token_stands_if_the_load_fails(valid: int) -> None:
    scene = Scene(fail=lambda transfer_id: valid, delay=2)
    slot = scene.add("r", first=truth(PROMPT, 1)[0], max_tokens=6)
    scene.run()
    assert scene.texts(slot) == truth(PROMPT, 6)
    assert scene.engine.stage("transfer").transfers.num_failed_loads == 1
    assert scene.results == {"taken": 1}


def test_token_that_ends_the_text_ends_it_and_nothing_is_loaded() -> None:
    scene = Scene(eos=5)
    loads = scene.engine.stage("transfer").transfers.num_loads
    for name, first, params in (
        ("eos", 5, {"max_tokens": 9}),
        ("own stop", 7, {"max_tokens": 9, "stop_token_ids": (7,)}),
        ("length", 11, {"max_tokens": 1}),
    ):
        slot = scene.add(name, first=first, **params)
        scene.run()
        end = scene.ends[name]
        assert (scene.texts(slot), end.token_ids.tolist()) == ([first], [first])
        is_length = name == "length"
        assert end.finish_reason is (FinishReason.LENGTH if is_length else FinishReason.STOP)
        assert end.stop_token_id == (None if is_length else first)
        assert end.arrival_s <= end.first_scheduled_s == end.first_token_s <= end.finish_s  # type: ignore[operator]
        assert scene.bringer.abandoned == [name], "whoever holds the blocks need not"
        scene.said.clear()
        scene.bringer.abandoned.clear()
    assert scene.engine.stage("transfer").transfers.num_loads == loads
    assert scene.engine.inspect().blocks.num_used == 0
    assert scene.engine.totals.num_finished == 4


def test_end_token_is_ignored_where_the_request_says_so() -> None:
    scene = Scene(eos=5)
    slot = scene.add("r", first=5, max_tokens=3, ignore_eos=True)
    scene.run()
    assert scene.texts(slot) == [5, *fake_text([*PROMPT, 5], 2, eos=-1)]


def test_it_is_the_first_token_in_what_is_measured() -> None:
    scene = Scene(delay=8)
    scene.clock.advance(1.0)
    counted = scene.engine.totals.num_emitted_tokens
    slot = scene.add("r", first=truth(PROMPT, 1)[0], max_tokens=3)
    scene.run()
    end = scene.ends["r"]
    assert end.first_token_s == end.arrival_s == end.first_scheduled_s
    assert end.finish_s - end.first_token_s >= 0.08
    assert scene.engine.totals.num_emitted_tokens == counted + len(scene.texts(slot)) == counted + 3


@pytest.mark.parametrize(
    ("first", "params", "reason"),
    [
        (VOCAB_SIZE, {}, "vocabulary"),
        (-1, {}, "vocabulary"),
        (FirstToken(token_id=True), {}, "vocabulary"),
        (FirstToken(token_id=2.0), {}, "vocabulary"),  # type: ignore[arg-type]
        (9, {"bad_token_ids": (9,)}, "forbidden"),
        (9, {"allowed_token_ids": (8, 10)}, "forbidden"),
        (5, {"min_tokens": 1}, "forbidden"),
        (9, {"min_tokens": 1, "stop_token_ids": (9,)}, "forbidden"),
        (13, {}, "forbidden"),  # the sampler says so
        (9, {"logprobs": 0}, "logprobs"),
        (with_logprobs(9, 1), {"logprobs": 2}, "logprobs"),
        (with_logprobs(9, 2, token_id=8), {"logprobs": 2}, "logprobs"),
        (with_logprobs(9, 2, logprob=math.nan), {"logprobs": 2}, "logprobs"),
        (with_logprobs(9, 2, top_logprobs=(0.5, -1.0)), {"logprobs": 2}, "logprobs"),
        (with_logprobs(9, 2, rank=0), {"logprobs": 2}, "logprobs"),
    ],
)
def test_token_that_cannot_be_is_refused_and_the_engine_chooses_its_own(
    first: Any, params: dict[str, Any], reason: str
) -> None:
    def can_start_with(start: RowStart, token: int) -> bool:
        assert start.token_ids.tolist() == list(PROMPT)
        assert start.num_prompt_tokens == len(PROMPT)
        return token != 13

    scene = Scene(eos=5, can_start_with=can_start_with)
    slot = scene.add("r", first=first, max_tokens=4, **params)
    scene.run()
    assert scene.texts(slot) == fake_text(list(PROMPT), 4, eos=5)
    assert scene.results == {reason: 1}
    assert f'first_tokens_total{{result="{reason}"}} 1.0' in scene.engine.metrics()


def test_what_is_no_token_at_all_is_a_fault_of_the_connector_and_a_miss() -> None:
    scene = Scene()
    scene.bringer.firsts["r"] = "token"
    slot = scene.add("r", max_tokens=4)
    scene.run()
    assert scene.texts(slot) == truth(PROMPT, 4)
    assert scene.engine.stage("transfer").transfers.connector.num_errors == 1  # type: ignore[union-attr]


def test_token_is_taken_once_although_it_is_brought_with_every_look_up() -> None:
    """There is no room for the blocks at first, so that the prefix is looked up again and again."""
    scene = Scene(num_blocks=14)
    big = scene.add("big", tuple(range(40, 75)), max_tokens=16)
    for _ in range(3):
        scene.step()
    slot = scene.add("r", first=truth(PROMPT, 1)[0], max_tokens=5)
    scene.run()
    assert scene.texts(slot) == truth(PROMPT, 5)
    assert len(scene.texts(big)) == 16
    assert scene.results["taken"] == 1
    assert scene.results["late"] >= 1


def test_logprobs_come_with_it_at_the_position_of_the_token() -> None:
    scene = Scene()
    plain = scene.add("plain", tuple(range(50, 60)), max_tokens=6, logprobs=1)
    slot = scene.add("r", first=with_logprobs(truth(PROMPT, 1)[0], 2), max_tokens=3, logprobs=2)
    scene.run()
    mine = [entry for owner, entry in scene.logprobs if owner == slot]
    assert [entry.position for entry in mine] == [21, 22, 23]
    assert [entry.token_id for entry in mine] == truth(PROMPT, 3)
    assert (mine[0].logprob, mine[0].top_token_ids, mine[0].top_logprobs) == (-0.25, (0, 1), (-0.5, -0.5))
    assert len([entry for owner, entry in scene.logprobs if owner == plain]) == 6


def test_client_that_leaves_behind_the_token_leaves_nothing_behind() -> None:
    scene = Scene(delay=4)
    slot = scene.add("r", first=truth(PROMPT, 1)[0], max_tokens=9)
    scene.step()
    end = scene.engine.abort("r")
    assert end is not None
    assert end.token_ids.tolist() == truth(PROMPT, 1) == scene.texts(slot)
    scene.run()
    assert scene.engine.inspect().blocks.num_used == 0


def test_sequence_with_its_first_token_waits_for_kv_also_where_loads_come_by_layer() -> None:
    scene = Scene(by_layer=True)
    before = len(scene.bringer.layerwise)
    slot = scene.add("r", first=truth(PROMPT, 1)[0], max_tokens=5)
    scene.run()
    assert scene.texts(slot) == truth(PROMPT, 5)
    assert len(scene.bringer.layerwise) == before
    scene.said.clear()
    other = scene.add("without", max_tokens=5)
    scene.run()
    assert scene.texts(other) == truth(PROMPT, 5)
    assert len(scene.bringer.layerwise) == before + 1


def test_first_token_comes_before_the_second_also_where_both_are_of_one_step() -> None:
    """The first look-up finds it and no room; another one's load makes some, and the second look-up finds the prefix alone."""
    mine, other = tuple(range(1, 20)), (*range(40, 60), 1, 2)
    scene = Scene(
        mine,
        other,
        by_layer=True,
        delay=50,
        num_blocks=10,
        prefix_caching=True,
        async_scheduling=False,
        backend=FakeBackend(eos=-1, max_model_len=40),
    )
    scene.engine._state.blocks.reset_cache()
    lookup = scene.bringer.scheduler.lookup

    def told_once(request: Request, **known: Any) -> Lookup:
        found = lookup(request, **known)
        scene.bringer.firsts.pop(request.request_id, None)
        return attrs.evolve(found, layerwise=request.request_id == "mine")

    scene.bringer.scheduler.lookup = told_once
    scene.engine.stage("transfer").transfers.connector.strategy = scene.bringer.scheduler
    scene.add("other", other, max_tokens=1)
    scene.step()  # it waits for its load, and has six of ten blocks
    slot = scene.add("mine", mine, first=truth(mine, 1)[0], max_tokens=4)
    scene.run()
    assert scene.texts(slot) == truth(mine, 4) == scene.ends["mine"].token_ids.tolist()
    assert max(len(run) for run in scene.said[slot]) == 2, "both are of one step"
