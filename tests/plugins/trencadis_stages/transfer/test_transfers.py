"""Loads park their sequences, failures are recomputed, and blocks stay held until nobody can touch them."""

from __future__ import annotations

import pytest

from support.kv.transfer_engines import PROMPT, counts, ends_well, engine_on, request, waiting_for_kv
from support.kv.wild_connector import WildConnector
from trencadis.engine.engine import Engine
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_text


@pytest.mark.parametrize("closes_at_once", [False, True])
def test_what_the_last_step_computed_is_saved_although_no_other_request_comes(closes_at_once: bool) -> None:
    """As on an engine that only computes prompts: its first token is its last step."""
    loop = LoopConnector()
    engine = make_engine(connector=loop.pair(), backend=FakeBackend(eos=-1))
    engine.add(request(max_tokens=1))
    while not engine.step().finished:
        pass
    assert engine.has_work
    if closes_at_once:
        engine.close()
    else:
        drain(engine)
        assert not engine.has_work
    assert len(loop.store.blocks) == len(PROMPT) // 4


@pytest.mark.parametrize("overlap", [False, True])
def test_engine_that_only_holds_blocks_for_others_has_no_need_to_hurry(overlap: bool) -> None:
    """Whoever steps it sleeps between two steps, and what its requests were given stays in the record."""
    engine = make_engine(
        connector=LoopConnector(holds=True, delay=5000).pair(), backend=FakeBackend(eos=-1), async_scheduling=overlap
    )
    engine.add(request())
    seen = []
    for _ in range(300):
        seen.append(engine.is_stalled)
        engine.step()
    assert engine.has_work
    assert not any(seen[:3]), "it computes"
    assert all(seen[12:])
    assert 0 < engine.stage("explain")._notes[-1].step < 100, (
        "what it ran in is not pushed out by steps that asked for its blocks"
    )


# ------------------------------------------------------------------------- a connector that does as the test says


@pytest.fixture
def wild() -> WildConnector:
    return WildConnector()


@pytest.mark.parametrize(("of_the_look_up", "configured"), [(2.0, 30.0), (100.0, 2.0)])
def test_load_is_given_up_at_the_look_ups_own_deadline_or_the_configured_one(
    wild: WildConnector, of_the_look_up: float, configured: float
) -> None:
    engine, clock = engine_on(wild, load_timeout_s=configured)
    wild.timeout_s = of_the_look_up
    transfer_id = waiting_for_kv(engine, wild)
    clock.advance(1.9)
    engine.step()
    assert engine.num_waiting == 1
    assert transfer_id in wild.loads
    clock.advance(0.2)
    engine.step()
    assert transfer_id in wild.cancelled
    wild.release(transfer_id)
    assert ends_well(engine).num_cached_tokens == 0


def test_load_has_all_its_time_although_its_look_up_took_long(wild: WildConnector) -> None:
    """Else a connector that measures it, too, sees a load cancelled by a client where the store was too slow."""
    engine, clock = engine_on(wild)
    wild.timeout_s, look_up = 2.0, wild.called

    def slowly(name: str) -> None:
        look_up(name)
        if name in ("lookup", "on_allocated"):
            clock.advance(0.5)
            ordered_s.append(clock.now_s())

    ordered_s: list[float] = []
    wild.called = slowly
    transfer_id = waiting_for_kv(engine, wild)
    clock.advance(1.9)
    engine.step()
    assert transfer_id in wild.loads, "it was ordered 1.9 s ago"
    clock.advance(0.2)
    engine.step()
    assert transfer_id in wild.cancelled
    assert clock.now_s() - ordered_s[-1] >= 2.0


def test_what_arrived_of_a_failed_load_is_used_and_only_that(wild: WildConnector) -> None:
    engine, _ = engine_on(wild)
    before = counts(engine)
    transfer_id = waiting_for_kv(engine, wild)
    wild.fail(transfer_id, num_valid=3)
    assert ends_well(engine).num_cached_tokens == 12
    assert [after - b for after, b in zip(counts(engine), before, strict=True)] == [1, 0, 1, 0]


def test_failed_load_is_looked_up_again_if_the_connector_asks_for_it(wild: WildConnector) -> None:
    engine, _ = engine_on(wild)
    wild.answer = "retry"
    wild.fail(waiting_for_kv(engine, wild))
    while not wild.loads:
        engine.step()
    wild.arrive(max(wild.loads))
    assert ends_well(engine).num_cached_tokens == 16
    assert wild.asked == ["r", "r"]


