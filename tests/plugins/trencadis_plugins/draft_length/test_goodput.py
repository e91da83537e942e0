"""Goodput against brute force over every choice, and in simulated engines whose best choice is known."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from trencadis_plugins.draft_length.config import FixedConfig, GoodputConfig
from trencadis_plugins.draft_length.fixed import Fixed
from trencadis_plugins.draft_length.goodput import Goodput, _best_drafts, _best_length
from trencadis_testing.draft_length import DraftLengthConformance, length_view, verified_step


class TestGoodput(DraftLengthConformance):
    make = Goodput


# ------------------------------------------------------------------------------------------------------ one choice


def scene(seed, count, longest):
    """Return limits, survivals that fall along each row, and times that rise by steps."""
    rng = np.random.default_rng(seed)
    most = rng.integers(1, longest + 1, count)
    most[0] = longest
    survival = np.cumprod(rng.uniform(0.05, 0.99, (count, longest)), axis=1)
    times = np.cumsum(rng.choice([0.0, 0.0, 0.4, 1.5], int(most.sum()) + 1)) + rng.uniform(1, 4)
    return most.astype(np.int32), survival, times


def rate(chosen, survival, times, drafting_s, num_running):
    tokens = num_running + sum(survival[i, :length].sum() for i, length in enumerate(chosen))
    return tokens / (times[sum(chosen)] + drafting_s[max(chosen)])


@pytest.mark.parametrize(
    "drafting_s", [[0.0, 0.3, 0.3, 0.3, 0.3], [0.0, 0.3, 0.6, 0.9, 1.2]], ids=["at once", "one by one"]
)
def test_the_best_drafts_are_those_of_brute_force(drafting_s):
    """Every combination of lengths is tried; making drafts takes a fixed time, or as much again for each after another."""
    for seed in range(25):
        most, survival, times = scene(seed, 3, 4)
        drafting = np.array(drafting_s)
        view = length_view(most.tolist(), num_running=4)
        chosen, found = _best_drafts(view, survival, times, drafting, np.ones(4))
        every = [c for c in itertools.product(*(range(limit + 1) for limit in most)) if any(c)]
        best = max(rate(c, survival, times, drafting, 4) for c in every)
        assert found == pytest.approx(best)
        assert rate(chosen.tolist(), survival, times, drafting, 4) == pytest.approx(best)


def test_the_best_number_is_at_the_end_of_a_bucket():
    """Survivals are positive and times constant in a bucket: one draft more in the same bucket is always better."""
    for seed in range(25):
        most, survival, times = scene(seed, 4, 5)
        chosen, _ = _best_drafts(length_view(most.tolist()), survival, times, np.zeros(6), np.ones(5))
        number = int(chosen.sum())
        assert number == len(times) - 1 or times[number + 1] > times[number]


def test_the_best_length_of_a_padded_pass_is_that_of_brute_force():
    for seed in range(25):
        most, survival, _ = scene(seed, 3, 6)
        times = np.sort(np.random.default_rng(seed).uniform(1, 3, 7))
        chosen, found = _best_length(length_view(most.tolist(), num_running=5, pads=True), survival, times)
        rates = [
            (5 + sum(survival[i, : min(length, limit)].sum() for i, limit in enumerate(most))) / times[length]
            for length in range(1, 7)
        ]
        assert found == pytest.approx(max(rates))
        assert chosen.tolist() == np.minimum(most, 1 + int(np.argmax(rates))).tolist()


def test_of_equal_drafts_no_one_is_chosen_without_those_before_it():
    chosen, _ = _best_drafts(
        length_view([3, 3]), np.full((2, 3), 0.5), np.array([1, 1, 1, 9, 9, 9, 9.0]), np.zeros(4), np.ones(3)
    )
    assert chosen.tolist() == [2, 0]


def test_drafts_fill_the_bucket_that_is_paid_for():
    """Three sequences with four tokens each cost what three with three cost."""
    length = Goodput()
    for _ in range(80):
        view = length_view([6, 6, 6], pads=True)
        chosen = length.choose(view)
        positions = 4 * (1 << int(chosen.max()).bit_length() if chosen.max() else 1)
        length.on_verified(verified_step(view, chosen, np.minimum(chosen, 2), step_s=1e-3 * (8 + positions)))
    assert chosen.tolist() == [3, 3, 3]


# --------------------------------------------------------------------------------------------- simulated engines


def cpu(tokens):
    return 2e-3 * (1 + 0.35 * (tokens > 1) + 0.04 * tokens)


def compute_bound(tokens):
    return 1e-3 * tokens


def memory_bound(tokens):
    return 1e-2 * max(1, tokens / 300) + 1e-5 * tokens


BEGUN = 80
"""Steps after which drafts that do not pay were measured and given up."""


def simulated(length, accepted, step_s, *, num=1, most=8, steps=300, draft_s=lambda _: 0.0, pads=False, after=0):
    """Return tokens per second after so many steps, and the mean length in each; ``accepted(step, sequence)`` is a draft's chance."""
    rng, tokens, total_s, lengths = random.Random(1), 0, 0.0, []
    view, rests, chosen = length_view([most] * num, pads=pads), 0, np.zeros(num, np.int32)
    for step in range(steps):
        is_told = not rests
        chosen = length.choose(view) if is_told else chosen
        rests = rests - 1 if rests else length.rest()
        stood = [
            next((j for j in range(limit) if rng.random() >= accepted(step, i)), limit)
            for i, limit in enumerate(chosen.tolist())
        ]
        positions = verified_step(view, chosen, stood).num_tokens
        took_s = step_s(positions) * (1 + rng.gauss(0, 0.02))
        drafting_s = draft_s(int(chosen.max()))
        if is_told:
            length.on_verified(verified_step(view, chosen, stood, step_s=took_s, draft_s=drafting_s))
        if step >= after:
            tokens, total_s = tokens + num + sum(stood), total_s + took_s + drafting_s
        lengths.append(float(chosen.mean()))
    return tokens / total_s, lengths


