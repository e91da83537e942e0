from __future__ import annotations

import numpy as np
import pytest

from trencadis_plugins.scheduling.config import PrefixAffinityConfig
from trencadis_plugins.scheduling.prefix_affinity import Families, PrefixAffinity
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend
from trencadis_testing.scheduling import SchedulingConformance


class TestPrefixAffinity(SchedulingConformance):
    num_histories = 8

    def make(self):
        return PrefixAffinity(PrefixAffinityConfig(shared_tokens=8))


@pytest.fixture
def policy():
    return PrefixAffinity(PrefixAffinityConfig(age_tokens_per_s=0))


def test_longest_cached_prefix_goes_first(view_of, policy):
    view = view_of(waiting=[0, 1, 2, 3], cached={0: 0, 1: 48, 2: 160, 3: 48})
    assert policy.order(view).tolist() == [2, 1, 3, 0]


def test_with_a_long_queue_nobody_is_looked_up(view_of):
    policy = PrefixAffinity(PrefixAffinityConfig(max_waiting=2))
    view = view_of(waiting=[0, 1, 2], cached={2: 160})
    assert policy.order(view).tolist() == [0, 1, 2]


def test_of_those_that_begin_alike_and_cold_one_goes_ahead(view_of, request_of, policy):
    """1 and 3 begin like 0; 2 begins like nobody; 4 has another salt."""
    alike = tuple(range(32))
    for slot in (0, 1, 3):
        policy.on_added(slot=slot, request=request_of(str(slot), prompt_token_ids=(*alike, slot)))
    policy.on_added(slot=2, request=request_of("2", prompt_token_ids=tuple(range(50, 90))))
    policy.on_added(slot=4, request=request_of("4", prompt_token_ids=(*alike, 4), cache_salt="other"))
    assert policy.order(view_of(waiting=[0, 1, 2, 3, 4])).tolist() == [0, 2, 4, 1, 3]


def test_once_their_prefix_is_cached_they_wait_for_nobody(view_of, request_of, policy):
    for slot in (0, 1):
        policy.on_added(slot=slot, request=request_of(str(slot), prompt_token_ids=tuple(range(80))))
    view = view_of(waiting=[2, 0, 1], cached={0: 64, 1: 64})
    assert policy.order(view).tolist() == [0, 1, 2]


def test_waiting_makes_up_for_cached_tokens(view_of):
    policy = PrefixAffinity(PrefixAffinityConfig(age_tokens_per_s=10))
    for later_s, first in ((4.0, 1), (6.0, 0)):
        view = view_of(waiting=[0, 1], cached={1: 50}, arrival_s={1: later_s})
        assert policy.order(view)[0] == first


def test_followers_wait_until_the_first_has_its_token_and_no_longer(view_of, request_of, policy):
    for slot in (0, 1, 2):
        policy.on_added(slot=slot, request=request_of(str(slot), prompt_token_ids=tuple(range(80))))

    def chunks(view):
        policy.order(view)
        return [policy.chunk(view, slot=slot, num_remaining=80, token_budget=64) for slot in view.waiting.tolist()]

    assert chunks(view_of(waiting=[0, 1, 2])) == [64, 0, 0]
    at_its_prompt = view_of(waiting=[1, 2], running=[0], num_blocks={0: 5})
    assert chunks(at_its_prompt) == [0, 0]
    assert policy.chunk(at_its_prompt, slot=0, num_remaining=16, token_budget=64) == 16
    # Its prefix is not in the cache, as where there is none: nobody waits for it again.
    assert chunks(view_of(waiting=[1, 2], running=[0], first_token_s={0: 1.0})) == [64, 64]


def test_nothing_is_kept_of_families_that_died_out(request_of, policy):
    for slot in range(5):
        policy.on_added(slot=slot, request=request_of(str(slot), prompt_token_ids=tuple(range(slot % 2, 60))))
    assert len(policy.families) == 2
    for slot in range(5):
        policy.on_finished(slot=slot, tenant=0, num_output_tokens=1)
    assert len(policy.families) == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_alike_prompts_in_one_burst_pay_for_their_prefix_once(request_of, overlap):
    """Served in order all six of a burst compute it, as they are admitted in one step."""

    def computed(policy):
        engine = make_engine(
            policy=policy,
            num_blocks=200,
            max_num_batched_tokens=512,
            async_scheduling=overlap,
            backend=FakeBackend(eos=-1, max_model_len=400),
        )
        for number in range(6):
            engine.add(request_of(str(number), prompt_token_ids=(*range(40), *[number] * 8), max_tokens=2))
        ends = drain(engine)
        return sum(end.num_prompt_tokens - end.num_cached_tokens for end in ends.values())

    assert computed(PrefixAffinity(PrefixAffinityConfig(max_waiting=0))) == 6 * 48
    assert computed(PrefixAffinity()) == 48 + 5 * 8


def families_of(families, *slots):
    return families.of(np.array(slots, np.int32)).tolist()


def test_equal_beginnings_and_salts_are_one_family(request_of):
    families = Families(3)
    prompts = {0: (1, 2, 3, 4), 1: (1, 2, 3, 9), 2: (1, 2, 4, 4), 3: (1, 2, 3)}
    for slot, prompt in prompts.items():
        families.add(slot, request_of(str(slot), prompt_token_ids=prompt))
    families.add(4, request_of("4", prompt_token_ids=prompts[0], cache_salt="other"))
    assert families_of(families, 0, 1, 2, 3, 4) == [1, 1, 2, 0, 3]


def test_numbers_are_never_used_again(request_of):
    families = Families(2)
    for slot in (0, 1):
        families.add(slot, request_of(str(slot), prompt_token_ids=(5, 6, 7)))
    families.remove(0)
    assert families_of(families, 0, 1) == [0, 1]
    families.remove(1)
    assert len(families) == 0
    families.add(0, request_of("0", prompt_token_ids=(5, 6, 7)))
    assert families_of(families, 0) == [2]


def test_removing_who_is_of_no_family_changes_nothing(request_of):
    families = Families(0)
    families.add(0, request_of("0"))
    families.remove(0)
    families.remove(77)
    assert len(families) == 0
