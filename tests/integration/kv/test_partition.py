"""Hosts that fall off the network without a word, and cables that are too slow: what an engine notices, and how soon.

Engines, stores and other engines are on hosts of their own: network namespaces, in which this process' threads run as well. Nothing here
sends a FIN or a RST when it is gone, so only the connectors' own limits end a wait.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest

from support.core.invariants import broken_invariants
from support.kv.engine_pairs import pause
from support.kv.redis_server import running_redis
from support.netns import Host, hosts
from trencadis.clock import SystemClock
from trencadis.interfaces import ComponentContext
from trencadis.records import Batch, Request, SamplingParams, StepOutput
from trencadis_kv.connectors.redis.config import RedisConfig
from trencadis_kv.connectors.redis.connector import make_redis
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.policies.cost_aware import CostAware
from trencadis_kv.store.breaker import BreakerState
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text

VOCAB_SIZE = 4096
BLOCK_SIZE = 16
NUM_TOKENS = 16 * 512
LOOKUP_S, LOAD_S, CONNECT_S, COOLDOWN_S = 0.3, 1.0, 0.3, 0.5
SLACK_S = 30.0
"""For computing, and for a machine that has other things to do."""


def prompt(number: int, num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    return tuple(1 + (number * 7919 + i * 13) % (VOCAB_SIZE - 1) for i in range(num_tokens))


@functools.cache
def text(number: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    return fake_text(prompt(number, num_tokens), 4, vocab_size=VOCAB_SIZE, eos=-1)


class Served:
    """An engine on one host, with a store on another one. Its tokens are known; every answer is compared with them.

    Args:
        host: Where it runs.
        url: Of the store.
        policy: Of its connector.
        token_s: How long computing a token of a prompt takes.
        settings: Of its connector.
    """

    def __init__(self, host: Host, url: str, *, policy: KVPolicy, token_s: float = 0.0, **settings: Any) -> None:
        parts: dict[str, Any] = {"kv_policy": policy, "kv_codec": IdentityCodec()}
        context = ComponentContext(clock=SystemClock(), seed=0, make=lambda noun, _: parts[noun])
        limits = {
            "lookup_timeout_s": LOOKUP_S,
            "load_timeout_s": LOAD_S,
            "connect_timeout_s": CONNECT_S,
            "failure_limit": 2,
            "cooldown_s": COOLDOWN_S,
        }
        self.host = host
        self.pair: Any = make_redis(RedisConfig(url=url, **{**limits, **settings}), context)
        self.parts: Any = self.pair.scheduler._parts
        self._num_requests = 0
        backend = _Paced(token_s, vocab_size=VOCAB_SIZE, eos=-1, max_model_len=2 * NUM_TOKENS, strict=False)
        with host.entered():
            self.engine = make_engine(
                connector=self.pair,
                backend=backend,
                clock=SystemClock(),
                num_blocks=2048,
                block_size=BLOCK_SIZE,
                max_num_batched_tokens=2048,
                prefix_caching=False,
                warmup=False,
            )

    def serve(self, number: int, *, while_it_runs: Callable[[], None] = lambda: None) -> tuple[float, int]:
        """Serve a prompt; returns how long that took, and how many of its tokens were loaded."""
        self._num_requests += 1
        start_s = time.monotonic()
        with self.host.entered():
            self.engine.add(
                Request(
                    request_id=f"{self._num_requests}",
                    prompt_token_ids=prompt(number),
                    params=SamplingParams(max_tokens=4),
                )
            )
            while not (ends := self.engine.step().finished):
                while_it_runs()
                pause()
        took_s = time.monotonic() - start_s
        assert ends[0].token_ids.tolist() == text(number)
        assert broken_invariants(self.engine) == []
        return took_s, ends[0].num_cached_tokens

    def rest(self) -> None:
        """Wait until everything is saved; then nothing is held."""
        assert self.pair.worker.wait_idle(60.0)
        with self.host.entered():
            while self.engine.has_work:
                self.engine.step()
        assert self.engine.inspect().blocks.num_used == 0

    def count(self, name: str, **labels: str) -> float:
        value: float = self.parts.counters.value(f"{name}_total", **labels)
        return value

    def recover(self, number: int, *, within_s: float) -> None:
        """Serve a prompt that is stored until it is loaded again."""
        start_s = time.monotonic()
        while not self.serve(number)[1]:
            assert time.monotonic() - start_s < within_s + SLACK_S, "the store is there again, and is not used"
        assert self.parts.breaker.state is BreakerState.CLOSED

    def close(self) -> None:
        self.engine.close()
        self.pair.worker.close()


class _Paced(FakeBackend):
    """Takes its time for every token, and says so."""

    def __init__(self, token_s: float, **options: Any) -> None:
        super().__init__(fails=lambda _, part: time.sleep(token_s * int(part.query_lens.sum())), **options)

    def _run(self, batch: Batch) -> StepOutput:
        start_s = time.monotonic()
        return attrs.evolve(super()._run(batch), device_s=time.monotonic() - start_s)


@contextlib.contextmanager
def served(**options: Any) -> Iterator[tuple[Served, Host]]:
    """Have an engine whose store has the prompt 0, and the store's host."""
    with hosts(2) as (here, there), contextlib.ExitStack() as stack:
        with there.entered():
            bind = f"127.0.0.1 {there.address}"
            server = stack.enter_context(running_redis(bind=bind, protected_mode="no"))
        one = Served(here, f"redis://{there.address}:{server.port}", **options)
        stack.callback(one.close)
        one.serve(0)
        one.rest()
        assert one.serve(0)[1] == NUM_TOKENS - BLOCK_SIZE, "the store is of no use even while all is well"
        yield one, there


def test_store_that_fell_off_the_network_costs_a_look_up_and_is_left_alone() -> None:
    with served(policy=KVPolicy()) as (one, there):
        there.unplug()
        while one.parts.breaker.state is not BreakerState.OPEN:
            took_s, num_cached = one.serve(0)
            assert num_cached == 0
            assert took_s < LOOKUP_S + SLACK_S
        timeouts = one.count("lookups", result="timeout")
        assert timeouts <= 2
        assert one.serve(0)[1] == 0
        assert one.count("lookups", result="skipped") >= 1
        assert one.count("lookups", result="timeout") == timeouts, "it is asked although it is left alone"
        there.plug_in()
        one.recover(0, within_s=COOLDOWN_S + CONNECT_S)
        one.rest()


@pytest.mark.slow
def test_cable_that_is_slower_than_computing_is_given_up_once_and_then_not_used() -> None:
    """2.6 Mbit/s: a load takes longer than computing does, by half at least."""
    # Half a second for a prompt: on a busy machine, too, the first load is quicker than that, so that the second is tried.
    with served(policy=CostAware(), token_s=60e-6, cooldown_s=3.0, lookup_timeout_s=2.0) as (one, _):
        compute_s = one.parts.cost.compute_s(NUM_TOKENS)
        one.host.slow_down("2600kbit")
        took_s, num_cached = one.serve(0)
        assert num_cached == 0
        assert one.count("transfer_failures", cause="deadline") == 1, "it was never tried"
        assert took_s < 2 * compute_s + SLACK_S
        declined = one.count("lookups", result="declined")
        for _ in range(3):
            assert one.serve(0)[1] == 0
        assert one.count("lookups", result="declined") == declined + 3, "it is tried again and again"
        assert one.parts.breaker.state is BreakerState.CLOSED, "a slow store is no dead one"
        one.host.set_quick()
        one.recover(0, within_s=3.0)
        one.rest()
