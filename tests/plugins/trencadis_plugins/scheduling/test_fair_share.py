from __future__ import annotations

import inspect

import numpy as np
import pytest

from trencadis.interfaces import SchedulingPolicy
from trencadis.records import Request, SamplingParams
from trencadis_plugins.scheduling.config import FairShareConfig, PriorityConfig
from trencadis_plugins.scheduling.fair_share import FairShare, Wrapper
from trencadis_plugins.scheduling.fcfs import Fcfs
from trencadis_plugins.scheduling.priority import Priority
from trencadis_plugins.scheduling.shortest_first import ShortestFirst
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend
from trencadis_testing.scheduling import SchedulingConformance


class TestFairShare(SchedulingConformance):
    make = FairShare
    declares = frozenset({"fairness"})


class TestFairShareOfShortestFirst(SchedulingConformance):
    num_histories = 8

    def make(self):
        return FairShare(inner=ShortestFirst())


@pytest.fixture
def shared_by_two(view_of, request_of):
    """Makes a policy that has seen two tenants, of whom nothing is left."""

    def make(config=None):
        policy = FairShare(config)
        for slot, tenant in ((6, "x"), (7, "y")):
            policy.on_added(slot=slot, request=request_of(tenant, 1, tenant=tenant))
        policy.split(view_of(), token_budget=64)
        for slot in (6, 7):
            policy.on_finished(slot=slot, tenant=slot, num_output_tokens=0)
        return policy

    return make


def greedy(slots, tenants, prompts, weights, counters):
    """Admit one after the other from the tenant with the least counter, charging each: the algorithm as it is written down."""
    counters, queues, order = dict(counters), {}, []
    for slot in slots:
        queues.setdefault(tenants[slot], []).append(slot)
    while any(queues.values()):
        tenant = min((t for t in queues if queues[t]), key=lambda t: (counters[t], t))
        slot = queues[tenant].pop(0)
        counters[tenant] += prompts[slot] / weights[slot]
        order.append(slot)
    return order


def test_order_is_that_of_admitting_one_by_one(view_of):
    for seed in range(20):
        rng = np.random.default_rng(seed)
        slots = rng.permutation(8)[: rng.integers(1, 9)].tolist()
        tenants = dict(enumerate(rng.integers(0, 3, 8).tolist()))
        prompts = dict(enumerate(rng.integers(1, 200, 8).tolist()))
        weights = dict(enumerate(rng.choice([1.0, 2.0, 0.5], 8).tolist()))
        view = view_of(waiting=slots, tenant=tenants, num_prompt_tokens=prompts, num_tokens=prompts, weight=weights)
        expected = greedy(slots, tenants, prompts, weights, dict.fromkeys(range(3), 0.0))
        assert FairShare().order(view).tolist() == expected, seed


def test_prompts_and_outputs_are_charged_once_each_whatever_happens(shared_by_two, view_of, request_of):
    """100 prompt tokens at 1, outputs at 2, weight 4; preempted in between, finished with 12."""
    policy = shared_by_two()
    policy.on_added(slot=3, request=request_of("a", 100, weight=4.0))
    facts = {"tenant": {3: 1}, "weight": {3: 4.0}, "num_prompt_tokens": {3: 100}}
    policy.split(view_of(waiting=[3], **facts), token_budget=64)
    assert policy.used(1) == 0
    policy.split(view_of(running=[3], num_tokens={3: 105}, **facts), token_budget=64)
    assert policy.used(1) == (100 + 2 * 5) / 4
    policy.split(view_of(waiting=[3], num_tokens={3: 105}, **facts), token_budget=64)
    policy.split(view_of(running=[3], num_tokens={3: 107}, **facts), token_budget=64)
    assert policy.used(1) == (100 + 2 * 7) / 4
    policy.on_finished(slot=3, tenant=1, num_output_tokens=12)
    assert policy.used(1) == (100 + 2 * 12) / 4


