"""Hosts that fall off the network without a word: what an engine notices, and how soon.

Engines, stores and other engines are on hosts of their own: network namespaces, in which this process' threads run as well. Nothing here
sends a FIN or a RST when it is gone, so only the connectors' own limits end a wait.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from support.core.invariants import broken_invariants
from support.kv.engine_pairs import Station, pause, prompt_of, true_text
from support.kv.redis_server import running_redis
from support.netns import Host, hosts
from trencadis.clock import SystemClock
from trencadis.interfaces import ComponentContext
from trencadis.records import Request, SamplingParams
from trencadis_kv.connectors.redis.config import RedisConfig
from trencadis_kv.connectors.redis.connector import make_redis
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store.breaker import BreakerState
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

VOCAB_SIZE = 4096
BLOCK_SIZE = 16
PROMPT = tuple(1 + i * 13 % (VOCAB_SIZE - 1) for i in range(512 * BLOCK_SIZE))
TEXT = fake_text(PROMPT, 4, vocab_size=VOCAB_SIZE, eos=-1)
LOOKUP_S, CONNECT_S, COOLDOWN_S = 0.3, 0.3, 0.5
LIMITS = {"lookup_timeout_s": LOOKUP_S, "connect_timeout_s": CONNECT_S, "failure_limit": 2, "cooldown_s": COOLDOWN_S}
PEERS = "10.99.0.0/24:*"
SLACK_S = 30.0
"""For a machine that has other things to do; the kernel gives a connection up after two minutes, or after fifteen."""


class Served:
    """An engine on one host, with a store on another one. Its tokens are known; every answer is compared with them."""

    def __init__(self, host: Host, url: str) -> None:
        parts: dict[str, Any] = {"kv_policy": KVPolicy(), "kv_codec": IdentityCodec()}
        context = ComponentContext(clock=SystemClock(), seed=0, make=lambda noun, _: parts[noun])
        self.host = host
        self.pair: Any = make_redis(RedisConfig(url=url, **LIMITS), context)
        self.parts: Any = self.pair.scheduler._parts
        self._num_requests = 0
        with host.entered():
            self.engine = make_engine(
                connector=self.pair,
                backend=FakeBackend(vocab_size=VOCAB_SIZE, eos=-1, max_model_len=2 * len(PROMPT), strict=False),
                clock=SystemClock(),
                num_blocks=2048,
                block_size=BLOCK_SIZE,
                max_num_batched_tokens=2048,
                prefix_caching=False,
                warmup=False,
            )

    def serve(self) -> int:
        """Serve the prompt in time; returns how many of its tokens were loaded."""
        self._num_requests += 1
        start_s, name = time.monotonic(), str(self._num_requests)
        with self.host.entered():
            self.engine.add(Request(request_id=name, prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=4)))
            while not (ends := self.engine.step().finished):
                pause()
        assert time.monotonic() - start_s < LOOKUP_S + SLACK_S
        assert ends[0].token_ids.tolist() == TEXT
        assert broken_invariants(self.engine) == []
        return ends[0].num_cached_tokens

    def rest(self) -> None:
        """Wait until everything is saved; then nothing is held."""
        assert self.pair.worker.wait_idle(60.0)
        with self.host.entered():
            while self.engine.has_work:
                self.engine.step()
        assert self.engine.inspect().blocks.num_used == 0

    def lookups(self, result: str) -> float:
        value: float = self.parts.counters.value("lookups_total", result=result)
        return value


@contextlib.contextmanager
def served() -> Iterator[tuple[Served, Host]]:
    """Have an engine whose store has the prompt, and the store's host."""
    with hosts(2) as (here, there), contextlib.ExitStack() as stack:
        with there.entered():
            bind = f"127.0.0.1 {there.address}"
            server = stack.enter_context(running_redis(bind=bind, protected_mode="no"))
        one = Served(here, f"redis://{there.address}:{server.port}")
        stack.callback(one.pair.worker.close)
        stack.callback(one.engine.close)
        one.serve()
        one.rest()
        assert one.serve() == len(PROMPT) - BLOCK_SIZE, "the store is of no use even while all is well"
        yield one, there


def test_store_that_fell_off_the_network_costs_a_look_up_and_is_left_alone_until_it_is_back() -> None:
    with served() as (one, there):
        there.unplug()
        while one.parts.breaker.state is not BreakerState.OPEN:
            assert one.serve() == 0
        timeouts = one.lookups("timeout")
        assert timeouts <= 2
        assert one.serve() == 0
        assert one.lookups("skipped") >= 1
        assert one.lookups("timeout") == timeouts, "it is asked although it is left alone"
        there.plug_in()
        until_s = time.monotonic() + COOLDOWN_S + CONNECT_S + SLACK_S
        while not one.serve():
            assert time.monotonic() < until_s, "the store is there again, and is not used"
        assert one.parts.breaker.state is BreakerState.CLOSED
        one.rest()


def test_host_that_cannot_be_reached_costs_a_pull_the_time_to_connect() -> None:
    prompt = prompt_of(0, 200)
    with hosts(2) as (here, there), contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"peers": (PEERS,), "engine": {"prefix_caching": False}}
        with there.entered():
            giver = stack.enter_context(Station(host=there.address, lease_s=5.0, **options))
            params = giver.prefill(prompt)
        # Two networks, but one machine: no shared memory.
        with here.entered():
            own = {"host": here.address, "connect_timeout_s": CONNECT_S, "shared_memory": False}
            taker = stack.enter_context(Station(**options, **own))
        taker.step_s = 0.0001  # engines' deadlines must not be what ends a wait
        there.unplug()
        start_s = time.monotonic()
        with here.entered():
            end = taker.serve(prompt, max_tokens=4, params=params)
        assert time.monotonic() - start_s < CONNECT_S + SLACK_S
        assert (end.token_ids.tolist(), taker.num_found(end)) == (true_text(prompt, 4), 0)
        assert taker.node.peers.num_down == 1
        giver.step_s = 1.0
        with there.entered():
            giver.until(lambda: giver.num_used_blocks == 0)
        assert taker.num_used_blocks == 0
