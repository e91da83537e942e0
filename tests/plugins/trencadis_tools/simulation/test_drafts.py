"""Simulated drafts: what comes of them is what closed formulas and slow references say, and the policies that choose them are the real ones."""

from __future__ import annotations

import math
from pathlib import Path

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.simulation import STEP_TIMES, asked, config_of, mixed, run
from trencadis.errors import ConfigError, StepFailedError
from trencadis.interfaces import DraftLength
from trencadis.records import Bucket, Phase
from trencadis_tools.simulation import DraftFacts, ReplicaEvent, StepShape, load_drafts
from trencadis_tools.simulation.drafts import DrawnDrafter, drafter_of, simulated_speculation
from trencadis_tools.simulation.step_times import BucketStepTimes
from trencadis_tools.workloads.draws import Stream, uniforms

HERE = "tests.plugins.trencadis_tools.simulation.test_drafts"


def drafting(most: int = 3, length: str = "fixed", **options):
    return {
        "speculation": {"name": "ngram", "ngram": {"max_draft_tokens": most}},
        "draft_length": {"name": length, **({length: options} if options else {})},
    }


def every(acceptance: float | None = None, **facts):
    """Facts that hold for every speculator."""
    return {"": DraftFacts(acceptance=acceptance, **facts)}


def drawn(seed: int = 0, **facts) -> DrawnDrafter:
    return DrawnDrafter(DraftFacts(**facts), seed=seed, step_times=STEP_TIMES)


# ------------------------------------------------------------------------------------------------ as without drafts


def test_with_at_most_no_drafts_the_run_is_that_without_speculation():
    requests, one_by_one = mixed(40), {"engine": {"async_scheduling": False}}
    none = one_by_one | drafting(3, "table", sizes=("1-:0",))
    facts = every(0.0, step_s=1.0, token_s=1.0, step_ratio=1.0)
    assert attrs.evolve(run(requests, none, drafts=facts), num_plans=0) == attrs.evolve(
        run(requests, one_by_one), num_plans=0
    )


def test_drafts_that_are_never_right_and_cost_nothing_change_no_time():
    class Free:
        """A step takes the same, whatever is in it."""

        def device_s(self, shape):
            return 0.02 if shape.num_tokens else 0.0

        def host_s(self, shape):
            return 0.0

    alone = [asked(f"r{index}", arrival_s=index * 2.0, output=11) for index in range(5)]
    tables = {"engine": {"async_scheduling": False}}
    with_drafts = run(alone, tables | drafting(4), drafts=every(0.0), step_times=Free())
    without = run(alone, tables, step_times=Free())
    assert with_drafts.num_draft_tokens > 100
    assert [one.finished_s for one in with_drafts.records] == pytest.approx([one.finished_s for one in without.records])


# ------------------------------------------------------------------------------------------------- closed formulas


@pytest.mark.parametrize("most", [1, 2, 3, 5])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 13])
def test_drafts_that_are_always_right_take_one_step_for_each_of_them_and_one_more(most, num_tokens):
    found = run([asked("a", output=num_tokens)], drafting(most), drafts=every(1.0))
    assert found.num_steps == 1 + math.ceil((num_tokens - 1) / (most + 1))
    assert found.records[0].num_output_tokens == num_tokens


@pytest.mark.parametrize(("chance", "most"), [(0.7, 3), (0.3, 5)])
def test_the_mean_tokens_of_a_step_are_the_geometric_sum_within_four_standard_errors(chance, most):
    found = run(
        [asked("a", output=700)],
        {"cache": {"num_blocks": 400}, **drafting(most)},
        drafts=every(chance),
    )
    num_steps = found.num_steps - 1  # the first one reads the prompt
    by_length = [chance**count * (1 - chance) for count in range(most)] + [chance**most]
    mean = sum((1 + count) * share for count, share in enumerate(by_length))
    assert mean == pytest.approx((1 - chance ** (most + 1)) / (1 - chance))
    variance = sum((1 + count) ** 2 * share for count, share in enumerate(by_length)) - mean**2
    assert 699 / num_steps == pytest.approx(mean, abs=4 * math.sqrt(variance / num_steps))
    assert found.num_accepted_tokens == pytest.approx(699 - num_steps, abs=1)