def test_who_ended_before_it_was_seen_running_pays_unless_nothing_came_out(shared_by_two, request_of):
    for num_output_tokens, used in ((1, 35), (0, 0)):
        policy = shared_by_two(FairShareConfig(prompt_price=3, output_price=5))
        policy.on_added(slot=0, request=request_of("a", 10))
        policy.on_finished(slot=0, tenant=2, num_output_tokens=num_output_tokens)
        assert policy.used(2) == used


def test_a_tenant_that_comes_back_gets_no_credit_for_its_absence(shared_by_two, view_of):
    policy = shared_by_two()
    tenant = {0: 0, 1: 1}
    policy.order(view_of(waiting=[0], tenant=tenant))
    policy.split(view_of(running=[2], tenant={2: 0}, num_tokens={2: 600}), token_budget=64)
    assert policy.used(0) == 100 + 2 * 500
    policy.order(view_of(waiting=[0, 1], tenant=tenant))
    assert policy.used(1) == policy.used(0)


def test_after_an_empty_queue_the_last_that_left_it_is_the_measure(shared_by_two, view_of):
    policy = shared_by_two()
    policy.order(view_of(waiting=[0], tenant={0: 0}))
    policy.split(view_of(running=[0], tenant={0: 0}), token_budget=64)
    policy.order(view_of(waiting=[1], tenant={1: 1}))
    assert policy.used(1) == policy.used(0) == 100


def test_a_lift_never_takes_away(shared_by_two, view_of):
    policy = shared_by_two()
    policy.split(view_of(running=[1], tenant={1: 1}, num_tokens={1: 900}), token_budget=64)
    policy.order(view_of(waiting=[0], tenant={0: 0}))
    policy.order(view_of(waiting=[0, 1], tenant={0: 0, 1: 1}))
    assert policy.used(1) == 100 + 2 * 800


def test_one_tenants_requests_are_in_the_inner_policys_order(view_of):
    policy = FairShare(inner=Priority(PriorityConfig(age_s=0)))
    view = view_of(waiting=[0, 1, 2, 3], tenant={0: 0, 1: 0, 2: 1, 3: 1}, priority={0: 9, 1: 1, 2: 9, 3: 1})
    assert policy.order(view).tolist() == [1, 3, 0, 2]


SHAPES = {0: (4, 30), 1: (60, 3)}


def gaps_of(policy, num_blocks):
    """Serve a flood of tenant 0, short prompts and long outputs, and after it tenant 1, the reverse.

    Returns the difference of their service after every step in which both have requests that wait.
    """
    engine = make_engine(
        policy=policy,
        num_blocks=num_blocks,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        prefix_caching=False,
        backend=FakeBackend(eos=-1, max_model_len=120),
    )
    for number, tenant in enumerate([0] * 40 + [1] * 20):
        length, max_tokens = SHAPES[tenant]
        engine.add(
            Request(
                request_id=str(number),
                prompt_token_ids=tuple((number * 7 + i) % 97 for i in range(length)),
                params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
                tenant=str(tenant),
            )
        )
    served, gaps, seen = [0.0, 0.0], [0.0], set()
    table = engine._state.table
    tenant_of = table.tenant[: len(table)].tolist()
    while {0, 1} <= set(table.tenant[engine._state.waiting.slots].tolist()):
        deltas = engine.step()
        for slot, num_tokens in zip(deltas.slots.tolist(), deltas.num_tokens.tolist(), strict=True):
            tenant = tenant_of[slot]
            served[tenant] += 2 * num_tokens + (0 if slot in seen else SHAPES[tenant][0])
            seen.add(slot)
        gaps.append(served[0] - served[1])
    num_preempted = engine.totals.num_preempted
    drain(engine, 4000)
    return gaps, num_preempted


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("num_blocks", "preempts"), [(40, True), (400, False)])
def test_backlogged_tenants_never_drift_further_apart_than_the_bound(num_blocks, preempts):
    """25: |W_f - W_g| <= 2 max(w_p L, w_q M) while both have requests that wait, also across preemptions.

    M is the KV cache in tokens, but no more than six sequences of 34 tokens run: 2 x 2 x 6 x 34. Served in order, the flood
    has it all.
    """
    gaps, num_preempted = gaps_of(FairShare(), num_blocks)
    bound = 2 * max(60, 2 * min(num_blocks * 4, 6 * 34))
    assert max(gaps) - min(gaps) <= bound
    assert bool(num_preempted) is preempts
    in_order, _ = gaps_of(Fcfs(), num_blocks)
    assert max(in_order) - min(in_order) > 2 * bound


