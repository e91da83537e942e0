"""Leases and deadlines are durations: what a host's wall clock says, and whether it is set meanwhile, makes no difference."""

from __future__ import annotations

import random
import time

import pytest

from support.kv.engine_pairs import Station, pause, prompt_of, true_text
from support.kv.faulty_store import VOCAB_SIZE, Shelf
from trencadis.clock import SystemClock
from trencadis.interfaces import ComponentContext
from trencadis.records import Request, SamplingParams
from trencadis_kv.interfaces import KVPolicy
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text
from trencadis_testing.kv_faults import Fault

DAY_S = 86_400.0
LEASE_S = 5.0
LOAD_S = 0.3


@pytest.fixture(params=["right", "ahead", "behind", "set again and again"])
def wall_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What both engines read; the last one is another time for whoever looks."""
    rng, true_s = random.Random(0), time.time
    shifts_s = {"right": lambda: 0.0, "ahead": lambda: 400 * DAY_S, "behind": lambda: -400 * DAY_S}
    shift_s = shifts_s.get(request.param, lambda: rng.uniform(-400, 400) * DAY_S)
    monkeypatch.setattr(time, "time", lambda: true_s() + shift_s())
    monkeypatch.setattr(time, "time_ns", lambda: int((true_s() + shift_s()) * 1e9))
    return str(request.param)


def test_leases_last_as_long_as_they_say_whatever_the_wall_clock_says(wall_clock: str) -> None:
    with Station(lease_s=LEASE_S) as giver, Station() as taker:
        pulled, forgotten = prompt_of(1, 41), prompt_of(2, 41)
        params = giver.prefill(pulled)
        assert all(not isinstance(value, float) or value < 1e6 for value in params.values()), "a point in time is sent"
        end = taker.serve(pulled, max_tokens=5, params=params)
        assert end.token_ids.tolist() == true_text(pulled, 5)
        assert (taker.num_found(end), end.num_cached_tokens) == (40, 0)
        giver.until(lambda: giver.node.holds.num_holds == 0)
        giver.prefill(forgotten)
        giver.clock.advance(LEASE_S - 1.0)
        giver.step()
        assert giver.node.holds.num_holds == 1, "the lease ended too soon"
        giver.clock.advance(1.5)
        giver.until(lambda: giver.node.holds.num_holds == 0)
        assert giver.count("holds", end="expired") == 1


def test_load_that_stalls_is_given_up_when_its_time_is_over_whatever_the_wall_clock_says(wall_clock: str) -> None:
    shelf, prompt = Shelf(), tuple(range(100, 140))
    parts = {"kv_policy": KVPolicy, "kv_codec": IdentityCodec}
    context = ComponentContext(clock=SystemClock(), seed=0, make=lambda noun, _: parts[noun]())
    pair = shelf.connector(context, load_timeout_s=LOAD_S)
    backend = FakeBackend(vocab_size=VOCAB_SIZE, eos=-1, max_model_len=256)
    engine = make_engine(connector=pair, clock=SystemClock(), backend=backend, prefix_caching=False, warmup=False)

    def serve(name: str) -> float:
        start_s = time.monotonic()
        engine.add(Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=4)))
        while not (ends := engine.step().finished):
            pause()
        assert ends[0].token_ids.tolist() == fake_text(prompt, 4, vocab_size=VOCAB_SIZE, eos=-1)
        return time.monotonic() - start_s

    try:
        serve("first")
        assert pair.worker.wait_idle(60.0)  # type: ignore[attr-defined]
        shelf.faults.begin(Fault.STALLS, calls={"get"})
        assert LOAD_S <= serve("second") < LOAD_S + 30.0
        assert shelf.faults.num_injected == 1, "nothing was loaded, so nothing was shown"
        shelf.faults.end()
        serve("third")
        assert engine.stage("transfer").transfers.num_loaded == 1
    finally:
        engine.close()
        pair.worker.close()
