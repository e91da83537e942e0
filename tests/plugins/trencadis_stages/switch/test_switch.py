"""Policies that change while requests run: whatever the moment and whatever the policy, nothing is lost and no token changes."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.core.invariants import broken_invariants
from support.strategies.hostile_policies import HOSTILE, OPTIONS, Listener, house
from trencadis.clock import SimulatedClock
from trencadis.engine.build import build_engine
from trencadis.errors import ConfigError, ContractError, PluginError
from trencadis.records import FinishReason, Request, SamplingParams
from trencadis_testing.engines import drain
from trencadis_testing.fakes import fake_text

POLICIES = [
    "fcfs",
    "prefill_first",
    "priority",
    "shortest_first",
    "fair_share",
    "deadline",
    "prefix_affinity",
    "multi_level",
]


def request(name: str, prompt: tuple[int, ...], num_tokens: int = 6, **more: Any) -> Request:
    return Request(
        request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=num_tokens, temperature=0), **more
    )


def expected(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return fake_text(prompt, num_tokens, vocab_size=OPTIONS["vocab_size"], eos=-1)


def engine_of(**tables: Any) -> Any:
    config, registry = house(**tables)
    return build_engine(config, registry=registry, clock=SimulatedClock())


def change(engine: Any, **table: Any) -> dict[str, Any]:
    return engine.answer("set_scheduling", {"table": table, "source": "a test", "may_import": True})


class Swaps(RuleBasedStateMachine):
    """Arrivals, steps, aborts, and at any moment another policy or shadow, good or hostile."""

    @initialize(
        num_blocks=st.integers(12, 40), max_num_seqs=st.integers(2, 5), budget=st.integers(5, 40), overlap=st.booleans()
    )
    def build(self, num_blocks: int, max_num_seqs: int, budget: int, overlap: bool) -> None:
        self.clock = SimulatedClock()
        config, registry = house(
            engine={"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, "async_scheduling": overlap},
            cache={"num_blocks": num_blocks},
        )
        self.engine = build_engine(config, registry=registry, clock=self.clock)
        self.asked: dict[str, Request] = {}
        self.ended: dict[str, Any] = {}

    @rule(
        lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
        num_tokens=st.integers(1, 12),
        tenant=st.sampled_from("ab"),
    )
    def arrive(self, lengths: list[int], num_tokens: int, tenant: str) -> None:
        for length in lengths:
            name = str(len(self.asked))
            prompt = tuple((len(self.asked) * 7 + i) % 97 for i in range(length))
            self.asked[name] = request(name, prompt, num_tokens, tenant=tenant, priority=length % 3)
            self.engine.add(self.asked[name])

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.clock.advance(0.02)
            self.note(self.engine.step().finished)

    @rule(policy=st.sampled_from(POLICIES), shadow=st.sampled_from([None, "keep", *POLICIES, *HOSTILE]))
    def swap(self, policy: str, shadow: str | None) -> None:
        answer = change(self.engine, name=policy, **({} if shadow == "keep" else {"shadow": shadow}))
        assert answer["policy"] == policy
        assert answer["plan_hash"] == self.engine.plan_hash

    @rule(policy=st.sampled_from(HOSTILE))
    def swap_to_a_hostile_one(self, policy: str) -> None:
        try:
            change(self.engine, name=policy)
        except ContractError:
            assert "DeafEars" in policy
            assert self.engine.has_work

    @precondition(lambda self: len(self.asked) > len(self.ended))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked.keys() - self.ended.keys())))
        self.note([self.engine.abort(name)])

    @invariant()
    def books_are_in_order(self) -> None:
        assert not broken_invariants(self.engine)

    def note(self, finished: Any) -> None:
        for end in finished:
            assert end.request_id not in self.ended
            self.ended[end.request_id] = end

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.note(drain(self.engine, max_steps=3000).values())
        assert self.ended.keys() == self.asked.keys()
        for name, end in self.ended.items():
            if end.finish_reason is not FinishReason.ABORT:
                asked = self.asked[name]
                assert end.token_ids.tolist() == expected(asked.prompt_token_ids, asked.params.max_tokens)
        assert self.engine.inspect().blocks.num_used == 0
        self.engine.close()


TestSwaps = Swaps.TestCase
TestSwaps.settings = settings(
    max_examples=15, stateful_step_count=20, phases=(Phase.explicit, Phase.generate), database=None
)


def test_the_new_policy_is_told_of_every_live_request_in_the_order_of_arrival():
    engine = engine_of(engine={"max_num_seqs": 2})
    for name in "abcd":
        engine.add(request(name, (1, 2, 3), 40))
    engine.step()
    engine.abort("a")
    engine.add(request("e", (4, 5)))
    change(engine, name="support.strategies.hostile_policies:Listener")
    policy = engine._policy.strategy
    assert isinstance(policy, Listener)
    slots = engine._state.slot_of
    assert policy.told == [(slots[name], name) for name in "bcde"]
    engine.add(request("f", (4, 5)))
    assert policy.told[-1] == (slots["f"], "f")
    drain(engine)
    assert sorted(policy.left) == sorted(slot for slot, _ in policy.told)


def test_a_fallback_that_takes_over_is_told_of_every_live_request_once():
    engine = engine_of(
        scheduling={
            "name": "support.strategies.hostile_policies:DeafEars",
            "fallback": "support.strategies.hostile_policies:Listener",
        }
    )
    engine.add(request("a", (1, 2, 3)))
    engine.add(request("b", (1, 2, 4)))
    assert [name for _, name in engine._policy.strategy.told] == ["a", "b"]
    assert {end.finish_reason for end in drain(engine).values()} == {FinishReason.LENGTH}


@pytest.mark.representatives(3)
@pytest.mark.parametrize("policy", HOSTILE[:-1])
def test_a_hostile_policy_is_quarantined_to_the_configured_fallback(policy: str):
    engine = engine_of(engine={"max_num_seqs": 2})
    prompts = {str(n): tuple(range(n, n + 9)) for n in range(5)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt))
    engine.step()
    change(engine, name=policy)
    ends = drain(engine)
    assert {name: end.token_ids.tolist() for name, end in ends.items()} == {
        name: expected(prompt, 6) for name, prompt in prompts.items()
    }
    report = engine.answer("scheduling", {})
    assert report["component"].startswith('scheduling component "fcfs" of trencadis ')
    assert f'(fallback of scheduling component "{policy}"' in report["component"]
    assert policy in report["quarantined"][0]["component"]
    assert report["quarantined"][0]["cause"]
    change(engine, name="fcfs")
    assert "fallback" not in engine.answer("scheduling", {})["component"]


def test_a_policy_that_cannot_bear_the_live_requests_does_not_take_over():
    engine = engine_of()
    engine.add(request("a", (1, 2, 3)))
    before = engine.answer("scheduling", {})
    with pytest.raises(ContractError, match="raised ValueError: not now when it was told of the live requests"):
        change(engine, name="support.strategies.hostile_policies:DeafEars", shadow="priority")
    assert engine.answer("scheduling", {}) == before
    assert drain(engine)["a"].token_ids.tolist() == expected((1, 2, 3), 6)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "fcsf"}, r'\[scheduling\] name = "fcsf" \(from a test\): no such component.*Did you mean "fcfs"'),
        (
            {"name": "fcfs", "options": {"victim": "x"}},
            r'\[scheduling.fcfs\] victim = "x" \(from a test\): must be one of',
        ),
        (
            {"name": "fcfs", "options": {"victm": 1}},
            r'\[scheduling.fcfs\] victm \(from a test\): no such key.*"victim"',
        ),
        ({"name": "fcfs", "shadow": "nobody"}, r'\[scheduling\] shadow = "nobody"'),
        ({"name": "support.strategies.hostile_policies:Nobody"}, "Nobody"),
    ],
)
def test_a_change_that_cannot_be_leaves_everything_as_it_was(table: dict[str, Any], message: str):
    engine = engine_of(scheduling={"name": "priority", "fallback": "fcfs", "shadow": "fcfs"})
    before, strategy, shadow = engine.answer("scheduling", {}), engine._policy.strategy, engine._policy.beside
    with pytest.raises((ConfigError, PluginError), match=message):
        change(engine, **table)
    assert engine.answer("scheduling", {}) == before
    assert (engine._policy.strategy, engine._policy.beside) == (strategy, shadow)


def test_options_left_out_are_those_of_the_configuration():
    engine = engine_of(scheduling={"name": "fcfs", "priority": {"age_s": 3.0, "preempt": True}})
    assert change(engine, name="priority")["options"]["age_s"] == 3.0
    answer = change(engine, name="priority", options={"age_s": 4.0})
    assert (answer["options"]["age_s"], answer["options"]["preempt"]) == (4.0, True)
    assert change(engine, shadow="fcfs")["options"]["age_s"] == 4.0, "a change of the shadow leaves the policy alone"
    assert change(engine, options={})["options"]["age_s"] == 3.0


def test_a_change_of_the_shadow_keeps_the_policy_and_its_state():
    engine = engine_of()
    strategy = engine._policy.strategy
    change(engine, shadow="priority")
    assert engine._policy.strategy is strategy
    assert change(engine, shadow=None)["shadow"] is None
    assert engine._policy.beside is None
