from __future__ import annotations

import random
import tracemalloc

import msgspec
import numpy as np
import pytest

from support.replays import record_of, recording_engine, replayed, serve_at_random
from trencadis.engine.cache.block_manager import BlockManager
from trencadis.engine.cache.guarded import GuardedEviction
from trencadis.interfaces.plain_state import plain_state
from trencadis.records import Request, SamplingParams
from trencadis_gallery.eviction.arc import Arc
from trencadis_gallery.eviction.s3_fifo import S3Fifo
from trencadis_gallery.eviction.slru import Slru
from trencadis_gallery.eviction.two_queue import TwoQueue
from trencadis_plugins.eviction.cost_aware import CostAware
from trencadis_plugins.eviction.lfu import Lfu
from trencadis_plugins.eviction.lru import Lru
from trencadis_plugins.eviction.ttl import Ttl
from trencadis_tools.recorder.flight_record import _MAX_FREE_BYTES, _encode
from trencadis_tools.recorder.policy_memory import PolicyMemory
from trencadis_tools.recorder.trailing_blocks import TrailingBlocks
from trencadis_tools.replay.replayed_engine import recorder_of

POLICIES = (Lru, Lfu, Slru, TwoQueue, S3Fifo, Arc, CostAware, Ttl)


@plain_state
class Moody(Lru):
    """Evicts the newest candidate each time the whole process has asked an odd number of times: a copy does not do the same."""

    num_asked = 0

    def victims(self, num_blocks):
        Moody.num_asked += 1
        return [
            self._candidates.popitem(last=bool(Moody.num_asked % 2) and len(self._candidates) > 1)[0]
            for _ in range(num_blocks)
        ]


class Forgetful(Lru):
    """Does not declare what it remembers."""


def manager(policy=Lru, num_blocks=24):
    return BlockManager(num_blocks=num_blocks, eviction=GuardedEviction("eviction", policy()))


def state_of(part):
    """Return all that a key frame says of blocks, in the order in which it says it."""
    state = part.copy_state()
    memory = PolicyMemory(part.eviction.strategy)
    assert not memory.obstacle
    numbers = {}
    return (
        [
            *(
                state["free"].tolist(),
                state["num_available"],
                state["ref_counts"].tolist(),
                list(state["hash_of"].items()),
            ),
            *(list(state["depth_of"].items()), list(state["previous"].items()), part.eviction.known_ids),
        ],
        str(memory.encoded(lambda one: numbers.setdefault(one, len(numbers)))),
        list(numbers),
    )


def trailing_state(trail, target):
    assert trail.hold(waits=False)
    try:
        states, memories, obstacle = trail.state(target)
        assert (obstacle, len(states), len(memories)) == ("", 1, 1)
        return state_of(trail._replicas[0])
    finally:
        trail.release()


def change_at_random(blocks, draws, held, now_s):
    """Make one call of each kind now and then: chains with shared beginnings, second holders, moves, resets."""
    what = draws.random()
    if what < 0.5:
        chain = [b"%d" % draws.randrange(3)]
        for _ in range(draws.randrange(5)):
            chain.append(chain[-1] + b"%d" % draws.randrange(3))
        hit = blocks.longest_hit(chain)
        if len(chain) - len(hit) > blocks.num_available - blocks.num_unreferenced(hit):
            return
        if hit:
            blocks.acquire(hit, now_s=now_s, salt="s")
        own = np.concatenate([np.array(hit, np.int32), blocks.allocate(len(chain) - len(hit))])
        blocks.register_chain(own[len(hit) :].tolist(), chain, start=len(hit), salt="s", now_s=now_s)
        held.append(own)
    elif what < 0.9 and held:
        own = held.pop(draws.randrange(len(held)))
        blocks.release(own, now_s=now_s)
        own[:] = -1  # the caller's array is the caller's
    elif what < 0.93 and held:
        blocks.share(held[-1])
        held.append(held[-1].copy())
    elif what < 0.97 and held:
        counts = blocks.ref_counts
        source, idle = held[-1][:1].copy(), np.flatnonzero(counts == 0)[:1].astype(np.int32)
        if len(idle):
            blocks.exchange(source, idle)
            for own in held:
                own[own == source[0]] = idle[0]
    elif what > 0.985:
        blocks.reset_cache()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.representatives(64)
def test_what_trails_becomes_what_the_blocks_were(policy, seed):
    blocks, draws, held = manager(policy), random.Random(seed), []
    trail = TrailingBlocks([blocks])
    moments = []
    for number in range(300):
        change_at_random(blocks, draws, held, float(number))
        if number % 23 == 0:
            moments.append((trail.position, state_of(blocks)))
        if draws.random() < 0.8:
            trail.catch_up()
        if len(moments) > 2:
            position, was = moments.pop(0)
            assert trailing_state(trail, position) == was
            trail.target = moments[0][0]
    assert not trail.obstacle


