"""Whole engines on real servers that die, stall, lie, fill up and come back: it costs cache misses and nothing else."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from faultproxy import FaultProxy
from redis_server import RedisServer, running_redis

from trencadis.errors import ConfigError, ConfigValueError
from trencadis.interfaces import ComponentContext, ConnectorPair, KVPolicy
from trencadis.kv.defaults import AsTheyAre
from trencadis.kv.store import BlockStore
from trencadis.records import ModelFacts, Request, SamplingParams
from trencadis_plugins.kv_connector.redis import make_redis, redis_stores
from trencadis_plugins.kv_connector.redis_config import RedisConfig
from trencadis_testing.kv_suite import ConnectorSuite, EngineUnderTest, again
from trencadis_testing.workloads import Arrival, wrong_texts

FACTS = ModelFacts(
    architecture="Fake",
    dtype="float32",
    vocab_size=97,
    max_model_len=256,
    eos_token_ids=(0,),
    num_parameters=0,
    weights_bytes=0,
    kv_bytes_per_token=24,
    fingerprint="one",
)
NUM_PROMPTS, PROMPT_BLOCKS = 4, 12
OBJECT_BYTES = 128 + 3 * 4 * 8
"""A header, and four tokens of three arrays of integers."""
ALL_BYTES = (NUM_PROMPTS - 1) * PROMPT_BLOCKS * OBJECT_BYTES


class Always(KVPolicy):
    """Takes whatever there is: a cost model knows nothing of simulated time."""


class Scene(ConnectorSuite):
    """Engines with connectors to one port."""

    has_threads = True

    def __init__(self, port: int, *, facts: ModelFacts = FACTS, **settings: Any) -> None:
        # A breaker would keep a test from seeing the second fault.
        given = {"url": f"redis://127.0.0.1:{port}", "failure_limit": 1000, "io_timeout_s": 0.3, **settings}
        self._config = RedisConfig(**given)
        self._facts = facts

    def make(self) -> ConnectorPair:
        parts = {"kv_codec": AsTheyAre, "kv_policy": Always}
        context = ComponentContext(clock=self.clock, seed=0, model=self._facts, make=lambda noun, name: parts[noun]())
        return make_redis(self._config, context)

    def engine(self, pair: ConnectorPair | None = None, **options: Any) -> Any:
        return super().engine(pair, **{"prefix_caching": False, **options})


def prompts(seed: int = 0) -> list[Arrival]:
    """Return prompts of whole blocks and one token more, the last two with a common beginning."""
    todo = []
    for number in range(NUM_PROMPTS):
        first = min(number, NUM_PROMPTS - 2)
        tokens = [1 + (seed * 31 + first * 17 + at * at) % 96 for at in range(PROMPT_BLOCKS * 4)] + [1 + number]
        params = SamplingParams(max_tokens=3)
        todo.append(Arrival(number * 2, Request(request_id=f"{number}", prompt_token_ids=tuple(tokens), params=params)))
    return todo


def served(one: EngineUnderTest, mark: str, **options: Any) -> int:
    """Serve all prompts, check the texts, and return how many of their tokens were loaded."""
    todo = again(prompts(), mark=mark)
    found = one.serve(todo, **options)
    assert wrong_texts(found, todo) == []
    one.rest()
    return sum(end.num_cached_tokens for end in found.ends.values())


def failures(pair_metrics: str) -> dict[str, float]:
    """Return failures by cause."""
    lines = [line for line in pair_metrics.splitlines() if line.startswith("trencadis_kv_transfer_failures_total")]
    return {line.split('cause="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def block_keys(server: RedisServer) -> list[str]:
    """Return the keys of blocks, in order; beside them is a description of the layout."""
    return sorted(key.decode() for key in server.run("KEYS", "*") if len(key.rsplit(b"/")[-1]) == 64)


@pytest.fixture(scope="module")
def shared() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def server(shared: RedisServer) -> RedisServer:
    shared.run("FLUSHALL")
    return shared


@pytest.fixture
def scene_at() -> Iterator[Callable[..., Scene]]:
    scenes = []

    def make(port: int, **options: Any) -> Scene:
        scenes.append(Scene(port, **options))
        return scenes[-1]

    yield make
    for scene in scenes:
        scene.teardown_method()


def warm(scene: Scene, server: RedisServer) -> None:
    """Have all prompts saved."""
    with scene.engine() as one:
        assert served(one, "warm") <= PROMPT_BLOCKS * 4  # the common beginning may be loaded already
    # One prompt has all its blocks in common with the one before; the outputs fill no block.
    assert len(block_keys(server)) == (NUM_PROMPTS - 1) * PROMPT_BLOCKS


# ------------------------------------------------------------------------------------------------- who shares


def test_two_engines_on_one_server_share_prefixes(server: RedisServer, scene_at: Callable[..., Scene]) -> None:
    warm(scene_at(server.port), server)
    with scene_at(server.port).engine() as other:
        assert served(other, "other") == NUM_PROMPTS * PROMPT_BLOCKS * 4


@pytest.mark.parametrize(
    "options",
    [
        {"facts": attrs.evolve(FACTS, fingerprint="two")},
        {"facts": attrs.evolve(FACTS, dtype="bfloat16")},
        {"namespace": "another"},
    ],
    ids=["weights", "dtype", "namespace"],
)
def test_engine_of_another_kind_hits_nothing(
    server: RedisServer, scene_at: Callable[..., Scene], options: dict[str, Any]
) -> None:
    warm(scene_at(server.port), server)
    with scene_at(server.port, **options).engine() as other:
        served(other, "other")
        assert other.books.causes.total() == 0
    keys = block_keys(server)
    assert len(keys) == 2 * (NUM_PROMPTS - 1) * PROMPT_BLOCKS, "the two share objects"
    assert len({key.rsplit("/", 2)[0] for key in keys}) == 2


def test_keys_are_those_of_the_format(server: RedisServer, scene_at: Callable[..., Scene]) -> None:
    warm(scene_at(server.port), server)
    version, namespace, compat, _, block_hash = block_keys(server)[0].split("/")
    assert (version, namespace, len(compat), len(block_hash)) == ("kv1", "default", 32, 64)
    assert server.run("STRLEN", block_keys(server)[0]) == OBJECT_BYTES


# --------------------------------------------------------------------------------- what was stored is damaged


def test_overwritten_objects_are_computed_and_saved_again(server: RedisServer, scene_at: Callable[..., Scene]) -> None:
    warm(scene_at(server.port), server)
    for number, key in enumerate(block_keys(server)):
        server.run("SETRANGE", key, (number * 13) % 100, b"\xff\x00\xff")
    with scene_at(server.port).engine() as one:
        served(one, "damaged")
        # A block that was found to be broken is deleted at once: who loads the same prompt later misses it.
        assert "corrupt" in one.books.causes
        assert set(one.books.causes) <= {"corrupt", "evicted"}
        for number in range(20):
            if served(one, f"again {number}") == NUM_PROMPTS * PROMPT_BLOCKS * 4:
                return
    raise AssertionError("broken objects were not replaced")


def test_swapped_values_are_not_believed(server: RedisServer, scene_at: Callable[..., Scene]) -> None:
    warm(scene_at(server.port), server)
    keys = block_keys(server)
    values = server.run("MGET", *keys)
    for key, value in zip(keys, values[1:] + values[:1], strict=True):
        server.run("SET", key, value)
    with scene_at(server.port).engine() as one:
        served(one, "swapped")
        assert "corrupt" in one.books.causes
        assert set(one.books.causes) <= {"corrupt", "evicted"}


@pytest.mark.parametrize("change", [b"", b"longer than any object can be" * 100, b"KVB1"])
def test_values_of_another_length_are_not_believed(
    server: RedisServer, scene_at: Callable[..., Scene], change: bytes
) -> None:
    warm(scene_at(server.port), server)
    for key in block_keys(server):
        server.run("SET", key, change)
    with scene_at(server.port).engine() as one:
        assert served(one, "changed") <= PROMPT_BLOCKS * 4
        assert one.books.causes


class Evicting(BlockStore):
    """A store that loses some keys just before they are read: what eviction does between a look-up and a load."""

    def __init__(self, inner: BlockStore, evict: Callable[[Sequence[str]], None]) -> None:
        self._inner = inner
        self._evict = evict

    def get(self, keys: Sequence[str], targets: Sequence[memoryview]) -> Sequence[int]:
        self._evict(keys)
        return self._inner.get(keys, targets)

    def contains(self, keys: Sequence[str]) -> int:
        return self._inner.contains(keys)

    def put(self, keys: Sequence[str], objects: Sequence[Sequence[memoryview]]) -> int:
        return self._inner.put(keys, objects)

    def delete(self, keys: Sequence[str]) -> None:
        self._inner.delete(keys)

    def interrupt(self) -> None:
        self._inner.interrupt()

    def close(self) -> None:
        self._inner.close()


def test_blocks_before_one_that_was_evicted_after_the_lookup_are_used(
    server: RedisServer, scene_at: Callable[..., Scene]
) -> None:
    warm(scene_at(server.port), server)
    scene = scene_at(server.port)

    def evict(keys: Sequence[str]) -> None:
        if len(keys) > 5:
            server.run("DEL", keys[5])

    pair: Any = scene.make_one()
    with scene.engine(pair.with_stores(lambda store: Evicting(store, evict))) as one:
        assert served(one, "evicted") >= 5 * 4
        assert set(one.books.causes) == {"evicted"}


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


def test_password_in_the_url_is_refused_without_being_repeated() -> None:
    with pytest.raises(ConfigValueError, match=r"kv_connector\.redis\.password") as caught:
        redis_stores(RedisConfig(url="redis://me:hunter2@host"))
    assert "hunter2" not in str(caught.value)


def test_missing_package_says_which_extra_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r'pip install "trencadis\[redis\]"'):
        redis_stores(RedisConfig())


def test_file_of_certificates_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = RedisConfig(url="rediss://127.0.0.1", tls_ca_path=str(tmp_path / "ca.pem"))
    with pytest.raises(ConfigValueError, match=r"kv_connector\.redis\.tls_ca_path = .*ca\.pem"):
        redis_stores(config)
