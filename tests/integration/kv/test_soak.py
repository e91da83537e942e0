"""Thousands of random operations on engines whose stores go wrong all the time: what must hold holds after every one of them.

Requests of three tenants come and are aborted, share prefixes, and are preempted in a cache of few blocks, while store and network change
their faults, objects are spoiled where they lie, time makes leaps, and the wall clock says whatever it likes. ``SOAK_OPERATIONS`` says how
many operations for each store, and ``SOAK_SEED`` which.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from support.core.invariants import broken_invariants
from support.faultproxy import FaultProxy
from support.kv.redis_server import RedisServer, running_redis
from trencadis.interfaces import ComponentContext, ConnectorPair
from trencadis.records import FinishedSequence, FinishReason, Request, SamplingParams
from trencadis_kv.connectors.filesystem.config import FilesystemConfig
from trencadis_kv.connectors.filesystem.connector import make_filesystem
from trencadis_kv.connectors.host_offload.config import HostOffloadConfig
from trencadis_kv.connectors.host_offload.connector import make_host_offload
from trencadis_kv.connectors.redis.config import RedisConfig
from trencadis_kv.connectors.redis.connector import make_redis
from trencadis_kv.connectors.tiered.config import TieredConfig
from trencadis_kv.connectors.tiered.connector import make_tiered
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_testing.engines import OldestFirst
from trencadis_testing.fakes import fake_text
from trencadis_testing.kv_faults import CALLS, Fault, Faults, FaultyStore
from trencadis_testing.kv_suite import ConnectorSuite, EngineUnderTest

STORES = ("host_offload", "filesystem", "redis", "tiered")
NUM_OPERATIONS = int(os.environ.get("SOAK_OPERATIONS", "2400"))
SEED = int(os.environ.get("SOAK_SEED", "0"))
SALTS = ("", "blue", "green")
MIB = 1 << 20
MOST_GROWTH_BYTES = 16 * MIB
"""Of the second half of a run: allocators and interpreters are not as tidy as we are."""
MOST_NEW_DESCRIPTORS = 8
"""At rest a connection may be open or not; each thread has one."""
ROOM_BYTES = 256 << 10
LIMITS: dict[str, Any] = {"lookup_timeout_s": 0.5, "load_timeout_s": 2.0, "cooldown_s": 1.0, "staging_bytes": 4096}


@attrs.define
class Place:
    """Where blocks are kept, and how that goes wrong apart from what :class:`FaultyStore` does."""

    make: Callable[[ComponentContext], ConnectorPair]
    spoil: Callable[[random.Random], None] = lambda rng: None
    mend: Callable[[], None] = lambda: None


def spoil_files(folder: Path, rng: random.Random) -> None:
    files = sorted(Path(parent, name) for parent, _, names in os.walk(folder) for name in names)
    if not files:
        return
    path = rng.choice(files)
    with contextlib.suppress(FileNotFoundError):  # evicted a moment ago
        data = bytearray(path.read_bytes())
        match rng.randrange(4):
            case 0:
                path.write_bytes(data[: len(data) // 2])
            case 1 if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                path.write_bytes(data)
            case 2:
                path.write_bytes(b"")
            case _:
                path.unlink()


def spoil_server(server: RedisServer, proxy: FaultProxy, rng: random.Random) -> None:
    way = rng.choice([proxy.to_client, proxy.to_server])
    match rng.randrange(8):
        case 0:
            way.set(cut_at=rng.randrange(4000))
        case 1:
            way.set(stall_at=rng.randrange(4000))
        case 2:
            way.set(flip_at=rng.randrange(4000))
        case 3:
            way.set(delay_s=0.005)
        case 4:
            proxy.cut()
        case 5:
            server.run("FLUSHALL")
        case 6:
            if (key := server.run("RANDOMKEY")) is not None:
                server.run("SETRANGE", key, rng.randrange(200), b"\xff")
        case _:
            server.kill()
            server.start()


@contextlib.contextmanager
def place(name: str, folder: Path, faults: Faults) -> Iterator[Place]:
    """Have a place for blocks, with room for about a thousand, whose stores have faults."""

    def faulty(pair: Any) -> ConnectorPair:
        made: ConnectorPair = pair.with_stores(lambda store: FaultyStore(store, faults))
        return made

    def filesystem(context: ComponentContext) -> ConnectorPair:
        path = str(folder / "blocks")
        return faulty(
            make_filesystem(FilesystemConfig(path=path, max_bytes=ROOM_BYTES, min_free_ratio=0.0, **LIMITS), context)
        )

    def host_offload(context: ComponentContext) -> ConnectorPair:
        return faulty(make_host_offload(HostOffloadConfig(capacity_bytes=ROOM_BYTES, **LIMITS), context))

    def tiered(context: ComponentContext) -> ConnectorPair:
        def make(noun: str, child: str) -> Any:
            if noun != "kv_connector":
                return part(noun, child)
            return {"host_offload": host_offload, "filesystem": filesystem}[child](context)

        config = TieredConfig(children=("host_offload", "filesystem"), lookup_timeout_s=1.0, cooldown_s=1.0)
        return make_tiered(config, attrs.evolve(context, make=make))

    if name != "redis":
        connectors = {"host_offload": host_offload, "filesystem": filesystem, "tiered": tiered}
        spoil = (lambda rng: None) if name == "host_offload" else (lambda rng: spoil_files(folder / "blocks", rng))
        yield Place(connectors[name], spoil=spoil)
        return
    with running_redis(maxmemory="2mb") as server, FaultProxy(server.port) as proxy:
        config = RedisConfig(url=f"redis://127.0.0.1:{proxy.port}", connect_timeout_s=0.5, io_timeout_s=0.1, **LIMITS)
        yield Place(
            lambda context: faulty(make_redis(config, context)),
            spoil=lambda rng: spoil_server(server, proxy, rng),
            mend=proxy.set_passing,
        )


def part(noun: str, name: str) -> Any:
    return {"eviction": OldestFirst, "kv_policy": KVPolicy, "kv_codec": IdentityCodec}[noun]()


class Soak:
    """One engine, and what is expected of it."""

    def __init__(self, one: EngineUnderTest, where: Place, faults: Faults) -> None:
        self._one = one
        self._where = where
        self._faults = faults
        self._rng = rng = random.Random(SEED)
        openings = [tuple(rng.randrange(97) for _ in range(16)) for _ in range(3)]
        self._prompts = [
            (*rng.choice(openings), *(rng.randrange(97) for _ in range(rng.randint(1, 24)))) for _ in range(12)
        ]
        self._live: dict[str, Request] = {}
        self._num_requests = 0
        self._before_s = self._one.clock.now_s()
        self.step_s: list[float] = []
        self.num_ended = self.num_aborted = 0

    @property
    def num_loaded(self) -> int:
        return self._one.engine.stage("transfer").transfers.num_loaded

    def operate(self, number: int) -> None:
        rng = self._rng
        names = ["step", "add", "abort", "fault", "mend", "spoil", "leap"]
        weights = [70, 14, 3, 3, 4, 4, 2]
        for name in rng.choices(names, weights, k=number):
            getattr(self, name)()

    def step(self) -> None:
        """Take a step; nothing may be broken, late or wrong afterwards."""
        start_s = time.perf_counter()
        ends = self._one.engine.step().finished
        self.step_s.append(time.perf_counter() - start_s)
        transfers = self._one.engine.stage("transfer").transfers
        late = [load.sequence.slot for load in transfers._loads.values() if load.deadline_s < self._before_s]
        assert late == [], "they wait for a load longer than a step beyond its deadline"
        self._before_s = self._one.clock.now_s()
        assert broken_invariants(self._one.engine) == []
        for end in ends:
            self._ended(end)
        self._one.clock.advance(0.05)
        if self._rng.random() < 0.3:
            self._one.settle()

    def add(self) -> None:
        if len(self._live) >= 10:
            return
        rng = self._rng
        self._num_requests += 1
        request = Request(
            request_id=f"request {self._num_requests}",
            prompt_token_ids=rng.choice(self._prompts),
            params=SamplingParams(max_tokens=rng.choice([1, 4, 12, 30])),
            cache_salt=rng.choice(SALTS),
        )
        self._one.engine.add(request)
        self._live[request.request_id] = request

    def abort(self) -> None:
        if self._live:
            name = self._rng.choice(list(self._live))
            end = self._one.engine.abort(name)
            assert end is not None
            assert end.finish_reason is FinishReason.ABORT
            del self._live[name]
            self.num_aborted += 1

    def fault(self) -> None:
        rng = self._rng
        fault = rng.choice([fault for fault in Fault if fault is not Fault.NONE])
        self._faults.begin(fault, calls=rng.sample(sorted(CALLS), rng.choice([1, 2, 4])), every=rng.choice([1, 2, 5]))

    def mend(self) -> None:
        self._faults.end()
        self._where.mend()

    def spoil(self) -> None:
        self._where.spoil(self._rng)

    def leap(self) -> None:
        """Let much time pass: deadlines, and the time for which a store is left alone."""
        self._one.clock.advance(self._rng.uniform(0.5, 5.0))

    def rest(self) -> None:
        """Come to rest, with everything mended: all that was asked is answered, and nothing is held."""
        self.mend()
        for _ in range(5000):
            if not self._one.engine.has_work:
                break
            self.step()
        self._one.rest()
        assert self._live == {}
        state = self._one.engine._state
        assert state.blocks.num_used == 0, "blocks are lost"
        transfers = self._one.engine.stage("transfer").transfers
        assert transfers.num_pinned_blocks == 0
        num_ends = transfers.num_loaded + transfers.num_failed_loads + transfers.num_cancelled_loads
        assert transfers.num_loads == num_ends, "a load has no end, or two"
        assert self._one.books.faults() == []

    def is_used_again(self) -> bool:
        self.mend()
        before = self.num_loaded
        for _ in range(40):
            self._one.clock.advance(2.0)
            self.add()
            self.rest()
            if self.num_loaded > before:
                return True
        return False

    def _ended(self, end: FinishedSequence) -> None:
        request = self._live.pop(end.request_id)  # which also shows that nothing ends twice
        assert end.finish_reason is not FinishReason.ERROR, end.error
        true = fake_text(request.prompt_token_ids, request.params.max_tokens or 0, eos=-1)
        assert end.token_ids.tolist() == true, f"{end.request_id} with {self._faults} is not what it should be"
        self.num_ended += 1


class Suite(ConnectorSuite):
    """Whole engines that notice when a sequence reads what is not its own."""

    has_threads = True


def keep_owners(pair: ConnectorPair) -> list[str]:
    """Note whose blocks the connector is asked for; the list fills with those that two salts have in common."""
    owners: dict[bytes, str] = {}
    shared: list[str] = []
    lookup = pair.scheduler.lookup

    def noted(request: Request, **more: Any) -> Any:
        salt = request.cache_salt
        shared.extend(block.hex() for block in more["block_hashes"] if owners.setdefault(block, salt) != salt)
        return lookup(request, **more)

    pair.scheduler.lookup = noted  # type: ignore[method-assign]
    return shared


@pytest.fixture
def wild_wall_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on hosts whose clocks differ, and are set again and again: nothing but the order of eviction may depend on it."""
    rng, true_ns = random.Random(SEED), time.time_ns

    def wild_ns() -> int:
        return true_ns() + rng.randrange(-500, 500) * 86_400 * 10**9

    monkeypatch.setattr(time, "time_ns", wild_ns)
    monkeypatch.setattr(time, "time", lambda: wild_ns() / 1e9)


