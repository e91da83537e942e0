"""Whole engines on real servers that die, stall, lie, fill up and come back: it costs cache misses and nothing else."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable
from typing import Any

import pytest

from support.faultproxy import FaultProxy
from support.kv.redis_scene import (
    ALL_BYTES,
    NUM_PROMPTS,
    OBJECT_BYTES,
    PROMPT_BLOCKS,
    Scene,
    block_keys,
    failures,
    served,
    warm,
)
from support.kv.redis_server import RedisServer, running_redis
from trencadis.errors import ConfigValueError

# ---------------------------------------------------------------------------------------- the way is disturbed


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("direction", ["to_client", "to_server"])
def test_connection_that_breaks_costs_a_miss(
    server: RedisServer, scene_at: Callable[..., Scene], share: float, direction: str
) -> None:
    if direction == "to_client":
        warm(scene_at(server.port), server)
    with FaultProxy(server.port) as proxy, scene_at(proxy.port).engine() as one:
        getattr(proxy, direction).set(cut_at=int(share * ALL_BYTES))
        served(one, "cut")
        assert getattr(proxy, direction).happened.is_set()
        assert {server.run("STRLEN", key) for key in block_keys(server)} <= {OBJECT_BYTES}
        for number in range(20):
            if served(one, f"again {number}") == NUM_PROMPTS * PROMPT_BLOCKS * 4:
                return
    raise AssertionError("the connection is well again, and not everything is loaded")


@pytest.mark.parametrize("at", [0, 3, 60, 130, 200, 224, 226, 1000, 5000])
def test_flipped_bit_on_the_way_costs_a_miss(server: RedisServer, scene_at: Callable[..., Scene], at: int) -> None:
    warm(scene_at(server.port), server)
    with FaultProxy(server.port) as proxy, scene_at(proxy.port).engine() as one:
        proxy.to_client.set(flip_at=at)
        served(one, "flipped")
        assert proxy.to_client.happened.is_set()
        assert served(one, "again") > 0


def test_slow_way_changes_no_text(server: RedisServer, scene_at: Callable[..., Scene]) -> None:
    warm(scene_at(server.port), server)
    with FaultProxy(server.port) as proxy, scene_at(proxy.port).engine(load_timeout_s=0.2) as one:
        proxy.to_client.set(delay_s=0.02, bytes_per_s=200_000)
        served(one, "slow")
        proxy.set_passing()
        assert served(one, "quick") > 0


# -------------------------------------------------------------------------------------- the server is disturbed


def test_server_that_stands_still_is_not_waited_for_and_its_late_replies_are_not_believed(
    server: RedisServer, scene_at: Callable[..., Scene]
) -> None:
    warm(scene_at(server.port), server)
    with scene_at(server.port).engine(load_timeout_s=0.2) as one:
        assert served(one, "before") > 0
        with server.stopped():
            assert served(one, "stopped") == 0
        for number in range(20):
            if served(one, f"again {number}") == NUM_PROMPTS * PROMPT_BLOCKS * 4:
                return
    raise AssertionError("the server goes on, and not everything is loaded")


def test_server_that_stops_in_the_middle_of_a_load_is_given_up(
    server: RedisServer, scene_at: Callable[..., Scene]
) -> None:
    warm(scene_at(server.port), server)
    with FaultProxy(server.port) as proxy, scene_at(proxy.port).engine(load_timeout_s=0.2) as one:
        proxy.to_client.set(stall_at=PROMPT_BLOCKS * OBJECT_BYTES // 2)
        served(one, "stalled")
        assert proxy.to_client.happened.is_set()
        proxy.set_passing()
        assert served(one, "passing") > 0


def test_server_that_is_killed_and_comes_back_is_used_again(scene_at: Callable[..., Scene]) -> None:
    with running_redis() as server:
        warm(scene_at(server.port), server)
        scene = scene_at(server.port, failure_limit=2, cooldown_s=0.2)
        pair = scene.make_one()
        with scene.engine(pair) as one:
            assert served(one, "before") == NUM_PROMPTS * PROMPT_BLOCKS * 4
            server.kill()
            for number in range(3):
                assert served(one, f"away {number}") == 0
            assert failures(pair.scheduler.metrics())["unreachable"] >= 2
            assert 'trencadis_kv_breaker_state{connector="redis"} 0.0' not in pair.scheduler.metrics()
            server.start()
            for number in range(40):
                if served(one, f"back {number}") == NUM_PROMPTS * PROMPT_BLOCKS * 4:
                    return
        raise AssertionError("the server is back, and not everything is loaded")


def test_server_that_is_killed_while_blocks_are_loaded_costs_a_miss(scene_at: Callable[..., Scene]) -> None:
    with running_redis() as server, FaultProxy(server.port) as proxy:
        warm(scene_at(server.port), server)
        with scene_at(proxy.port).engine() as one:
            proxy.to_client.set(stall_at=PROMPT_BLOCKS * OBJECT_BYTES // 2)

            def kill() -> None:
                if proxy.to_client.happened.is_set():
                    server.signal(signal.SIGKILL)
                    proxy.set_passing()
                    proxy.cut()

            served(one, "killed", after_step=kill)


def test_full_server_drops_saves_and_serves(scene_at: Callable[..., Scene]) -> None:
    with running_redis(maxmemory="1mb", maxmemory_policy="noeviction") as server:
        scene = scene_at(server.port)
        pair = scene.make_one()
        with scene.engine(pair) as one:
            assert served(one, "full") == 0
            assert served(one, "again") == 0
        assert server.run("DBSIZE") == 0
        assert failures(pair.scheduler.metrics()).keys() == {"full"}
        assert 'dropped_saves_total{connector="redis",reason="full"}' in pair.scheduler.metrics()


def test_server_that_evicts_gives_what_it_still_has(scene_at: Callable[..., Scene]) -> None:
    with running_redis(maxmemory_policy="allkeys-lfu") as server, scene_at(server.port).engine() as one:
        served(one, "first")
        room = int(server.run("INFO", "memory")["used_memory"])
        server.run("CONFIG", "SET", "maxmemory", str(room - 5000))
        for number in range(3):
            served(one, f"again {number}")
        assert int(server.run("INFO", "stats")["evicted_keys"]) > 0


# --------------------------------------------------------------------------------------------------- start-up


def test_wrong_password_is_told_at_the_start_and_serving_goes_on(
    scene_at: Callable[..., Scene], caplog: pytest.LogCaptureFixture
) -> None:
    with running_redis(requirepass="right") as server:
        with scene_at(server.port, password="wrong").engine() as one:
            assert served(one, "without") == 0
        (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        for part in (server.url, "WRONGPASS", "kv_connector.redis.password", "Serving goes on"):
            assert part in error.getMessage()
        assert "wrong" not in error.getMessage()
        with pytest.raises(ConfigValueError, match="NOAUTH"), scene_at(server.port, required=True).engine():
            raise AssertionError("it starts without a password")


def test_port_where_nobody_listens_is_told_at_the_start(
    scene_at: Callable[..., Scene], caplog: pytest.LogCaptureFixture
) -> None:
    with running_redis() as server:
        port = server.port
    with scene_at(port).engine() as one:
        assert served(one, "without") == 0
    assert f"redis://127.0.0.1:{port} cannot be reached" in caplog.text
    with pytest.raises(ConfigValueError, match="cannot be reached"), scene_at(port, required=True).engine():
        raise AssertionError("it starts without a server")


def test_server_without_eviction_is_told_about_once(caplog: pytest.LogCaptureFixture, scene_at: Any) -> None:
    with running_redis(maxmemory_policy="noeviction") as server, caplog.at_level(logging.INFO):
        with scene_at(server.port).engine() as one:
            served(one, "first")
        assert caplog.text.count("set maxmemory-policy allkeys-lfu") == 1
