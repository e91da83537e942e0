"""What a step brings to the device and back: rows, drafts, samples, scores of prompts, and how long it took."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import numpy as np
import pytest
import torch

from support.backends.passes import ints
from trencadis.clock import SimulatedClock, SystemClock
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, Drafts, Phase, RowStart, SamplingParams, TableWrites, UnifiedBucket
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.device_rows import DeviceRows, HostTables
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.prompt_scores import NO_PROMPTS, padded_plan, score_padded
from trencadis_gaudi.runner import GaudiRunner, empty_pass
from trencadis_gaudi.timer import GaudiTimer
from trencadis_testing.backend import ArgmaxSampler
from trencadis_torch.prompt_logprobs import PromptPlan, score_prompt

PLAN = AllocationPlan(num_blocks=8, block_size=16, num_rows=3, max_model_len=40, max_num_batched_tokens=32)


class Started(ArgmaxSampler):
    def __init__(self):
        self.rows = []

    def start_row(self, start):
        self.rows.append(start.row)


def opened(clock=None):
    return load_habana(GaudiConfig(device="emulated", mode="lazy"), clock=clock or SystemClock())


@pytest.fixture
def habana():
    return opened()


@pytest.fixture
def rows(habana):
    made = DeviceRows(PLAN, habana)
    habana.mark_step()
    assert habana.emulated.num_compilations == 1
    return made


def start(row, *tokens, **params):
    params = SamplingParams(**params)
    return RowStart(row=row, token_ids=ints(*tokens), num_prompt_tokens=len(tokens), params=params, seed=0)


def test_prompts_of_all_lengths_are_written_by_one_recipe(habana, rows):
    sampler = Started()
    with habana.active():
        rows.start(start(0, 5, 6, 7, prompt_logprobs=2), sampler)
        rows.start(start(2, *range(1, 41)), sampler)
        rows.start(start(0, 9), sampler)
    assert habana.emulated.num_compilations == 2
    assert rows.tokens[0, :3].tolist() == [9, 0, 0]
    assert rows.tokens[2, :40].tolist() == list(range(1, 41))
    assert not rows.tokens[1].any()
    assert sampler.rows == [0, 2, 0]
    assert rows.prompt_logprobs[0] == 0


def test_drafts_are_written_behind_known_tokens_by_one_recipe_and_without_any_nothing_is(habana, rows):
    with habana.active():
        rows.write_pass_drafts(empty_pass(Bucket(3, 1, 8, Phase.DECODE)), None)
    assert habana.emulated.num_compilations == 1
    bucket = Bucket(3, 3, 8, Phase.DECODE)
    one = attrs.evolve(
        empty_pass(bucket), indices=ints(0, 2), rows=ints(2, 0), starts=ints(4, 9), query_lens=ints(3, 2)
    )
    drafts = Drafts(num_drafts=ints(2, 0, 1), token_ids=ints(71, 72, 81))
    with habana.active():
        rows.write_pass_drafts(one, drafts)
        rows.write_pass_drafts(empty_pass(bucket), None)
        rows.write_pass_drafts(one, attrs.evolve(drafts, num_drafts=ints(1, 0, 0), token_ids=ints(73)))
    assert habana.emulated.num_compilations == 2
    assert rows.tokens[2, 4:8].tolist() == [0, 71, 73, 0]
    assert rows.tokens[0, 9:12].tolist() == [0, 81, 0]
    assert not rows.tokens[1].any()


def test_of_two_writes_to_one_entry_the_later_counts():
    tables = HostTables(2, 3)
    tables.apply(TableWrites(rows=ints(0, 1, 0), columns=ints(2, 0, 2), block_ids=ints(7, 8, 9)))
    assert tables.blocks.tolist() == [[0, 0, 9], [8, 0, 0]]


@pytest.mark.parametrize(
    ("limits", "bucket", "expected"),
    [
        ({"max_num_seqs": 5, "max_steps": 3}, UnifiedBucket(2, 4, 9, True), Bucket(2, 3, 0, Phase.DECODE)),
        ({"max_num_seqs": 5, "max_steps": 3}, UnifiedBucket(64, 4, 9, True), Bucket(5, 3, 0, Phase.DECODE)),
        ({"max_merged": 4}, Bucket(1, 128, 0), Bucket(4, 128, 0)),
        ({"max_merged": 4}, Bucket(8, 1, 9, Phase.DECODE), Bucket(8, 1, 9, Phase.DECODE)),
        ({}, Bucket(1, 128, 0), Bucket(1, 128, 0)),
    ],
)
@pytest.mark.representatives(5)
def test_pass_samples_as_many_rows_as_it_may_have_sequences(limits, bucket, expected):
    made = GaudiRunner(None, None, rows=None, tables=None, habana=None, **{"max_merged": 0, **limits})
    assert made.sampling_bucket(bucket) == expected


TOKENS = SimpleNamespace(tokens=torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]], dtype=torch.int32))


def asked(*places, num_top=3):
    count = len(places)
    rows, positions, tokens = (np.array(column, np.int64) for column in zip(*places, strict=True))
    return PromptPlan(
        indices=np.arange(count), positions=positions, rows=rows, num_top=np.full(count, num_top), tokens=tokens
    )


@pytest.mark.parametrize("vocab_size", [60, 7])
def test_scores_of_prompts_are_those_without_padding_in_shapes_that_do_not_depend_on_what_is_asked_for(vocab_size):
    logits, shapes = torch.randn(70, vocab_size, generator=torch.Generator().manual_seed(1)), set()
    for plan in (asked((0, 1, 4), (1, 0, 2), (1, 3, 0)), asked((0, 0, 0), num_top=0), NO_PROMPTS):
        found = score_padded(logits, padded_plan(plan, 70), plan, TOKENS)
        if plan is not NO_PROMPTS:
            assert found.records() == score_prompt(logits[plan.tokens], plan, TOKENS).records()
        names = ("token_ids", "logprobs", "ranks", "top_token_ids", "top_logprobs")
        shapes.add(tuple(getattr(found, name).shape for name in names))
    assert len(shapes) == 1
    assert found.records() == []


def test_emulated_step_takes_what_the_clock_says():
    clock = SimulatedClock()
    timer = GaudiTimer(opened(clock))
    clock.advance(0.5)
    timer.stop()
    clock.advance(9)
    assert timer.wait() == 0.5


def test_step_of_a_gaudi_is_measured_by_two_events(habana):
    log = []

    class Event:
        def __init__(self, enable_timing=False):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("synchronize")

        def elapsed_time(self, end_event):
            return 250.0

    timer = GaudiTimer(attrs.evolve(habana, emulated=None, hpu=SimpleNamespace(Event=Event)))
    timer.stop()
    assert timer.wait() == 0.25
    assert log == ["record", "record", "synchronize"]