def resident_bytes() -> int:
    gc.collect()
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts memory and descriptors as Linux shows them")
@pytest.mark.parametrize("name", [STORES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in STORES[1:])])
@pytest.mark.representatives(1)
def test_whatever_happens_texts_are_right_and_nothing_is_lost_or_left(
    name: str, tmp_path: Path, wild_wall_clock: None
) -> None:
    suite, faults = Suite(), Faults()
    faults.slow_s = 0.001
    threads = set(threading.enumerate())
    with place(name, tmp_path, faults) as where:
        descriptors = num_descriptors()
        pair = where.make(ComponentContext(clock=suite.clock, seed=0, make=part))
        shared = keep_owners(pair)
        with suite.engine(
            pair, num_blocks=28, eos=-1, release_timeout_s=600.0, prefix_caching=(SEED + STORES.index(name)) % 2 == 1
        ) as one:
            soak = Soak(one, where, faults)
            soak.operate(NUM_OPERATIONS // 2)
            soak.rest()
            half = resident_bytes(), num_descriptors(), soak.num_loaded
            soak.operate(NUM_OPERATIONS - NUM_OPERATIONS // 2)
            soak.rest()
            assert resident_bytes() - half[0] < MOST_GROWTH_BYTES
            assert num_descriptors() - half[1] <= MOST_NEW_DESCRIPTORS
            assert soak.num_loaded > half[2] > 0, "nothing is loaded, so nothing is shown"
            assert one.books.causes.total() > 0, "nothing fails, so nothing is shown"
            assert one.engine.totals.num_preempted > 0, "there is no pressure"
            assert soak.num_ended > soak.num_aborted > 0
            soak.step_s.sort()
            assert soak.step_s[int(0.95 * len(soak.step_s))] < 0.1, "steps wait for stores"
            assert soak.is_used_again(), "the store is well, and is not used"
            assert shared == []
        left = [thread.name for thread in threading.enumerate() if thread not in threads]
        assert [name for name in left if name.startswith("trencadis")] == [], "threads are left"
        assert num_descriptors() - descriptors <= (MOST_NEW_DESCRIPTORS if name == "redis" else 0)
    assert set(threading.enumerate()) <= threads
