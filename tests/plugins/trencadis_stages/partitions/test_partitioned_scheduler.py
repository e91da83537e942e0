"""Sequences are given to partitions of rows and blocks: which, and what happens where one is full."""

from __future__ import annotations

from typing import Any

import pytest

from trencadis.engine.engine import Engine
from trencadis.records import Request, SamplingParams
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import fake_text


def made(**options: Any) -> Engine:
    """Return an engine of two partitions, of 16 blocks of 4 tokens and 4 rows each."""
    return make_engine(**{"attention_ranks": 2, "num_blocks": 16, "max_num_seqs": 8, **options})


def prompt(number: int, length: int) -> tuple[int, ...]:
    return tuple((13 * number + 7 * place) % 97 for place in range(length))


def add(engine: Engine, name: str, tokens: tuple[int, ...], max_tokens: int = 20, **terms: Any) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.add(Request(request_id=name, prompt_token_ids=tokens, params=params, **terms))


def places(engine: Engine) -> dict[str, int]:
    """Return the partition of each running sequence, by its row, which is that of its blocks."""
    found, now = {}, engine.inspect()
    for name, one in now.sequences.items():
        if one.row >= 0:
            found[name] = 2 * one.row // now.num_rows
            assert {2 * block // now.blocks.num_blocks for block in one.block_table} == {found[name]}
    return found


def test_sequences_go_where_the_fewest_blocks_are_in_use() -> None:
    engine = made()
    for number, length in enumerate((20, 4, 4, 4, 30)):
        add(engine, f"r{number}", prompt(number, length))
    engine.step()
    # 5 blocks in the first; 1, 1 and 1 in the second; then 5 against 3.
    assert places(engine) == {"r0": 0, "r1": 1, "r2": 1, "r3": 1, "r4": 1}


def test_a_prefix_counts_as_much_as_so_many_blocks_of_load() -> None:
    engine = made(async_scheduling=False)
    add(engine, "long", prompt(0, 24))
    add(engine, "other", prompt(1, 8))
    engine.step()
    assert places(engine) == {"long": 0, "other": 1}
    add(engine, "same", prompt(0, 24))  # 7 blocks in use and 5 found, against 3 in use
    engine.step()
    assert places(engine)["same"] == 0
    assert engine.totals.num_prompt_tokens_cached == 20
    add(engine, "third", prompt(0, 24))  # 9 in use and 5 found, against 3: its prefix is computed once more
    engine.step()
    assert places(engine)["third"] == 1


def test_requests_that_share_a_prefix_do_not_all_crowd_into_one_partition() -> None:
    engine = made(num_blocks=64)
    shared = prompt(0, 16)
    add(engine, "first", shared)
    drain(engine)
    for number in range(6):
        add(engine, f"r{number}", (*shared, *prompt(number + 1, 40)))
    engine.step()
    found = list(places(engine).values())
    assert (found.count(0), found.count(1)) == (3, 3)


def test_a_partition_without_a_row_is_passed_over_and_without_any_they_wait() -> None:
    engine = made(max_num_seqs=2)
    add(engine, "a", prompt(0, 4))
    add(engine, "b", prompt(1, 40))
    add(engine, "c", prompt(2, 4))
    engine.step()
    assert places(engine) == {"a": 0, "b": 1}
    assert engine.num_waiting == 1
    drain(engine)


def test_a_full_partition_preempts_one_of_its_own() -> None:
    engine = made(num_blocks=8, max_num_seqs=6)
    for number in range(4):
        add(engine, f"r{number}", prompt(number, 12), max_tokens=16)
    finished = drain(engine)
    assert engine.totals.num_preempted > 0
    for number in range(4):
        assert finished[f"r{number}"].token_ids.tolist() == fake_text(prompt(number, 12), 16, eos=-1)


@pytest.mark.parametrize("attention_ranks", [2, 4])
def test_all_ranks_together_have_as_many_times_the_blocks_of_one(attention_ranks: int) -> None:
    engine = made(attention_ranks=attention_ranks)
    assert engine.inspect().blocks.num_blocks == 16 * attention_ranks
    assert engine.max_model_len == 64, "a sequence has to find room on one rank"
