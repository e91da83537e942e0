from __future__ import annotations

import math

import pytest

from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis_kv.interfaces import FailureView, KVPolicy, SaveView, SourceView
from trencadis_kv.policies import trencadis_kv_policies
from trencadis_kv.policies.always import Always
from trencadis_kv.policies.config import CostAwareConfig
from trencadis_kv.policies.cost_aware import CostAware
from trencadis_kv.testing import KVPolicyConformance
from trencadis_kv.testing.kv_policy import load_view

NAN = math.nan


class TestCostAware(KVPolicyConformance):
    make = CostAware


@pytest.mark.parametrize(
    ("load_s", "compute_s", "wait_s"),
    [
        (0.1, 1.0, 0.8),  # never longer than the share of computing
        (0.8, 1.0, 0.8),
        (0.81, 1.0, 0.0),  # slower than that: computed
        (1.0, 100.0, 30.0),  # the timeout is sooner
        (NAN, 1.0, 0.8),  # nobody has loaded yet: tried, with the cap
        (5.0, NAN, 30.0),  # nobody has computed yet
        (NAN, NAN, 30.0),
        (0.0, 0.0, 0.0),
    ],
)
def test_a_load_may_take_a_share_of_the_time_to_compute(load_s, compute_s, wait_s):
    view = load_view(load_s=load_s, compute_s=compute_s, timeout_s=30.0)
    assert CostAware().admits_load(view) == pytest.approx(wait_s)


def test_the_share_is_an_option():
    view = load_view(load_s=0.4, compute_s=1.0)
    assert CostAware(CostAwareConfig(max_load_fraction=0.5)).admits_load(view) == pytest.approx(0.5)
    assert CostAware(CostAwareConfig(max_load_fraction=0.3)).admits_load(view) == 0.0


@pytest.mark.parametrize(("staged", "saved"), [(0.0, 4), (0.9, 4), (0.91, 0), (1.0, 0)])
def test_nothing_is_saved_while_staging_is_nearly_full(staged, saved):
    assert CostAware().admits_save(SaveView(num_blocks=4, num_bytes=4, staged_fraction=staged)) == saved


def _source(num_tokens, load_s, compute_s):
    return SourceView(name="any", num_tokens=num_tokens, load_s=load_s, compute_s=compute_s)


def test_the_source_is_chosen_from_which_the_prefix_is_complete_first():
    # 0.1 s of loading and 0.6 s of computing the rest, against 0.9 s of loading it all
    assert CostAware().choose_source([_source(100, 0.9, 1.0), _source(40, 0.1, 0.4)]) == 1
    assert CostAware().choose_source([_source(100, 0.6, 1.0), _source(40, 0.1, 0.4)]) == 0


def test_equals_are_decided_for_the_first():
    assert CostAware().choose_source([_source(100, 0.5, 1.0), _source(100, 0.5, 1.0)]) == 0


@pytest.mark.parametrize("unknown", [(NAN, 1.0), (0.1, NAN)])
def test_while_something_is_unknown_the_longest_is_chosen(unknown):
    assert CostAware().choose_source([_source(16, *unknown), _source(64, 0.5, 1.0), _source(64, 0.1, 1.0)]) == 1


class TestAlways(KVPolicyConformance):
    make = Always


def test_everything_is_moved_however_long_it_takes():
    policy = Always()
    assert policy.admits_load(load_view(1, load_s=1e6, compute_s=1e-6, timeout_s=7.0)) == 7.0
    assert policy.admits_save(SaveView(num_blocks=9, num_bytes=9, staged_fraction=1.0)) == 9


def test_the_source_with_the_most_is_chosen_and_the_first_of_equals():
    sources = [SourceView(name=str(n), num_tokens=n, load_s=math.nan) for n in (16, 64, 64, 32)]
    assert Always().choose_source(sources) == 1


def test_what_fails_is_computed():
    view = FailureView(cause="lost", num_valid_tokens=0, num_lost_tokens=16, num_attempts=1)
    assert Always().on_failure(view) == "compute"


COMPONENTS = {component.name: component for component in trencadis_kv_policies()}


def test_there_are_two_policies():
    assert set(COMPONENTS) == {"cost_aware", "always"}


@pytest.mark.parametrize("name", COMPONENTS)
def test_factory_makes_a_policy_named_as_the_component(name):
    component = COMPONENTS[name]
    made = component.factory(component.config(), ComponentContext(clock=SimulatedClock(), seed=0))
    assert isinstance(made, KVPolicy)
    assert type(made).__name__ == name.title().replace("_", "")
    assert component.summary
