from __future__ import annotations

import re

import attrs
import numpy as np
import pytest

from trencadis.config.schema import DefragmenterConfig
from trencadis.errors import ConfigValueError
from trencadis.records import Request, SamplingParams
from trencadis_stages.defragmenter.defragmenter import Defragmenter, choose_swaps
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

ALL = 4096


def _pairs(used: list[int], *, threshold: int = 32, max_swaps: int = 512) -> list[tuple[int, int]]:
    """What the specification's defragmenter does: ids from 1, since its block 0 is never given away."""
    ids = np.array(sorted(used), np.int32)
    if ids[-1] - threshold <= len(ids):
        return []
    free = np.setdiff1d(np.arange(1, ALL, dtype=np.int32), ids)
    sources, targets = choose_swaps(ids, free=free, max_swaps=max_swaps)
    return list(zip(sources.tolist(), targets.tolist(), strict=True))


@pytest.mark.parametrize(
    ("used", "pairs"),
    [
        ([*range(1, 11), 100], [(100, 11)]),
        ([*range(1, 11), 43], []),
        ([*range(1, 11), 44], [(44, 11)]),
        ([1, 2, 3, 36], []),
        ([*range(100, 110)], [(109 - i, 1 + i) for i in range(10)]),
        ([*range(2, 140, 2)], [(138 - 2 * i, 1 + 2 * i) for i in range(35)]),
    ],
)
def test_the_vendors_vectors_hold(used, pairs):
    assert _pairs(used) == pairs


def test_no_more_pairs_than_allowed_move_and_the_highest_go_first():
    pairs = _pairs([*range(1001, 1601)])
    assert len(pairs) == 512
    assert (pairs[0], pairs[-1]) == ((1600, 1), (1089, 512))


def test_a_threshold_of_zero_moves_the_only_block_above_its_place():
    assert _pairs([2, 40], threshold=0) == [(40, 1)]


def test_compact_blocks_stay():
    ids = np.arange(5, dtype=np.int32)
    sources, _ = choose_swaps(ids, free=np.arange(5, 9, dtype=np.int32), max_swaps=8)
    assert not sources.size


def _request(name: str, prompt: tuple[int, ...], max_tokens: int) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=max_tokens))


def test_blocks_of_a_long_runner_move_down_when_those_below_are_freed(caplog):
    caplog.set_level("INFO", logger="trencadis.engine")
    engine = make_engine(
        backend=FakeBackend(layout="padded", contiguous=True, eos=-1, max_model_len=256),
        num_blocks=64,
        warmup=False,
        prefix_caching=False,
        defragmenter={"threshold": 8, "log_moves": True},
    )
    engine.add(_request("short", tuple(range(1, 91)), 2))
    engine.add(_request("long", (7, 8, 9), 60))
    ended = drain(engine)
    assert engine.totals.num_block_swaps > 0
    assert ended["long"].token_ids.tolist() == fake_text((7, 8, 9), 60, eos=-1)
    logged = re.findall(
        r"\[defrag\].* max_id_used=(\d+)->(\d+) num_used=(\d+) swapped=(\d+)/(\d+)$", caplog.text, re.MULTILINE
    )
    assert len(logged) >= 1
    assert all(int(after) < int(before) for before, after, *_ in logged)
    assert sum(int(swapped) for *_, swapped, _ in logged) == engine.totals.num_block_swaps
    assert all(padded == swapped for *_, swapped, padded in logged)