def test_drafting_takes_its_time_on_the_clock():
    facts = every(0.0, step_s=0.01, token_s=0.001, step_ratio=0.5)
    found = run([asked("a", prompt=20, output=4)], drafting(2), drafts=facts)
    seconds = STEP_TIMES.device_s(StepShape(num_prefills=1, num_prefill_tokens=20, num_prefill_context=20))
    for known in (21, 22, 23):
        left = 24 - known - 1  # the last token needs no draft
        number = min(2, left)
        if number:
            seconds += 0.01 + 0.001 * number
        for place in range(number):
            one = StepShape(num_decodes=1, num_decode_tokens=1, num_decode_context=known + place)
            seconds += 0.5 * STEP_TIMES.device_s(one)
        seconds += STEP_TIMES.device_s(
            StepShape(num_decodes=1, num_decode_tokens=1 + number, num_decode_context=known + number)
        )
    assert found.records[0].finished_s == pytest.approx(seconds, rel=1e-12)


def test_shares_by_position_are_those_that_drafts_have():
    shares = (0.8, 0.6, 0.15)
    drafter = drawn(acceptance_by_position=shares)
    number = 40_000
    right = drafter.num_right(np.zeros(number, np.int64), 100 * np.arange(number), np.full(number, 5, np.int32))
    expected = (*shares, 0.15 * 0.25, 0.15 * 0.25**2)  # the last ratio goes on
    for place, share in enumerate(expected):
        assert (right > place).mean() == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / number))


def test_requests_differ_by_the_spread_around_the_same_mean():
    drafter = drawn(acceptance=0.6, spread=0.3)
    number = 400
    shares = np.array(
        [
            drafter.num_right(np.full(number, index), np.arange(number), np.ones(number, np.int32)).mean()
            for index in range(number)
        ]
    )
    assert shares.mean() == pytest.approx(0.6, abs=4 * 0.3 / math.sqrt(3 * number))
    # Of an even distribution, and of the draws.
    variance = 0.3**2 / 3 + (0.6 * 0.4 - 0.3**2 / 3) / number
    assert shares.std() == pytest.approx(math.sqrt(variance), rel=0.1)
    sure = drawn(acceptance=1.0, spread=1.0).num_right(
        np.arange(number), np.arange(number), np.full(number, 3, np.int32)
    )
    assert set(sure.tolist()) == {0, 1, 2, 3}


# ----------------------------------------------------------------------------------------------- facts, not chances


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32),
    asked_for=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), st.integers(1, 6)), min_size=1, max_size=20),
    acceptance=st.floats(0, 1),
    found=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_whether_a_draft_is_right_is_a_fact_of_request_and_position(seed, asked_for, acceptance, found):
    drafter = drawn(seed, acceptance=acceptance, found=found)
    indices, positions, counts = (np.array(column) for column in zip(*asked_for, strict=True))
    right = drafter.num_right(indices, positions, counts.astype(np.int32))
    there = drafter.num_proposed(indices, positions, counts.astype(np.int32))
    for number, (index, position, count) in enumerate(asked_for):
        reference = 0
        while reference < count and float(uniforms(seed, Stream.DRAFTS, index, position + reference)) < acceptance:
            reference += 1
        assert right[number] == reference
        assert there[number] == (count if float(uniforms(seed, Stream.FOUND_DRAFTS, index, position)) < found else 0)


@pytest.mark.parametrize("length", ["fixed", "table", "goodput"])
def test_answers_have_their_true_lengths_whatever_is_preempted_or_fails(length):
    requests = mixed(40, seed=2)
    tables = {**drafting(4, length), "cache": {"num_blocks": 60}, "router": {"name": "least_loaded"}}
    events = [ReplicaEvent(time_s=time_s, replica=1, kind=kind) for time_s, kind in ((0.35, "fail"), (0.8, "join"))]
    found = run(requests, tables, drafts=every(0.6, step_s=0.001), replicas=2, events=events, token_times=True)
    assert found.num_moved
    assert found.num_accepted_tokens
    assert [one.num_output_tokens for one in found.records] == [one.num_output_tokens for one in requests]
    assert [len(one.token_times_s) for one in found.records] == [one.num_output_tokens for one in requests]


