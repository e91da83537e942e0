"""Simulated replicas with KV stores: loads end when links say, whatever engines do meanwhile, and nothing else changes."""

from __future__ import annotations

from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plugins.trencadis_tools.simulation import test_moves as routers

from support.simulation import BLOCK_TOKENS, STEP_TIMES, asked, config_of, mixed, run
from trencadis.clock import SystemClock
from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext, KVPool, Move, Router, SupportsMoves
from trencadis_kv.interfaces import KVPolicy
from trencadis_tools.simulated_store.config import SimulatedStoreConfig
from trencadis_tools.simulated_store.connector import make_simulated_store
from trencadis_tools.simulation import ReplicaEvent
from trencadis_tools.simulation.fleet import Fleet, notes_on
from trencadis_tools.simulation.step_times import load_step_times
from trencadis_tools.workloads import Workload

HERE = "tests.plugins.trencadis_tools.simulated_store.test_simulated_store"
MOVES = routers.__name__
TOKEN_BYTES = 131_072
SAME = {"prompt": 21, "block_ids": (1, 2, 3, 4, 5)}
ALONE_S = 0.02 + 20e-4 + 20e-6
LAST_TOKEN_S = 0.02 + 1e-4 + 21e-6
"""The step of the last token of such a prompt, with 20 of KV."""


class InTurn(Router):
    """One after the other."""

    def __init__(self):
        self._next = 0

    def peek(self, request, replicas):
        healthy = replicas.is_healthy.nonzero()[0]
        return int(healthy[self._next % len(healthy)])

    def select(self, request, replicas):
        chosen = self.peek(request, replicas)
        self._next += 1
        return chosen


class MovesBack(InTurn, SupportsMoves):
    """And once what is on replica 1 to replica 0."""

    moves_period_s = 1.0

    def moves(self, live, replicas):
        return [Move(i, 0) for i, at in enumerate(live.replica.tolist()) if at == 1 and not live.num_moves[i]]


class Watches(KVPolicy):
    """Loads and saves all, and keeps what it was asked."""

    loads: ClassVar[list[Any]] = []
    saves: ClassVar[list[Any]] = []

    def admits_load(self, view):
        self.loads.append(view)
        return view.timeout_s

    def admits_save(self, view):
        self.saves.append(view)
        return view.num_blocks


def tables(policy: str = "always", *, overlaps: bool = True, engine: dict[str, Any] | None = None, **store: Any) -> Any:
    """Tables of small engines with a store; bandwidth in tokens a second."""
    link = {"link_bytes_per_s": TOKEN_BYTES * store.pop("link", 1000.0), "latency_s": store.pop("latency", 0.0)}
    return {
        "engine": {"async_scheduling": overlaps, **(engine or {})},
        "router": {"name": f"{HERE}:InTurn"},
        "cache": store.pop("cache", {}),
        "kv_connector": {"name": "simulated_store", "simulated_store": {**link, **store}},
        "kv_policy": {"name": policy},
        "plugins": {"experimental": True},
    }


def fleet_of(requests: Any, given_tables: Any, **options: Any) -> Fleet:
    config, registry = config_of(**given_tables)
    workload = Workload(name="test", requests=tuple(requests), block_tokens=BLOCK_TOKENS)
    return Fleet(config, registry, workload, **{"step_times": STEP_TIMES, **options})


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_prompt_that_another_replica_computed_takes_its_load_and_its_last_token(overlaps):
    requests = [asked("a", **SAME), asked("b", 10.0, **SAME)]
    result = run(requests, tables(overlaps=overlaps, link=20.0, latency=0.25), replicas=2)
    assert [one.replica for one in result.records] == [0, 1]
    assert result.records[1].num_cached_tokens == 20
    assert result.records[1].ttft_s == pytest.approx(1.0 + 0.25 + LAST_TOKEN_S, abs=1e-9)
    assert result.kv is not None
    assert (result.kv.num_loads, result.kv.num_tokens_loaded) == (1, 20)
    assert result.kv.load_s == pytest.approx(1.25)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_request_that_comes_while_a_load_is_awaited_is_computed_at_once(overlaps):
    requests = [asked("a", **SAME), asked("b", 10.0, **SAME), asked("-", 10.1), asked("c", 10.3, output=1)]
    result = run(requests, tables(overlaps=overlaps, link=20.0), replicas=2)
    assert [one.replica for one in result.records] == [0, 1, 0, 1]
    assert result.records[3].ttft_s == pytest.approx(ALONE_S, abs=1e-9)
    assert result.records[1].ttft_s == pytest.approx(1.0 + LAST_TOKEN_S, abs=1e-9)


