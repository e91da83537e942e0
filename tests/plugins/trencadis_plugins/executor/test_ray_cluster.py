"""Ranks of a Ray cluster that send no sign of life; Ray itself is stood in for by three functions."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import RanksLostError
from trencadis.link import Link, LinkClosedError
from trencadis.records import ModelSource, ParallelLayout
from trencadis_plugins.executor.config import RayConfig
from trencadis_plugins.executor.ranks.server import RankServer
from trencadis_plugins.executor.ray_cluster import RayExecutor, RayRank
from trencadis_testing.executor_fakes import make_backend, make_sampler, one_token, plan_of
from trencadis_testing.fakes import FakeBackend

SOURCE = ModelSource(path="fake")


class Scene:
    """What a rank of these tests shares with its executor, whose thread is another one of the same process."""

    clock = SimulatedClock()
    silent_s = 0.0
    looked = threading.Event()
    ended: tuple[object, ...] = ()


class Silent(FakeBackend):
    """Takes its time, without a sign of life, until the executor has looked for one."""

    def embed(self, token_ids):
        be_silent()
        return super().embed(token_ids)


def be_silent():
    Scene.looked.clear()
    Scene.clock.advance(Scene.silent_s)
    assert Scene.looked.wait(60)


def import_slowly(rank):
    """As an import that holds Python's lock does, during which no other thread of the rank runs."""
    be_silent()
    return make_backend(rank)


def make_silent(rank):
    return Silent(layout="ragged", max_model_len=64)


class OnThreads(RayExecutor):
    """Ranks on threads of this process, which beat never."""

    lost_nodes: set[str]

    def _start_ranks(self, make_backend):
        self.lost_nodes = set()
        ray = SimpleNamespace(
            wait=lambda ends, timeout: ([end for end in ends if end in Scene.ended], ()),
            kill=lambda actor, no_restart: None,
        )
        for rank in range(self.num_ranks):
            own, other = socket.socketpair()
            threading.Thread(target=_serve, args=(other,), daemon=True).start()
            end = f"end of {rank}"
            yield RayRank(
                ray, rank, Link(own), None, end, self._ray_config, node=f"node {rank}", silent_nodes=self.lost_nodes
            )

    def _look_after(self, now_s):
        super()._look_after(now_s)
        Scene.looked.set()


def _serve(end):
    with contextlib.suppress(LinkClosedError), contextlib.closing(end):
        RankServer(Link(end)).run()


@pytest.fixture
def executor():
    Scene.clock, Scene.looked, Scene.ended = SimulatedClock(), threading.Event(), ()
    made = OnThreads(
        RayConfig(heartbeat_timeout_s=8.0, start_timeout_s=300.0), layout=ParallelLayout(), clock=Scene.clock
    )
    yield made
    Scene.looked.set()
    made.close()


def start(executor, make):
    executor.start(make_backend=make, make_sampler=make_sampler, source=SOURCE)
    executor.allocate(plan_of())


def test_a_rank_that_imports_is_not_silent(executor):
    Scene.silent_s = 200.0
    start(executor, import_slowly)
    executor.submit(one_token(1)).wait()
    assert not executor.lost_nodes


def test_a_rank_that_starts_is_lost_when_a_start_may_take_no_longer(executor):
    Scene.silent_s = 301.0
    with pytest.raises(RanksLostError, match="rank 0 sent no sign of life for 301 s"):
        start(executor, import_slowly)
    assert executor.lost_nodes == {"node 0"}


def test_a_rank_that_starts_is_lost_when_ray_knows_its_end(executor):
    Scene.silent_s, Scene.ended = 9.0, ("end of 0",)
    with pytest.raises(RanksLostError, match="rank 0 sent no sign of life for 9 s"):
        start(executor, import_slowly)


def test_a_rank_that_has_started_and_is_silent_is_lost(executor):
    start(executor, make_silent)
    Scene.silent_s = 9.0
    with pytest.raises(RanksLostError, match="rank 0 sent no sign of life for 9 s"):
        executor.embed([np.zeros(1, np.int32)])
    assert executor.lost_nodes == {"node 0"}
