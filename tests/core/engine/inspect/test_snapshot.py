"""A snapshot shows the engine's state, and does not change with it."""

from __future__ import annotations

import attrs
import pytest

from trencadis.records import Request, SamplingParams
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.engines import drain, make_engine


def request(name: str, length: int = 9) -> Request:
    return Request(
        request_id=name, prompt_token_ids=tuple(range(length)), params=SamplingParams(max_tokens=6, ignore_eos=True)
    )


def test_a_snapshot_shows_queues_blocks_and_steps_and_stays_as_it_was() -> None:
    engine = make_engine(max_num_seqs=1, num_blocks=12, async_scheduling=True)
    engine.add(request("a"))
    engine.add(request("b"))
    engine.step()
    now = engine.inspect()
    a, b = now.sequences["a"], now.sequences["b"]
    assert (a.state, b.state, now.running, now.waiting) == ("running", "waiting", (a.slot,), (b.slot,))
    assert (a.num_prompt_tokens, a.num_known_tokens, a.row, b.row) == (9, 10, 0, -1)
    assert (len(a.block_table), now.blocks.num_used, now.blocks.num_available) == (3, 3, 9)
    assert [now.blocks.ref_counts[block] for block in a.block_table] == [1, 1, 1]
    assert set(now.blocks.hashes) == set(a.block_table[:2])
    assert (now.num_rows, now.num_free_rows, len(now.steps_in_flight)) == (1, 0, 1)
    kept = attrs.evolve(now)
    drain(engine)
    assert now == kept
    assert engine.inspect().sequences == {}
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        now.waiting = ()


def test_a_snapshot_shows_loads() -> None:
    connector = LoopConnector(block_size=4, delay=3)
    engine = make_engine(connector=connector.pair(), prefix_caching=False)
    engine.add(request("a"))
    drain(engine)
    engine.add(request("b"))
    while not engine.inspect().stages["transfer"].waiting:
        engine.step()
    now = engine.inspect()
    (load,) = now.stages["transfer"].loads
    sequence = now.sequences["b"]
    assert sequence.state == "loading"
    assert (load.slot, load.layerwise) == (sequence.slot, False)
    assert set(load.written) <= set(load.blocks)
    assert load.written
