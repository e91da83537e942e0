"""A frozen plugin with a component of every noun loads, builds and answers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import trencadis_kv
from support.nouns import ALL_NOUNS
from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext, Verification
from trencadis.records import BucketLimits, Shape
from trencadis.registry import load_with_plugins, resolve_plan
from trencadis_kv.testing.kv_policy import load_view
from trencadis_testing.draft_length import length_view
from trencadis_testing.router import replica_views, routing_request
from trencadis_testing.speculation import draft_view

CANARY = Path(__file__).with_name("version_1.py")
CONTEXT = ComponentContext(clock=SimulatedClock(), seed=0)
ALL = {f"{noun}.name": "canary" for noun in ALL_NOUNS if noun != "observer"} | {
    "observer.names": ["canary"],
    **{f"{noun}.fallback": "" for noun in ("bucketing", "scheduling", "eviction", "router")},
    "parallel.data": 2,
}


@pytest.fixture
def plan_and_registry():
    spec = importlib.util.spec_from_file_location(CANARY.stem, CANARY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    resolved, registry = load_with_plugins(
        environ={}, overrides=ALL, extra_plugins=[trencadis_kv, module], entry_points=()
    )
    registry.hooks.configure(resolved.config)
    return resolve_plan(resolved.config, registry), registry


def _build(plan_and_registry, noun):
    plan, registry = plan_and_registry
    choice = plan.observers[0] if noun == "observer" else plan.choices[noun]
    return registry.build(choice.component, choice.options, CONTEXT)


@pytest.mark.parametrize("noun", ALL_NOUNS)
def test_a_canary_of_every_noun_is_built(plan_and_registry, noun):
    assert isinstance(_build(plan_and_registry, noun), ALL_NOUNS[noun].contract)


def test_a_canary_hears_the_life_cycle_and_selects_its_backend(plan_and_registry):
    _, registry = plan_and_registry
    registry.hooks.ready(None, "")
    registry.hooks.closing()
    assert registry.hooks.select_backend("torch", lambda: registry.components("backend")) == "canary"


def test_a_canarys_bucketing_covers_and_has_its_options(plan_and_registry):
    bucketing = _build(plan_and_registry, "bucketing")
    shape = Shape(2, 3, 4)
    limits = BucketLimits(
        block_size=16,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_prefill_batch_size=4,
        num_blocks=16,
        contiguous=False,
        prefix_caching=True,
        max_draft_tokens=0,
    )
    assert bucketing.buckets(limits) == ()
    assert bucketing.bucket_for(shape).covers(shape)
    assert bucketing.limit == 3


def test_a_canarys_eviction_returns_what_it_was_given(plan_and_registry):
    eviction = _build(plan_and_registry, "eviction")
    eviction.on_free([3, 2, 1], depths=[2, 1, 0], now_s=0.0)
    eviction.on_hit([2], now_s=1.0)
    assert sorted(eviction.victims(2)) == [1, 3]


def test_a_canarys_speculator_drafts_within_its_limits(plan_and_registry):
    view = draft_view([[1], [2]], most=[2, 0])
    drafts = _build(plan_and_registry, "speculation").propose(view)
    assert (drafts.num_drafts <= view.max_draft_tokens).all()


def test_a_canarys_draft_length_stays_within_its_limits(plan_and_registry):
    view = length_view([4, 1])
    chosen = _build(plan_and_registry, "draft_length").choose(view)
    assert ((chosen >= 0) & (chosen <= view.max_draft_tokens)).all()


def test_a_canarys_rule_takes_what_was_sampled(plan_and_registry):
    verification = Verification(
        tokens=torch.tensor([[7, 8]]),
        parents=torch.tensor([[0, 1]]),
        num_drafts=torch.tensor([2]),
        is_linear=True,
        sampled=torch.tensor([[7, 9, 5]]),
    )
    rule = _build(plan_and_registry, "acceptance")
    assert rule.accept(verification).tolist() == [[1, 0]]
    assert not rule.needs_distributions


def test_a_canarys_connector_misses(plan_and_registry):
    pair = _build(plan_and_registry, "kv_connector")
    assert pair.scheduler.lookup(None, block_hashes=[], num_local_tokens=0).num_tokens == 0
    assert pair.worker.poll().loaded == ()


def test_a_canarys_codec_gives_back_what_it_got(plan_and_registry):
    codec, out = _build(plan_and_registry, "kv_codec"), bytearray(4)
    codec.decode(memoryview(codec.encode(memoryview(b"tile"), bytes(128))), bytes(128), memoryview(out))
    assert (out, codec.flags) == (b"tile", 0)


def test_a_canarys_policy_declines(plan_and_registry):
    assert _build(plan_and_registry, "kv_policy").admits_load(load_view()) == 0.0


def test_a_canarys_router_chooses_a_healthy_replica(plan_and_registry):
    views = replica_views([0, 1], is_healthy=[False, True])
    assert _build(plan_and_registry, "router").select(routing_request(), views) == 1