def plain(step_s, num=1, pads=False):
    positions = verified_step(length_view([1] * num, pads=pads), [0] * num, [0] * num).num_tokens
    return num / step_s(positions)


@pytest.mark.representatives(6)
@pytest.mark.parametrize("num", [1, 8, 64])
@pytest.mark.parametrize("step_s", [cpu, compute_bound, memory_bound])
@pytest.mark.parametrize("chance", [0.0, 0.3])
def test_it_is_never_slower_than_097_times_no_drafts(step_s, num, chance):
    speed, _ = simulated(Goodput(), lambda *_: chance, step_s, num=num, steps=580, after=BEGUN)
    assert speed >= 0.97 * plain(step_s, num)


@pytest.mark.parametrize("pads", [False, True])
def test_it_is_never_slower_than_097_times_where_drafts_take_long_to_make(pads):
    speed, lengths = simulated(
        Goodput(), lambda *_: 0.0, cpu, num=4, draft_s=lambda k: 6e-4 * k, steps=1500, pads=pads, after=BEGUN
    )
    assert speed >= 0.97 * plain(cpu, 4, pads)
    assert max(lengths[BEGUN:]) > 0


@pytest.mark.parametrize("chance", [0.0, 0.2])
@pytest.mark.parametrize("step_s", [cpu, compute_bound])
def test_what_the_first_steps_may_cost(step_s, chance):
    """Who asked for drafts gets them for 64 steps, unless they take twice what they bring."""
    speed, lengths = simulated(Goodput(), lambda *_: chance, step_s, steps=BEGUN)
    assert speed >= 0.6 * plain(step_s)
    assert lengths[-1] == 0


@pytest.mark.parametrize(
    ("step_s", "num", "chance"), [(cpu, 1, 0.8), (cpu, 8, 0.8), (cpu, 1, 0.95), (memory_bound, 8, 0.8)]
)
def test_it_comes_near_the_best_fixed_length(step_s, num, chance):
    speed, _ = simulated(Goodput(), lambda *_: chance, step_s, num=num)
    fixed = [
        simulated(Fixed(FixedConfig(num_draft_tokens=k)), lambda *_: chance, step_s, num=num)[0] for k in (1, 2, 4, 8)
    ]
    assert max(fixed) > 1.5 * plain(step_s, num)
    assert speed > 0.93 * max(fixed)


def test_long_drafts_are_not_asked_of_a_slow_speculator():
    """Each draft takes 0.3 of a plain step and stands 8 times of 10: four are best, and eight hardly pay."""
    _, lengths = simulated(Goodput(), lambda *_: 0.8, cpu, draft_s=lambda k: 6e-4 * k)
    assert 1.5 <= np.mean(lengths[-100:]) <= 5


def test_sequences_are_judged_one_by_one():
    length = Goodput()
    simulated(length, lambda _, i: 0.9 * (i % 2), cpu, num=8, most=4, steps=200)
    chosen = length.choose(length_view([4] * 8))
    assert chosen[::2].max() <= 1  # 1: a trial
    assert chosen[1::2].min() >= 2


def test_text_that_begins_to_repeat_is_found_by_a_trial():
    _, lengths = simulated(Goodput(), lambda step, _: 0.9 * (step >= 200), cpu, most=4, steps=400)
    assert np.mean(lengths[BEGUN:200]) < 0.2  # trials included
    assert np.mean(lengths[-80:]) > 3.5


