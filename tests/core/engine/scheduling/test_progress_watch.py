"""A policy that runs nothing is found out, also where only other engines' prompts wait, and where their blocks are held."""

from __future__ import annotations

import pytest

from support.kv.prefill_connector import Host
from trencadis.engine.engine import Engine
from trencadis.interfaces import SchedulerView, SchedulingPolicy
from trencadis.records import FinishReason, Request, SamplingParams
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend


class Stops(SchedulingPolicy):
    """Gives first parts no tokens, once it is told to."""

    is_stopped = False

    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        return 0 if self.is_stopped else min(num_remaining, token_budget)


class Holding(Host):
    """Holds what finished sequences leave, until it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.store.holds = True
        self.store.delay = 10**6


def engine_of(host: Host, policy: SchedulingPolicy, *, num_blocks: int = 16) -> Engine:
    return make_engine(
        connector=host.pair(), policy=policy, backend=FakeBackend(eos=-1, max_model_len=64), num_blocks=num_blocks
    )


def prompt(name: str, num_tokens: int = 20, first: int = 1) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(first, first + num_tokens)),
        params=SamplingParams(max_tokens=1),
    )


def test_policy_that_starves_guests_ends_them_and_the_connector_hears_of_it() -> None:
    host, policy = Host(), Stops()
    policy.is_stopped = True
    engine = engine_of(host, policy)
    host.new = [prompt("remote")]
    for _ in range(6):
        engine.step()
    ((name, is_served, error),) = host.ends
    assert (name, is_served) == ("remote", False)
    assert "scheduled nothing twice in a row with 0 sequences running and 1 waiting" in error


@pytest.mark.parametrize("remote", [True, False])
def test_blocks_that_are_held_for_others_are_no_excuse(remote: bool) -> None:
    """They may be held for a minute, one behind the other."""
    host, policy = Holding(), Stops()
    engine = engine_of(host, policy)
    engine.add(prompt("first"))
    while not engine.step().finished:
        pass
    assert engine.inspect().stages["transfer"].num_pinned_blocks > 0
    policy.is_stopped = True
    if remote:
        host.new = [prompt("starved", first=40)]
    else:
        engine.add(prompt("starved", first=40))
    errors: list[str] = []
    for _ in range(6):
        errors += [end.error for end in engine.step().finished]
        errors += [error for _, _, error in host.ends]
        host.ends.clear()
    assert any("scheduled nothing twice in a row" in error for error in errors)


def test_blocks_that_are_held_are_an_excuse_if_what_is_left_is_too_little() -> None:
    """Whoever waits for them is not the policy's fault."""
    host, policy = Holding(), Stops()
    engine = engine_of(host, policy, num_blocks=8)
    engine.add(prompt("first"))
    while not engine.step().finished:
        pass
    host.new = [prompt("waits", first=40)]
    for _ in range(10):
        assert engine.step().finished == ()
    assert host.ends == []
    assert engine.num_waiting == 1


def test_who_needs_most_is_not_who_is_longest() -> None:
    """Four of 13 blocks are free for some steps: the first one needs five; the longest has its prefix in the cache, and needs one."""
    host = Holding()
    host.store.delay = 6
    engine = engine_of(host, SchedulingPolicy(), num_blocks=13)
    engine.add(prompt("held", 36))
    for _ in range(3):
        engine.step()
    assert engine.inspect().stages["transfer"].num_pinned_blocks == 9
    engine.add(prompt("first", 17, first=50))
    engine.add(prompt("longest", 37))
    ended = drain(engine)
    assert {name: end.finish_reason for name, end in ended.items()} == dict.fromkeys(
        ("first", "longest"), FinishReason.LENGTH
    )