def test_second_look_up_finds_in_the_prefix_cache_what_the_first_load_brought(wild: WildConnector) -> None:
    writer, _ = engine_on(wild)
    reader = WildConnector(answer="retry")
    reader.store = wild.store
    engine = make_engine(connector=reader.pair(), backend=FakeBackend(eos=-1))
    reader.fail(waiting_for_kv(engine, reader), num_valid=3)
    while not reader.loads:
        engine.step()
    (blocks, hashes) = reader.loads[max(reader.loads)]
    assert len(blocks) == len(hashes) == 1
    reader.arrive(max(reader.loads))
    assert ends_well(engine).num_cached_tokens == 16
    assert writer is not engine


@pytest.mark.parametrize(
    ("said", "num_cached"), [(None, 16), (0, 0), (8, 8), (10**30, 16)], ids=["a store", "nothing", "some", "too much"]
)
@pytest.mark.parametrize("by_layer", [False, True], ids=["whole", "by layer"])
def test_hit_is_what_was_cached_before_its_request_in_answers_and_metrics(
    wild: WildConnector, said: int | None, num_cached: int, by_layer: bool
) -> None:
    engine, _ = engine_on(wild)
    before = engine.totals.num_prompt_tokens_cached
    wild.num_cached_tokens, wild.by_layer = said, by_layer
    engine.add(request("r", tuple(range(1, 21))))
    engine.step()
    for transfer_id in list(wild.loads):
        wild.arrive(transfer_id)
    end = ends_well(engine)
    assert engine.stage("transfer").transfers.num_loaded > 0
    assert (end.num_cached_tokens, engine.totals.num_prompt_tokens_cached - before) == (num_cached, num_cached)


def test_what_was_loaded_for_a_request_is_no_hit_where_it_is_found_again_in_the_cache(wild: WildConnector) -> None:
    """The first load of what another engine has just computed breaks off, and the second finds the rest of it here."""
    engine_on(wild)
    reader = WildConnector(answer="retry")
    reader.store, reader.num_cached_tokens = wild.store, 4
    engine = make_engine(connector=reader.pair(), backend=FakeBackend(eos=-1))
    reader.fail(waiting_for_kv(engine, reader), num_valid=3)
    while not reader.loads:
        engine.step()
    reader.arrive(max(reader.loads))
    assert ends_well(engine).num_cached_tokens == engine.totals.num_prompt_tokens_cached == 4
    engine.add(request("next", tuple(range(1, 21))))
    assert drain(engine)["next"].num_cached_tokens == 16, "for the next one it is there"


def test_sequence_that_keeps_failing_is_computed_after_three_more_look_ups(wild: WildConnector) -> None:
    engine, _ = engine_on(wild)
    wild.answer = "retry"
    engine.add(request("r", tuple(range(1, 21))))
    ends = {}
    for _ in range(60):
        ends |= {end.request_id: end for end in engine.step().finished}
        for transfer_id in list(wild.loads):
            wild.fail(transfer_id)
    assert wild.asked == ["r"] * 4
    assert ends["r"].token_ids.tolist() == fake_text(tuple(range(1, 21)), 8, eos=-1)


def test_load_that_cannot_be_started_is_given_up_at_once(wild: WildConnector) -> None:
    engine, clock = engine_on(wild)
    wild.raising = {"on_allocated"}
    engine.add(request("r", tuple(range(1, 21))))
    engine.step()
    wild.raising = set()
    (transfer_id,) = wild.cancelled
    engine.step()
    wild.scribble(transfer_id)  # it may have begun all the same
    wild.release(transfer_id)
    now_s = clock.now_s()
    assert ends_well(engine).num_cached_tokens == 0
    assert clock.now_s() == now_s, "nobody waited for a deadline"


def test_connector_that_gives_no_blocks_back_is_closed_and_serving_goes_on(
    wild: WildConnector, caplog: pytest.LogCaptureFixture
) -> None:
    engine, clock = engine_on(wild, release_timeout_s=10.0)
    total = engine._state.blocks.num_blocks
    lost = waiting_for_kv(engine, wild, "aborted")
    engine.abort("aborted")
    clock.advance(5.0)
    waits = waiting_for_kv(engine, wild, "r")
    assert {lost} == set(wild.cancelled)
    assert waits in wild.loads
    assert engine.inspect().stages["transfer"].num_pinned_blocks == 4
    clock.advance(5.0)
    engine.step()
    assert wild.is_closed == [True, True], "both sides"
    assert "is closed; serving goes on without it" in caplog.text
    assert f"(transfer ids [{lost}])" in caplog.text
    assert engine.inspect().stages["transfer"].num_pinned_blocks == 0
    ends_well(engine)
    assert engine.inspect().blocks.num_available == total
    engine.add(request("later", tuple(range(1, 21))))
    wild.asked.clear()
    ends_well(engine, "later")
    assert wild.asked == [], "nobody is asked any more"
    assert not engine.has_work


