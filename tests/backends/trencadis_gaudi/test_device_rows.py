from __future__ import annotations

import attrs
import numpy as np
import pytest

from trencadis.clock import SystemClock
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, Drafts, Phase, RowStart, SamplingParams, TableWrites
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.device_rows import DeviceRows, HostTables
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.runner import empty_pass
from trencadis_testing.backend import ArgmaxSampler

PLAN = AllocationPlan(num_blocks=8, block_size=16, num_rows=3, max_model_len=40, max_num_batched_tokens=32)


class Started(ArgmaxSampler):
    def __init__(self):
        self.rows = []

    def start_row(self, start):
        self.rows.append(start.row)


@pytest.fixture
def habana():
    return load_habana(GaudiConfig(device="emulated", mode="lazy"), clock=SystemClock())


def ints(*values):
    return np.array(values, np.int32)


def start(row, *tokens, **params):
    params = SamplingParams(**params)
    return RowStart(row=row, token_ids=ints(*tokens), num_prompt_tokens=len(tokens), params=params, seed=0)


def made(habana):
    rows = DeviceRows(PLAN, habana)
    habana.mark_step()
    return rows


def test_prompts_of_all_lengths_are_written_by_one_recipe(habana):
    rows, sampler = made(habana), Started()
    with habana.active():
        rows.start(start(0, 5, 6, 7, prompt_logprobs=2), sampler)
        rows.start(start(2, *range(1, 41)), sampler)
        rows.start(start(0, 9), sampler)
    assert habana.emulated.num_compilations == 2  # one to make the rows
    assert rows.tokens[0, :3].tolist() == [9, 0, 0]
    assert rows.tokens[2, :40].tolist() == list(range(1, 41))
    assert not rows.tokens[1].any()
    assert sampler.rows == [0, 2, 0]
    assert rows.prompt_logprobs[0] == 0


def test_drafts_are_written_behind_known_tokens_by_one_recipe(habana):
    rows, bucket = made(habana), Bucket(3, 3, 8, Phase.DECODE)
    one = attrs.evolve(
        empty_pass(bucket), indices=ints(0, 2), rows=ints(2, 0), starts=ints(4, 9), query_lens=ints(3, 2)
    )
    drafts = Drafts(num_drafts=ints(2, 0, 1), token_ids=ints(71, 72, 81))
    with habana.active():
        rows.write_pass_drafts(one, drafts)
        rows.write_pass_drafts(empty_pass(bucket), None)
        rows.write_pass_drafts(one, attrs.evolve(drafts, num_drafts=ints(1, 0, 0), token_ids=ints(73)))
    assert habana.emulated.num_compilations == 2  # one to make the rows
    assert rows.tokens[2, 4:8].tolist() == [0, 71, 73, 0]
    assert rows.tokens[0, 9:12].tolist() == [0, 81, 0]
    assert not rows.tokens[1].any()


def test_pass_without_drafts_writes_nothing(habana):
    rows = made(habana)
    with habana.active():
        rows.write_pass_drafts(empty_pass(Bucket(3, 1, 8, Phase.DECODE)), None)
    assert habana.emulated.num_compilations == 1


def test_of_two_writes_to_one_entry_the_later_counts():
    tables = HostTables(2, 3)
    columns = (np.array(part, np.int32) for part in ([0, 1, 0], [2, 0, 2], [7, 8, 9]))
    tables.apply(TableWrites(**dict(zip(("rows", "columns", "block_ids"), columns, strict=True))))
    assert tables.blocks.tolist() == [[0, 0, 9], [8, 0, 0]]