def test_a_load_that_ends_within_a_step_is_used_by_the_next_that_is_planned():
    requests = [asked("a", **SAME), asked("b", 10.0, **SAME), asked("-", 10.1), asked("c", 10.995, output=1)]
    serial = run(requests, tables(overlaps=False, link=20.0), replicas=2)
    assert serial.records[1].first_token_s == pytest.approx(10.995 + ALONE_S + LAST_TOKEN_S, abs=1e-9)


@pytest.mark.parametrize("overlaps", [False, True])
def test_nothing_is_planned_while_all_wait_for_a_load(overlaps):
    fleet = fleet_of([asked("a", **SAME), asked("b", 30.0, **SAME)], tables(overlaps=overlaps, link=1.0), replicas=2)
    result = fleet.run()
    assert result.records[1].ttft_s == pytest.approx(20.0 + LAST_TOKEN_S, abs=1e-9)
    assert fleet.built[1].executor.num_submitted < 16


def test_a_load_that_takes_too_long_is_given_up_at_its_time_and_the_rest_is_computed():
    requests = [asked("a", **SAME), asked("b", 10.0, **SAME)]
    result = run(requests, tables(link=10.0, cache={"load_timeout_s": 1.0}), replicas=2)
    assert result.records[1].num_cached_tokens == 8, "of 10 tokens that came, whole blocks"
    assert result.records[1].ttft_s == pytest.approx(1.0 + 0.02 + 13e-4 + 21e-6, abs=1e-9)
    assert result.kv is not None
    assert result.kv.num_late_loads == 1


def test_a_store_for_each_replica_keeps_what_its_device_had_no_room_for():
    """Each prompt fills the device's cache, so that only the host has the first one when it comes again."""
    requests = [asked("a", 0.0, 41, block_ids=tuple(range(10))), asked("b", 5.0, 41, block_ids=tuple(range(50, 60)))]
    requests += [asked("c", 10.0, 41, block_ids=tuple(range(10)))]
    small = {"num_blocks": 12}
    assert run(requests, {"cache": small}).records[2].num_cached_tokens < 40
    result = run(requests, tables(shared=False, cache=small))
    assert result.records[2].num_cached_tokens == 40
    apart = run(requests, {**tables(shared=False, cache=small), "router": {"name": "round_robin"}}, replicas=3)
    assert apart.records[2].num_cached_tokens == 0, "nothing is shared"


def test_the_policy_is_asked_with_what_loads_and_steps_have_taken():
    Watches.loads.clear()
    Watches.saves.clear()
    one, other = ({"prompt": 101, "block_ids": range(25)}, {"prompt": 81, "block_ids": range(40, 60)})
    requests = [asked(f"{i}", 10.0 * i, **which) for i, which in enumerate((one, one, other, other))]
    run(requests, tables(f"{HERE}:Watches", link=100.0, engine={"max_num_batched_tokens": 128}), replicas=2)
    first, second = Watches.loads
    assert first.load_s != first.load_s, "nan: nothing was loaded yet"
    assert (second.num_tokens, second.num_bytes, second.num_local_tokens) == (80, 80 * TOKEN_BYTES, 0)
    assert second.load_s == pytest.approx(0.8)
    assert Watches.saves[0].num_blocks == 25
    assert Watches.saves[0].num_bytes == 100 * TOKEN_BYTES