def test_a_chosen_length_learns_what_drafting_takes():
    requests = mixed(40)
    cheap, dear = (run(requests, drafting(4, "goodput"), drafts=every(0.6, step_s=step_s)) for step_s in (0.0001, 0.05))
    assert cheap.num_draft_tokens > 400
    assert dear.num_draft_tokens < cheap.num_draft_tokens / 5
    everywhere = run(requests, drafting(4), drafts=every(0.6, step_s=0.05))
    assert dear.duration_s < 0.8 * everywhere.duration_s


def test_drafts_of_a_padded_device_are_verified_in_its_buckets():
    line = (0.001, 1e-5, 1e-6)
    times = BucketStepTimes(
        times_s={Bucket(1, 8, 0, Phase.PREFILL): 0.01, Bucket(4, 1, 32, Phase.DECODE): 0.01},
        lines={Phase.PREFILL: line, Phase.DECODE: line},
    )
    found = run([asked("a", output=13)], drafting(3), drafts=every(1.0), step_times=times)
    assert (found.num_steps, found.num_accepted_tokens) == (4, 9)
    with pytest.raises(ConfigError, match=r"step_ratio = 0.1: steps of buckets"):
        run([asked("a")], drafting(3), drafts=every(1.0, step_ratio=0.1), step_times=times)


class Raises(DraftLength):
    def choose(self, view):
        raise RuntimeError("no idea")


def test_a_draft_length_that_fails_is_no_result():
    tables = {"speculation": {"name": "ngram"}, "draft_length": {"name": f"{HERE}:Raises", "fallback": "fixed"}}
    with pytest.raises(StepFailedError, match="speculation went off"):
        run([asked("a")], tables, drafts=every(0.5))


def test_equal_inputs_give_equal_runs():
    tables = {**drafting(4, "goodput"), "router": {"name": "power_of_two"}}
    one, other = (run(mixed(30), tables, replicas=2, drafts=every(0.6, found=0.7, step_s=1e-4)) for _ in range(2))
    assert repr(one.records) == repr(other.records)


# ------------------------------------------------------------------------------------------------------------ files


def test_facts_are_read_from_a_number_or_a_file(tmp_path: Path):
    assert load_drafts("") == {}
    assert load_drafts("0.7") == {"": DraftFacts(acceptance=0.7)}
    file = tmp_path / "drafts.toml"
    file.write_text("[ngram]\nacceptance_by_position = [0.5, 0.25]\nfound = 0.4\n[draft_model]\nacceptance = 1\n")
    assert load_drafts(str(file)) == {
        "ngram": DraftFacts(acceptance_by_position=(0.5, 0.25), found=0.4),
        "draft_model": DraftFacts(acceptance=1),
    }


def test_a_speculator_that_nothing_is_known_of_is_refused_and_so_are_branches():
    with pytest.raises(
        ConfigError, match=r'name = "ngram": without a model .* what is known is for suffix\. .*--drafts 0\.7'
    ):
        run([asked("a")], drafting(), drafts={"suffix": DraftFacts(acceptance=0.5)})
    tree = {"speculation": {"name": "suffix", "suffix": {"tree": True}}}
    with pytest.raises(ConfigError, match=r"\[speculation.suffix\] tree = True: .* without branches"):
        run([asked("a")], tree, drafts=every(0.5))


def test_as_many_drafts_are_asked_for_as_the_speculator_may_make():
    def most(name, **options):
        config, _ = config_of(speculation={"name": name, **options})
        drafter = drafter_of(config, every(0.5), seed=0, step_times=STEP_TIMES)
        (options,) = simulated_speculation(config, drafter).components.values()
        return options["max_draft_tokens"]

    assert most("ngram", ngram={"max_draft_tokens": 7}) == 7
    assert most("mixed", ngram={"max_draft_tokens": 2}, suffix={"max_draft_tokens": 6}) == 6
    assert most("draft_model", draft_model={"max_draft_tokens": 5}) == 5
    assert most("mine:Drafter", options={"max_draft_tokens": 9}) == 9
    with pytest.raises(ConfigError, match="do not say how many drafts"):
        most("mine:Drafter")
