"""Policies that change while requests run: whatever the moment and whatever the policy, nothing is lost and no token changes."""

from __future__ import annotations

from typing import Any

import pytest

from support.strategies.hostile_policies import HOSTILE, OPTIONS, Listener, house
from trencadis.clock import SimulatedClock
from trencadis.engine.build import build_engine
from trencadis.errors import ConfigError, ContractError, PluginError
from trencadis.records import FinishReason, Request, SamplingParams
from trencadis_testing.engines import drain
from trencadis_testing.fakes import fake_text


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


def test_a_new_shadow_is_told_of_every_live_request(monkeypatch):
    engine = engine_of()
    for name in "ab":
        engine.add(request(name, (1, 2, 3)))
    told = []
    monkeypatch.setattr(Listener, "on_added", lambda self, *, slot, request: told.append((slot, request.request_id)))
    change(engine, shadow="support.strategies.hostile_policies:Listener")
    assert told == [(engine._state.slot_of[name], name) for name in "ab"]


def test_a_change_of_the_shadow_keeps_the_policy_and_its_state():
    engine = engine_of()
    strategy = engine._policy.strategy
    change(engine, shadow="priority")
    assert engine._policy.strategy is strategy
    assert change(engine, shadow=None)["shadow"] is None
    assert engine._policy.beside is None
