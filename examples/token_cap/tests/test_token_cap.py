from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from trencadis.records import Request, SamplingParams
from trencadis_testing import FakeBackend, StageConformance
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import fake_text

import trencadis_token_cap
from trencadis_token_cap.config import TokenCapConfig

(DEFINITION,) = trencadis_token_cap.trencadis_stages()


class TestTokenCap(StageConformance):
    definition = DEFINITION
    engine: ClassVar = {"tables": {"token_cap": TokenCapConfig(max_tokens_per_tenant=20)}}


class TestTokenCapOfOneToken(StageConformance):
    """Each tenant has one sequence at a time."""

    definition = DEFINITION
    engine: ClassVar = {"tables": {"token_cap": TokenCapConfig(max_tokens_per_tenant=1)}}


class TestTokenCapBesideSwap(StageConformance):
    definition = DEFINITION
    engine: ClassVar = {"tables": {"token_cap": TokenCapConfig(max_tokens_per_tenant=20)}, "preemption": "swap"}


def engine_with(cap: int):
    tables = {"token_cap": TokenCapConfig(max_tokens_per_tenant=cap)}
    return make_engine(backend=FakeBackend(eos=-1, max_model_len=64), stages=[DEFINITION], tables=tables)


def add(engine, name: str, tenant: str, num_tokens: int = 8, max_tokens: int = 4) -> None:
    prompt = tuple(range(1, num_tokens + 1))
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    engine.add(Request(request_id=name, prompt_token_ids=prompt, params=params, tenant=tenant))


def running(engine) -> Counter[str]:
    now = engine.inspect()
    return Counter(now.by_slot[slot].request.tenant for slot in now.running)


def test_tenant_at_its_cap_waits_and_others_do_not() -> None:
    engine: ClassVar = engine_with(16)
    for number in range(4):
        add(engine, f"a{number}", "a")
    add(engine, "b", "b")
    engine.step()
    assert running(engine) == {"a": 2, "b": 1}


def test_sequence_is_let_in_when_one_of_its_tenant_has_left() -> None:
    engine: ClassVar = engine_with(8)
    add(engine, "first", "a")
    add(engine, "second", "a")
    engine.step()
    assert running(engine) == {"a": 1}
    engine.abort("first")
    engine.step()
    assert engine.inspect().sequences["second"].state == "running"


def test_generated_tokens_count() -> None:
    engine: ClassVar = engine_with(10)
    add(engine, "first", "a", max_tokens=9)
    for _ in range(4):
        engine.step()
    add(engine, "second", "a")
    engine.step()
    assert running(engine) == {"a": 1}


def test_users_of_a_key_are_one_tenant() -> None:
    engine: ClassVar = engine_with(8)
    add(engine, "one", "key/one")
    add(engine, "other", "key/other")
    engine.step()
    assert sum(running(engine).values()) == 1


def test_prompt_above_the_cap_runs_alone_and_no_text_changes() -> None:
    engine: ClassVar = engine_with(4)
    for number in range(3):
        add(engine, str(number), "a", num_tokens=30 + number)
    ended = drain(engine)
    assert {name: one.token_ids.tolist() for name, one in ended.items()} == {
        str(number): fake_text(list(range(1, 31 + number)), 4, eos=-1) for number in range(3)
    }


def test_without_a_cap_an_engine_has_no_such_stage() -> None:
    with pytest.raises(KeyError):
        engine_with(0).stage("token_cap")