def test_drafting_ends_when_text_no_longer_repeats():
    _, lengths = simulated(Goodput(), lambda step, _: 0.9 * (step < 100), cpu, most=4, steps=250)
    assert np.mean(lengths[50:100]) > 3.5
    assert np.mean(lengths[-100:]) < 0.8  # trials included


@pytest.mark.parametrize("probe_steps", [64, 100])
def test_trials_are_short_and_soon_no_more_often_than_configured(probe_steps):
    _, lengths = simulated(Goodput(GoodputConfig(probe_steps=probe_steps)), lambda *_: 0.0, cpu, steps=1000)
    trials = [step for step, length in enumerate(lengths) if length and step > BEGUN]
    starts = [step for step in trials if step - 1 not in trials]
    assert starts
    assert len(trials) <= 3 * len(starts)
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert gaps[0] < gaps[1] < gaps[2]
    assert min(gaps[3:]) >= probe_steps
    assert max(lengths[step] for step in trials) <= 4


@pytest.mark.parametrize("num", [1, 16])
def test_trials_take_little_time_where_each_costs_a_whole_step(num):
    speed, lengths = simulated(Goodput(), lambda *_: 0.0, compute_bound, num=num, steps=2000, after=BEGUN)
    assert max(lengths[100:]) > 0
    assert speed > 0.98 * plain(compute_bound, num)


def test_nothing_is_asked_and_told_between_trials():
    """A policy that is asked costs something even where it drafts nothing."""
    length, view, num_asked = Goodput(), length_view([4]), 0
    step = 0
    while step < 1000:
        chosen, num_asked, step = length.choose(view), num_asked + 1, step + 1
        length.on_verified(verified_step(view, chosen, [0], step_s=1e-3 * (1 + int(chosen[0]))))
        step += length.rest()
    assert num_asked < 100


def test_where_drafts_are_rarely_found_the_time_of_looking_counts():
    """A draft in one step of ten, always right, and looking for it takes as long as the step: not worth it; if it takes nothing, it is."""
    for draft_s, pays in ((2e-3, False), (0.0, True)):
        length, view, num_drafted = Goodput(), length_view([4]), 0
        for step in range(600):
            chosen = length.choose(view)
            drafts = np.where(step % 10 == 0, chosen, 0)
            took_s = cpu(1 + int(drafts[0]))
            length.on_verified(verified_step(view, drafts, drafts, step_s=took_s, draft_s=draft_s * bool(chosen[0])))
            num_drafted += step > 100 and int(chosen[0] > 0)
        assert (num_drafted > 250) is pays


@pytest.mark.parametrize("seed", range(12))
def test_it_converges_to_the_best_fixed_length(seed):
    """Any chance, any curve that rises: at the end within 12 % of the best number of drafts, none included, by expected tokens a second."""
    rng = np.random.default_rng(seed)
    chance, jump, slope, drafting = (
        rng.uniform(0.2, 0.95),
        rng.uniform(0, 1),
        rng.uniform(0.01, 0.4),
        rng.uniform(0, 0.2),
    )

    def step_s(tokens):
        return 1e-3 * (1 + jump * (tokens > 1) + slope * (tokens - 1))

    def draft_s(count):
        return 1e-3 * drafting * count

    def speed(count):
        return sum(chance**i for i in range(count + 1)) / (step_s(1 + count) + draft_s(count))

    _, lengths = simulated(Goodput(), lambda *_: chance, step_s, draft_s=draft_s, steps=1500)
    best = max(speed(count) for count in range(9))
    found = [speed(int(length)) for length in lengths[500:]]
    assert np.mean(found) > 0.88 * best


def test_trials_that_succeed_and_do_not_pay_end():
    """Drafts that stand but cost as much as the tokens that they save."""
    speed, lengths = simulated(Goodput(), lambda *_: 0.8, compute_bound, num=16, steps=600)
    assert speed > 0.97 * plain(compute_bound, 16)
    assert np.mean(lengths[100:]) < 0.2


def test_first_steps_measure_what_no_drafts_cost():
    length = Goodput()
    for _ in range(3):
        view = length_view([4, 4])
        assert length.choose(view).tolist() == [0, 0]
        length.on_verified(verified_step(view, [0, 0], [0, 0]))
    assert length.choose(view).max() > 0


def test_a_clock_that_stands_still_does_not_keep_it_from_drafting():
    length, view = Goodput(), length_view([4])
    for _ in range(20):
        chosen = length.choose(view)
        length.on_verified(verified_step(view, chosen, chosen, step_s=0.0, draft_s=0.0))
    assert chosen.tolist() == [4]


def test_a_step_with_a_prefill_teaches_no_time():
    length, view = Goodput(), length_view([4])
    for _ in range(3):
        length.on_verified(verified_step(view, [0], [0], num_prefill_tokens=512, step_s=9.0))
    assert not length._step_s.is_known