def test_a_slow_link_is_given_up_by_the_cost_aware_policy_and_waited_for_by_always():
    """Both replicas have computed something; then the first computes a prompt twice that the second could load."""
    comes_s, first_blocks = (0.0, 1.0, 2.0, 5.0, 5.5, 8.0), (0, 100, 200, 200, 300, 300)
    requests = [
        asked(f"{i}", time_s, 101, block_ids=tuple(range(block, block + 25)), output=2)
        for i, (time_s, block) in enumerate(zip(comes_s, first_blocks, strict=True))
    ]
    alone_s = 0.02 + 101e-4 + 101e-6
    wide = {"max_num_batched_tokens": 128}
    waits = run(requests, tables("always", link=50.0, engine=wide), replicas=2)
    assert [one.ttft_s > 2.0 for one in waits.records] == [False, False, False, True, False, True]
    tries = run(requests, tables("cost_aware", link=50.0, engine=wide), replicas=2)
    assert tries.records[3].ttft_s == pytest.approx(0.8 * alone_s + alone_s, rel=0.1), "given up after its share"
    assert tries.records[5].ttft_s == pytest.approx(alone_s), "declined"
    assert tries.kv is not None
    assert (tries.kv.num_late_loads, tries.kv.num_declined_loads) == (1, 1)
    fast = run(requests, tables("cost_aware", link=1e5, engine=wide), replicas=2)
    assert [one.num_cached_tokens for one in fast.records] == [0, 0, 0, 100, 0, 100]


@pytest.mark.parametrize("shared", [True, False])
def test_what_a_failed_replica_had_computed_is_found_in_a_store_that_outlives_it(shared):
    requests = [asked("a", prompt=21, output=60)]
    events = [ReplicaEvent(time_s=1.0, replica=0, kind="fail")]
    result = run(requests, tables(shared=shared, link=1e6), replicas=2, events=events)
    (record,) = result.records
    assert (record.replica, record.num_output_tokens, result.num_moved) == (1, 60, 1)
    assert result.kv is not None
    num_computed = 21 + int((1.0 - 0.0221) / 0.0202)
    if shared:
        assert num_computed - 8 <= result.kv.num_tokens_loaded <= num_computed, (
            "all but the last blocks, tokens of the answer too"
        )
    else:
        assert result.kv.num_tokens_loaded == 0


def test_what_had_not_come_to_the_store_when_a_replica_failed_is_computed_again():
    requests = [asked("a", prompt=21, output=60)]
    events = [ReplicaEvent(time_s=1.0, replica=0, kind="fail")]
    result = run(requests, tables(link=30.0), replicas=2, events=events)
    assert result.kv is not None
    assert result.kv.num_tokens_loaded == 28, (
        "of the prompt until 0.69 s, of a block of the answer until 0.82 and 0.96 s"
    )


def test_a_request_that_is_moved_loads_what_was_computed_elsewhere():
    """It leaves replica 0 in the third step with three tokens; the whole blocks of its 23 tokens are loaded, and 3 are computed."""
    given_tables = {**tables(overlaps=False, link=2000.0), "router": {"name": f"{MOVES}:Once"}}
    result = run([asked("a", output=9)], given_tables, replicas=2)
    (record,) = result.records
    left_s = ALONE_S + LAST_TOKEN_S + LAST_TOKEN_S + 1e-6
    steps_s = 0.02 + 3e-4 + 23e-6 + sum(0.02 + 1e-4 + 1e-6 * (20 + i) for i in range(4, 9))
    assert (record.replica, result.num_rebalanced) == (1, 1)
    assert record.finished_s == pytest.approx(left_s + 20 / 2000 + steps_s, abs=1e-9)


def test_a_load_whose_request_is_moved_away_is_given_up_at_once():
    """It would take until 50 s; replica 0 has the prompt in its own cache."""
    requests = [asked("a", **SAME, output=1), asked("b", 30.0, **SAME, output=1)]
    given_tables = {**tables(link=1.0), "router": {"name": f"{HERE}:MovesBack"}}
    fleet = fleet_of(requests, given_tables, replicas=2)
    result = fleet.run()
    (snapshot,) = [one.engine.inspect() for one in fleet.built if one.index == 1]
    assert (result.records[1].replica, result.num_rebalanced) == (0, 1)
    assert result.records[1].finished_s == pytest.approx(31.0 + LAST_TOKEN_S, abs=1e-9)
    assert result.end_s == 32.0, "when the router is asked for moves for the last time"
    assert not snapshot.stages["transfer"].loads
    assert not snapshot.stages["transfer"].pinned