def plans_of(policy, seed):
    """Return what every step of a random workload of one tenant under KV pressure scheduled."""
    rng = np.random.default_rng(seed)
    engine = make_engine(policy=policy, num_blocks=24, max_num_seqs=5, max_num_batched_tokens=24)
    plans, number = [], 0
    while number < 30 or engine.has_work:
        for _ in range(int(rng.integers(0, 3)) if number < 30 else 0):
            engine.add(
                Request(
                    request_id=str(number),
                    prompt_token_ids=tuple(rng.integers(1, 9, rng.integers(1, 30)).tolist()),
                    params=SamplingParams(max_tokens=int(rng.integers(1, 20)), temperature=0.0),
                    tenant="only",
                )
            )
            number += 1
        deltas = engine.step()
        plans.append((deltas.slots.tolist(), deltas.token_ids.tolist(), [one.request_id for one in deltas.finished]))
    return plans, engine.totals.num_preempted


def test_with_one_tenant_every_plan_is_that_of_the_inner_policy():
    num_preempted = 0
    for seed in range(3):
        expected = plans_of(Fcfs(), seed)
        assert plans_of(FairShare(), seed) == expected
        num_preempted += expected[1]
    assert num_preempted
    assert plans_of(FairShare(inner=ShortestFirst()), 1) == plans_of(ShortestFirst(), 1)


def test_one_tenants_order_is_the_very_array_of_the_inner_policy(view_of, request_of):
    """So the engine need not even compare it with the queue."""
    policy = FairShare()
    policy.on_added(slot=1, request=request_of("a", 5, tenant="t"))
    view = view_of(waiting=[1])
    assert policy.order(view) is view.waiting


def test_what_ran_before_there_was_a_second_tenant_is_not_charged_to_the_first(view_of, request_of):
    policy = FairShare()
    policy.on_added(slot=0, request=request_of("a", 100, tenant="t"))
    policy.on_added(slot=1, request=request_of("b", 100, tenant="t"))
    policy.split(view_of(running=[0, 1], num_tokens={0: 150, 1: 150}), token_budget=64)
    assert policy.used(0) == 0
    policy.on_added(slot=2, request=request_of("c", 100, tenant="u"))
    tenant = {2: 1}
    facts = {"tenant": tenant, "num_tokens": {0: 160, 1: 160}, "num_preemptions": {1: 1}}
    policy.split(view_of(running=[0], waiting=[1, 2], **facts), token_budget=64)
    policy.order(view_of(waiting=[1, 2], **facts))
    assert policy.used(0) == policy.used(1) == 0
    facts["num_tokens"] = {0: 163, 1: 160}
    policy.split(view_of(running=[0, 1], waiting=[2], **facts), token_budget=64)
    assert policy.used(0) == 2 * 3


def test_a_policy_that_takes_over_sees_who_is_there(view_of):
    policy = FairShare()
    view = view_of(waiting=[0, 1, 2], tenant={2: 1})
    policy.split(view, token_budget=64)
    assert policy.order(view).tolist() == [0, 2, 1]


def test_everything_is_asked_of_and_told_to_the_inner_policy():
    inner, asked = SchedulingPolicy(), {}
    methods = [name for name in vars(Wrapper) if not name.startswith("_")]
    for name in methods:
        setattr(inner, name, lambda *view, name=name, **facts: asked.update({name: (*view, facts)}) or name)
    for name in methods:
        _, *parameters = inspect.signature(getattr(Wrapper, name)).parameters.values()
        view = [object() for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        facts = {one.name: object() for one in parameters if one.kind is one.KEYWORD_ONLY}
        assert getattr(Wrapper(inner), name)(*view, **facts) == (None if name.startswith("on_") else name)
        assert asked.pop(name) == (*view, facts)