def test_held_blocks_of_a_finished_sequence_come_back_after_the_quarantine_as_well(wild: WildConnector) -> None:
    engine, clock = engine_on(wild, release_timeout_s=10.0)
    wild.holds = True
    wild.arrive(waiting_for_kv(engine, wild))
    while "r" in engine.inspect().sequences:
        engine.step()
    assert engine.inspect().stages["transfer"].num_pinned_blocks > 0
    clock.advance(10.0)
    engine.step()
    assert engine.inspect().stages["transfer"].num_pinned_blocks == 0
    assert engine.inspect().blocks.num_used == 0
    assert wild.is_closed == [True, True]


def test_blocks_that_are_released_in_time_cost_nothing(wild: WildConnector) -> None:
    engine, clock = engine_on(wild, release_timeout_s=10.0)
    for _ in range(5):
        transfer_id = waiting_for_kv(engine, wild, "aborted")
        engine.abort("aborted")
        clock.advance(9.0)
        engine.step()
        wild.release(transfer_id)
        engine.step()
    assert wild.is_closed == [False, False]


def test_no_more_sequences_wait_for_kv_than_may(wild: WildConnector) -> None:
    engine, _ = engine_on(wild, max_waiting_loads=2)
    for i in range(5):
        engine.add(request(str(i), tuple(range(1, 21))))
    for _ in range(3):
        engine.step()
    assert len(wild.loads) == 2
    assert len(engine.inspect().stages["transfer"].waiting) == 2
    assert engine.num_running == 3, "the others are computed"
    for transfer_id in list(wild.loads):
        wild.arrive(transfer_id)
    ends = drain(engine)
    assert all(end.token_ids.tolist() == fake_text(tuple(range(1, 21)), 8, eos=-1) for end in ends.values())


def test_release_of_a_load_that_goes_on_changes_nothing(wild: WildConnector) -> None:
    engine, _ = engine_on(wild)
    transfer_id = waiting_for_kv(engine, wild)
    wild.release(transfer_id)
    for _ in range(3):
        engine.step()
    assert len(engine.inspect().stages["transfer"].waiting) == 1
    wild.arrive(transfer_id)
    assert ends_well(engine).num_cached_tokens == 16


def test_scheduler_side_is_closed_with_the_engine_and_its_metrics_are_shown(wild: WildConnector) -> None:
    engine, _ = engine_on(wild)
    assert "wild 1\n" in engine.metrics()
    engine.close()
    assert wild.is_closed[0]


def test_hit_that_is_no_longer_than_the_local_one_is_said_to_be_unused() -> None:
    wild = WildConnector()
    engine, _ = engine_on(wild, prefix_caching=True)
    wild.claims = 16
    assert ends_well(next_one(engine)).num_cached_tokens == 16
    assert (len(wild.unused), wild.loads, wild.unanswered_hits) == (1, {}, set())


def next_one(engine: Engine) -> Engine:
    engine.add(request("r", tuple(range(1, 21))))
    return engine


def test_hit_that_there_is_no_room_for_is_said_to_be_unused_and_the_next_look_up_has_another_transfer_id() -> None:
    """What a connector keeps for a transfer id would otherwise be kept for good."""
    wild = WildConnector()
    engine, _ = engine_on(wild, num_blocks=12)
    wild.asked.clear()
    engine.add(request("runs", tuple(range(50, 79)), max_tokens=4))
    engine.step()
    engine.add(request("r", tuple(range(1, 21))))
    engine.step()
    assert engine.num_waiting == 1
    assert len(wild.unused) >= 1
    assert (wild.loads, wild.unanswered_hits) == ({}, set())
    while not wild.loads:
        engine.step()
    assert wild.asked.count("r") == len(wild.unused) + 1
    assert not set(wild.loads) & set(wild.unused)
    wild.arrive(max(wild.loads))
    assert ends_well(engine).num_cached_tokens == 16