def test_what_trails_begins_with_what_is_there():
    blocks, draws, held = manager(), random.Random(3), []
    for number in range(60):
        change_at_random(blocks, draws, held, float(number))
    trail = TrailingBlocks([blocks])
    assert trailing_state(trail, trail.position) == state_of(blocks)
    for number in range(60):
        change_at_random(blocks, draws, held, 60.0 + number)
    assert trailing_state(trail, trail.position) == state_of(blocks)


def fill(engine, num_blocks):
    """Cache so many blocks that no sequence holds."""
    blocks = engine._state.blocks
    for first in range(0, num_blocks, 4):
        taken = blocks.allocate(4)
        hashes = [b"%032d" % number for number in range(first, first + 4)]
        blocks.register_chain(taken.tolist(), hashes, start=0, salt="", now_s=0.0)
        blocks.release(taken, now_s=0.0)


def costs_of_steps(num_cached, num_steps=60):
    """Return the most bytes that a step asks for beyond what it keeps, and blocks changed again after each, with key frames every 8 steps."""
    config = {"engine.warmup": False, "cache.num_blocks": num_cached + 80, "flight_recorder.num_steps": 8}
    engine = recording_engine(config=config)
    fill(engine, num_cached)
    for number in range(8):
        params = SamplingParams(max_tokens=70, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt_token_ids=(5 + number,) * 4, params=params))
    for _ in range(4):
        engine.step()
    trail, peaks, repeated = recorder_of(engine)._trail, [], []
    for _ in range(num_steps):
        before = trail.num_repeated
        tracemalloc.start()
        engine.step()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        repeated.append(trail.num_repeated - before)
    assert not trail.obstacle
    assert record_of(engine).frame is not None
    return max(peaks), repeated


def test_a_step_with_a_key_frame_copies_no_more_for_a_large_cache():
    (few, few_repeated), (many, many_repeated) = costs_of_steps(200), costs_of_steps(20_000)
    assert many < few + 2**16, "20,000 blocks copied are a megabyte and more"
    # 8 sequences of 4-token blocks: 2 new blocks a step, allocated and made findable; the fill before is caught up with bit by bit
    assert max(few_repeated + many_repeated) < 64
    assert sum(many_repeated) > 60 * 16


def test_a_record_of_a_million_cached_blocks_can_be_read():
    num_cached = 20_000
    config = {"engine.warmup": False, "cache.num_blocks": num_cached + 80, "flight_recorder.num_steps": 4}
    engine = recording_engine(config=config)
    fill(engine, num_cached)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    engine.add(Request(request_id="one", prompt_token_ids=(5,) * 4, params=params))
    while engine.has_work:
        engine.step()
    record = record_of(engine)
    assert len(record.frame["blocks"][0]["hash_of"]) >= num_cached
    num_bytes = len(msgspec.msgpack.encode(record.frame, enc_hook=_encode)) / num_cached
    assert 1e6 * num_bytes * 1.3 < _MAX_FREE_BYTES["frame"], "large numbers take a little more than small ones"


def test_what_is_behind_is_caught_up_with():
    blocks, draws, held = manager(num_blocks=64), random.Random(1), []
    trail = TrailingBlocks([blocks])
    for number in range(200):
        change_at_random(blocks, draws, held, float(number))
    trail.target = trail.position
    for number in range(200):
        change_at_random(blocks, draws, held, 200.0 + number)
        trail.catch_up()
    assert trail._num_applied == trail.target


def test_a_record_that_is_being_made_is_not_changed_by_the_steps_that_go_on():
    engine = recording_engine(5, config={"engine.warmup": False, "flight_recorder.num_steps": 7})
    serve_at_random(engine, 5, num_rounds=60)
    recorder = recorder_of(engine)
    kept = recorder._kept(waits=True)
    serve_at_random(engine, 6, num_rounds=60, first=1000)
    other = recorder._record(recorder._kept(waits=False), "request", "")
    assert other.obstacles == ["another record was being made, and its blocks are not in this one"]
    record = recorder._record(kept, "request", "")
    assert record.frame is not None
    assert replayed(record).difference is None
    serve_at_random(engine, 7, num_rounds=60, first=2000)
    assert replayed(record_of(engine)).difference is None


def test_a_policy_whose_copy_does_otherwise_keeps_records_from_being_replayed():
    engine = recording_engine(5, config={"engine.warmup": False, "flight_recorder.num_steps": 7})
    engine._state.blocks.eviction.strategy = Moody()
    recorder_of(engine).follow()
    serve_at_random(engine, 5, num_rounds=120)
    (obstacle,) = record_of(engine).obstacles
    assert obstacle.startswith("a copy of the eviction policy did not do what the policy did: InternalError: blocks ")
    assert engine.has_work or engine.totals.num_steps > 60


def test_a_policy_that_does_not_declare_what_it_remembers_is_not_copied():
    blocks = manager(Forgetful)
    trail = TrailingBlocks([blocks])
    assert trail.obstacle == "Forgetful does not declare what it remembers (see plain_state)"
    assert blocks.journal is None