def test_runs_share_nothing_and_equal_runs_are_equal():
    requests = [asked("a", **SAME), asked("b", 10.0, **SAME)]
    one, two = (run(requests, tables(), replicas=2) for _ in range(2))
    assert one == two
    assert one.records[0].num_cached_tokens == 0


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    link=st.floats(10.0, 1e5),
    store=st.sampled_from([0.0, 100.0, 3000.0]),
    latency=st.sampled_from([0.0, 0.013]),
    shared=st.booleans(),
    policy=st.sampled_from(["always", "cost_aware"]),
    overlaps=st.booleans(),
    block_size=st.sampled_from([4, 16, 32]),
    num_blocks=st.sampled_from([60, 160]),
    capacity=st.sampled_from([64, 10**6]),
    timeout_s=st.sampled_from([0.05, 30.0]),
    rate=st.sampled_from([3, 20, 100]),
    fails=st.booleans(),
    router=st.sampled_from([f"{HERE}:InTurn", f"{MOVES}:Shuffles"]),
)
def test_whatever_the_store_equal_runs_are_equal_and_nothing_is_counted_twice(
    seed,
    link,
    store,
    latency,
    shared,
    policy,
    overlaps,
    block_size,
    num_blocks,
    capacity,
    timeout_s,
    rate,
    fails,
    router,
):
    given_tables = tables(
        policy,
        overlaps=overlaps,
        link=link,
        store_bytes_per_s=store * TOKEN_BYTES,
        latency=latency,
        shared=shared,
        capacity_bytes=capacity * TOKEN_BYTES,
        staging_bytes=200 * TOKEN_BYTES,
        cache={"block_size": block_size, "num_blocks": num_blocks * 4 // block_size, "load_timeout_s": timeout_s},
    )
    given_tables["router"] = {"name": router}
    events = [ReplicaEvent(time_s=0.4, replica=0, kind="fail"), ReplicaEvent(time_s=0.9, replica=0, kind="join")]
    one, again = (
        fleet_of(mixed(30, seed, rate), given_tables, replicas=3, events=events * fails).run() for _ in range(2)
    )
    assert one == again
    assert one.kv is not None
    assert one.kv.num_tokens_loaded / link - 1e-6 <= one.kv.link_busy_s
    assert one.kv.link_busy_s <= 3 * one.end_s + one.kv.num_tokens_saved / link + 1e-6
    assert one.kv.num_loads * latency - 1e-6 <= one.kv.load_s + one.kv.num_late_loads * latency
    for record in one.records:
        assert not record.error or fails
        assert record.num_cached_tokens < record.request.num_prompt_tokens
        if not record.error:
            assert record.num_output_tokens == record.request.num_output_tokens
            assert record.ttft_s >= 0.02


def test_the_cache_of_a_device_that_is_not_simulated_is_refused():
    context = ComponentContext(clock=SystemClock(), seed=0)
    with pytest.raises(ConfigValueError, match="trencadis simulate") as refused:
        make_simulated_store(SimulatedStoreConfig(), context).worker.register(MagicMock(spec=KVPool))
    assert "host_offload" in refused.value.hint


def test_a_store_without_room_for_a_block_is_refused():
    with pytest.raises(ConfigValueError, match="capacity_bytes = 1000: a block of 4 tokens takes 524288"):
        run([asked("a")], tables(capacity_bytes=1000))


def test_the_model_of_a_device_sheet_says_how_large_kv_is():
    requests = [asked("a", **SAME), asked("b", 10.0, **SAME)]
    for name, token_bytes in (("h100:llama_3_1_8b", 131_072), ("h100:llama_3_1_70b:tp4", 327_680)):
        times = load_step_times(name)
        result = run(requests, tables(latency=0.5), replicas=2, step_times=times)
        assert result.kv is not None
        assert result.kv.load_s == pytest.approx(0.5 + 20 * token_bytes / (1000 * TOKEN_BYTES))


def test_a_connector_that_moves_bytes_is_left_out_and_that_is_said():
    config, _ = config_of(kv_connector={"name": "host_offload"})
    (note,) = notes_on(config)
    assert '"host_offload"' in note
    assert "simulated_store" in note
    assert notes_on(config_of(**tables())[0]) == notes_on(config_of()[0]) == ()
    assert run([asked("a")], {"kv_connector": {"name": "host_offload"}}).kv is None
