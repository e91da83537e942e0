"""After a failed step, each of its sequences runs alone once: only the one at fault ends with the error, whatever the others wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import RequestRefusedError
from trencadis.failure_costs import FailureCosts
from trencadis.records import Batch, FinishedSequence, FinishReason, Request, SamplingParams
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text


class Hiccup:
    """A device that fails one step, the first of which something holds."""

    def __init__(self, is_now: Callable[[Batch], bool] = lambda batch: True) -> None:
        self.is_now = is_now
        self.is_due = True

    def __call__(self, batch: Batch, one: Any) -> None:
        if self.is_due and self.is_now(batch):
            self.is_due = False
            raise RuntimeError("a hiccup of the device")


def backend(fails: Hiccup, **options: Any) -> FakeBackend:
    return FakeBackend(**{"eos": -1, "max_model_len": 256, "fails": fails, **options})


def request(name: str, prompt: tuple[int, ...], max_tokens: int = 20) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens))


def all_end_well(ended: dict[str, FinishedSequence], prompts: dict[str, tuple[int, ...]], max_tokens: int) -> bool:
    """Whether nobody was lost, and every text is right."""
    assert {name: (ended[name].finish_reason, ended[name].error) for name in prompts} == dict.fromkeys(
        prompts, (FinishReason.LENGTH, "")
    )
    return all(ended[name].token_ids.tolist() == fake_text(one, max_tokens, eos=-1) for name, one in prompts.items())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_suspect_that_was_not_looked_up_does_not_wait_for_the_kv_connector(overlap: bool) -> None:
    """Prompts shorter than a block are looked up only once their texts are longer; the store answers ``pending`` first."""
    fails = Hiccup(lambda batch: batch.step == 6)
    connector = LoopConnector(pending=1).pair()
    engine = make_engine(backend=backend(fails), connector=connector, async_scheduling=overlap)
    prompts = {"a": (1, 2, 3), "b": (4, 5, 6)}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt))
    assert all_end_well(drain(engine), prompts, 20)
    assert not fails.is_due
    assert engine.inspect().blocks.num_used == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_suspect_takes_its_place_from_others_and_nobody_ends_for_it(overlap: bool) -> None:
    """Two fill the cache; one that runs alone needs a spare block besides, and the other one waits meanwhile."""
    fails = Hiccup(lambda batch: batch.num_sequences == 2 and engine.inspect().blocks.num_available == 0)
    engine = make_engine(
        backend=backend(fails, max_model_len=400),
        num_blocks=100,
        max_num_batched_tokens=400,
        async_scheduling=overlap,
    )
    prompts = {"a": tuple(range(1, 91)) * 2 + (1,) * 12, "b": tuple(range(2, 92)) * 2 + (1,) * 13}
    for name, prompt in prompts.items():
        engine.add(request(name, prompt, max_tokens=8))
    assert all_end_well(drain(engine), prompts, 8)
    assert not fails.is_due


# ------------------------------------------------------------------------------------- the same tenant, again and again


def test_a_tenant_whose_requests_fail_steps_again_and_again_is_refused_for_a_while_and_others_are_not() -> None:
    """Each failure has three sequences of others run alone once: a tenth of a second each; ten seconds are allowed."""
    clock = SimulatedClock()

    def fails(batch: Batch, one: Any) -> None:
        slot = engine._state.slot_of.get("poison")
        if slot is not None and engine._state.table.row[slot] in one.rows:
            raise RuntimeError("the device cannot compute it")

    engine = make_engine(backend=FakeBackend(eos=-1, max_model_len=256, fails=fails), clock=clock, num_blocks=512)
    prompts = {f"other {i}": (i + 1, 5, 6) for i in range(3)}
    for name, prompt in prompts.items():
        engine.add(attrs.evolve(request(name, prompt, max_tokens=230), tenant="good"))
    poison = attrs.evolve(request("poison", (9, 9)), tenant="greedy/ann")
    ended: dict[str, FinishedSequence] = {}
    num_failures = 0
    while not engine.stage("tenants")._failed_steps.retry_after_s("greedy"):
        engine.add(poison)
        while "poison" not in ended:
            ended |= {end.request_id: end for end in engine.step().finished}
        assert "cannot compute" in ended.pop("poison").error
        num_failures += 1
    with pytest.raises(
        RequestRefusedError, match="steps failed again and again because of requests of tenant 'greedy'"
    ) as caught:
        engine.add(poison)
    assert num_failures == 34
    assert caught.value.retry_after_s == pytest.approx(0.2 / 0.05)
    for tenant in ("good", ""):
        engine.add(attrs.evolve(request(f"of {tenant}", (7, 7)), tenant=tenant))
    with pytest.raises(RequestRefusedError):
        engine.add(attrs.evolve(poison, tenant="greedy/bob"))
    clock.advance(caught.value.retry_after_s)
    engine.add(attrs.evolve(request("greedy again", (8, 8)), tenant="greedy/ann"))
    assert all_end_well(ended | drain(engine), prompts, max_tokens=230)


def test_requests_without_a_key_are_not_refused_for_what_others_without_a_key_did() -> None:
    costs = FailureCosts(SimulatedClock())
    costs.charge("", 1000.0)
    costs.charge("/ann", 1000.0)
    assert costs.retry_after_s("") == costs.retry_after_s("/bob") == 0.0