def test_lines_are_the_vendors_and_count_padding(caplog):
    """As with VLLM_DEBUG=defrag; eight pairs are moved at least."""
    caplog.set_level("INFO", logger="trencadis.engine")
    backend = FakeBackend(layout="padded", contiguous=True, eos=-1, max_model_len=256)
    backend._capabilities = attrs.evolve(backend.capabilities, copy_sizes=(16, 32, 64))
    engine = make_engine(
        backend=backend,
        num_blocks=64,
        warmup=False,
        prefix_caching=False,
        async_scheduling=False,
        defragmenter={"threshold": 8, "log_moves": True},
    )
    engine.add(_request("short", tuple(range(1, 91)), 2))
    engine.add(_request("long", (7, 8, 9), 60))
    drain(engine)
    lines = [line for line in caplog.messages if line.startswith("[defrag]")]
    assert lines[0] == "[defrag] initialized"
    assert re.fullmatch(r"\[defrag\] updating state: \d+ new_blocks 0 finished reqs", lines[1])
    assert any(line.endswith(" 1 finished reqs") for line in lines)
    assert any(
        re.fullmatch(r"\[defrag\] defragmentation done max_id_used=\d+->\d+ num_used=\d+ swapped=[1-8]/8", line)
        for line in lines
    )


class NotesCopies(FakeBackend):
    """Notes how many blocks each call copies."""

    def __init__(self, **options):
        super().__init__(**options)
        self.copied = []

    def copy_blocks(self, *, sources, targets):
        self.copied.append(len(sources))
        super().copy_blocks(sources=sources, targets=targets)


def test_a_call_copies_no_more_blocks_than_the_backend_has_a_size_for(caplog):
    """Else it pads to a size that no warm-up has prepared."""
    caplog.set_level("INFO", logger="trencadis.engine")
    backend = NotesCopies(layout="padded", contiguous=True, eos=-1, max_model_len=256)
    backend._capabilities = attrs.evolve(backend.capabilities, copy_sizes=(2, 4))
    engine = make_engine(
        backend=backend,
        num_blocks=64,
        warmup=False,
        prefix_caching=False,
        async_scheduling=False,
        defragmenter={"threshold": 8, "log_moves": True, "max_swaps": 1000},
    )
    prompt = (7, 8, 9) * 14
    engine.add(_request("short", tuple(range(1, 91)), 2))
    engine.add(_request("long", prompt, 60))
    outputs = drain(engine)
    moved, padded = re.findall(r"swapped=(\d+)/(\d+)$", caplog.text, re.MULTILINE)[0]
    assert int(moved) > 4
    assert int(padded) == int(moved)
    assert set(backend.copied) <= {2, 4}
    assert sum(backend.copied) == 2 * engine.totals.num_block_swaps
    assert outputs["long"].token_ids.tolist() == fake_text(prompt, 60, eos=-1)


def test_cost_trigger_waits_until_blocks_read_in_vain_pay_for_the_padded_move():
    """One block above its place by one: each step reads one in vain; a move of 8 pairs costs 32 blocks, one of 1 pair 4."""
    num_steps = {}
    for sizes in ((), (16,)):
        defragmenter = Defragmenter(
            None, DefragmenterConfig(trigger="cost"), blocks=None, copy_blocks=lambda *_: None, copy_sizes=sizes
        )
        used = np.array([0, 2], np.int32)
        num_steps[sizes] = next(step for step in range(1, 100) if defragmenter._is_due(used))
    assert num_steps == {(): 4, (16,): 32}


@pytest.mark.parametrize(
    ("enabled", "contiguous", "runs"), [("auto", True, True), ("auto", False, False), ("off", True, False)]
)
def test_auto_follows_how_the_backend_reads_blocks(enabled, contiguous, runs):
    engine = make_engine(
        backend=FakeBackend(layout="padded", contiguous=contiguous, eos=-1, max_model_len=256),
        warmup=False,
        prefix_caching=False,
        defragmenter={"enabled": enabled, "threshold": 0},
    )
    engine.add(_request("short", tuple(range(1, 91)), 2))
    engine.add(_request("long", (7, 8, 9), 30))
    drain(engine)
    assert (engine.totals.num_block_swaps > 0) is runs


def test_a_connector_that_knows_blocks_by_their_ids_excludes_it():
    with pytest.raises(ConfigValueError, match="refers to blocks by their ids"):
        make_engine(connector=LoopConnector().pair(), defragmenter={"enabled": "on"})
