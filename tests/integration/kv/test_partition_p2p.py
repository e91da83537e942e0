"""Engines on hosts that fall off the network in the middle of handing blocks over; see also ``test_partition.py``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest

from support.kv.engine_pairs import Station, pause, prompt_of, true_text
from support.netns import hosts

LOAD_S, CONNECT_S = 1.0, 0.3
SLACK_S = 30.0
"""For a machine that has other things to do; the kernel gives a connection up after two minutes, or after fifteen."""
PEERS = "10.99.0.0/24:*"
NUM_PULLED = 6000


class Pulling:
    """Two engines on two hosts: one computes prompts, another pulls their blocks.

    Args:
        pulls: Settings of who pulls.
    """

    def __init__(self, stack: contextlib.ExitStack, **pulls: Any) -> None:
        self.here, self.there = stack.enter_context(hosts(2))
        engine = {"prefix_caching": False}
        with self.there.entered():
            self.giver = Station(num_blocks=4000, engine=engine, host=self.there.address, peers=(PEERS,), lease_s=5.0)
        stack.callback(self.giver.close)
        with self.here.entered():
            self.taker = Station(
                num_blocks=4000,
                engine=engine,
                host=self.here.address,
                peers=(PEERS,),
                connect_timeout_s=CONNECT_S,
                shared_memory=False,  # two networks, but one machine
                **pulls,
            )
        stack.callback(self.taker.close)
        self.taker.step_s = self.giver.step_s = 0.0001  # engines' deadlines must not be what ends a wait

    def hold(self, seed: int) -> Any:
        """Return parameters of a prompt that is computed and held."""
        with self.there.entered():
            return self.giver.prefill(prompt_of(seed, NUM_PULLED))

    def pull(self, seed: int, params: Any, *, while_it_runs: Callable[[], None] = lambda: None) -> tuple[float, int]:
        """Serve a prompt of the other engine; returns how long that took, and how many of its tokens were pulled."""
        tokens = prompt_of(seed, NUM_PULLED)
        start_s = time.monotonic()
        with self.here.entered():
            name = self.taker.add(tokens, max_tokens=4, params=params)
            while name not in self.taker.ends:
                assert time.monotonic() - start_s < 60, "it never ends"
                self.taker.step()
                while_it_runs()
                pause()
        took_s = time.monotonic() - start_s
        end = self.taker.ends[name]
        assert end.token_ids.tolist() == true_text(tokens, 4)
        return took_s, self.taker.num_found(end)

    def rest(self) -> None:
        """Let leases end; then nobody holds a block.

        A reader that is done only now begins a new lease: each step takes a second until none is left.
        """
        self.giver.step_s, step_s = 1.0, self.giver.step_s
        with self.there.entered():
            self.giver.until(lambda: self.giver.num_used_blocks == 0)
        self.giver.step_s = step_s
        assert self.taker.num_used_blocks == 0


def test_host_that_cannot_be_reached_costs_a_pull_the_time_to_connect() -> None:
    with contextlib.ExitStack() as stack:
        both = Pulling(stack)
        params = both.hold(0)
        both.there.unplug()
        took_s, num_cached = both.pull(0, params)
        assert num_cached == 0
        assert took_s < CONNECT_S + SLACK_S
        assert both.taker.node.peers.num_down == 1
        both.rest()


@pytest.mark.slow
def test_engine_that_computes_prompts_and_falls_off_the_network_is_missed_within_three_heartbeats() -> None:
    heartbeat_s = 0.3
    with contextlib.ExitStack() as stack:
        here, there = stack.enter_context(hosts(2))
        with there.entered():
            giver = stack.enter_context(Station(host=there.address, peers=(PEERS,)))
            name = f"{there.address}:{giver.node.server.port}"
        with here.entered():
            taker = stack.enter_context(
                Station(
                    host=here.address,
                    peers=(PEERS,),
                    prefill_engines=(name,),
                    min_remote_tokens=8,
                    heartbeat_s=heartbeat_s,
                    connect_timeout_s=heartbeat_s,
                )
            )
        ready = taker.node.prefill_pool.ready
        _wait_for(lambda: bool(ready()), within_s=60.0)
        there.unplug()
        _wait_for(lambda: not ready(), within_s=3 * heartbeat_s + SLACK_S)
        with here.entered():
            end = taker.serve(prompt_of(1, 40), max_tokens=4)
        assert end.token_ids.tolist() == true_text(prompt_of(1, 40), 4)
        assert taker.count("delegated_prefills", result="failed") == 0, "it was asked although it was missed"
        there.plug_in()
        _wait_for(lambda: bool(ready()), within_s=3 * heartbeat_s + SLACK_S)


def _wait_for(condition: Callable[[], bool], *, within_s: float) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s, "it never happens"
        pause()
