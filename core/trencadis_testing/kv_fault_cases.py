"""Suite of fault cases for KV connectors over a store: whatever the store does, it costs cache misses and nothing else.

Each case runs a whole engine on a fake backend, which notices at once if a sequence reads a block with another's content. Of
every case hold: texts are those without a connector, every block is accounted for after every step and comes back, every load
ends once, and requests that the store has nothing to do with are served meanwhile.
"""

from __future__ import annotations

import random
import time

import attrs
import pytest

from trencadis.interfaces import ConnectorPair
from trencadis.records import SamplingParams
from trencadis_testing.kv_faults import CALLS, Fault, Faults
from trencadis_testing.kv_suite import ConnectorSuite, again
from trencadis_testing.workloads import Arrival, arrivals, wrong_texts

__all__ = ["KVFaultConformance"]

_SPOILED = (Fault.FLIPPED, Fault.HEADER, Fault.SWAPPED, Fault.CUT, Fault.EMPTY)
_ABSENT = (Fault.GONE, Fault.REFUSES, Fault.RAISES)
_SAVES = (Fault.FULL, Fault.HALF, Fault.FORGETS, Fault.CUT, Fault.REFUSES, Fault.RAISES)
_SOON_S = 15.0
"""Real time for a few hundred steps and some time-outs, on a machine that has other things to do."""


class KVFaultConformance(ConnectorSuite):
    """What a KV connector over a store must survive; inherit from it, and set ``make``.

    A pair that :func:`trencadis_kv.store.store_connector.store_connector` made needs nothing more. Another one needs ``make_faulty``, or every
    case is skipped. The connector must try to load and save all it can: leave cost models and breakers out of it. Example::

        class TestShelfFaults(KVFaultConformance):
            has_threads = True
            make = make_shelf          # returns a ConnectorPair with a store of its own
    """

    block_size: int = 4
    has_threads: bool = True

    def make_faulty(self, faults: Faults) -> ConnectorPair:
        """Return a new pair whose store is empty, and goes wrong as ``faults`` says."""
        pair = self.make_one(faults)
        if not hasattr(pair, "with_stores"):
            pytest.skip(
                f"{type(self).__name__}: this connector is not made by store_connector, and make_faulty is not overridden"
            )
        return pair

    # ------------------------------------------------------------------------------------- one fault, one engine

    @pytest.mark.parametrize("fault", [*_SPOILED, *_ABSENT])
    def test_object_that_is_not_what_was_saved_is_computed(self, fault: Fault) -> None:
        """Bits, lengths, headers, another block's bytes, or nothing at all: found by the look-up, refused by the load."""
        todo, faults = arrivals(1, num_requests=8), Faults()
        with self.engine(self.make_faulty(faults), prefix_caching=False) as one:
            assert wrong_texts(one.serve(todo), todo) == []
            one.rest()
            faults.begin(fault, calls={"get"})
            after = again(todo)
            assert wrong_texts(one.serve(after), after) == []
            assert faults.num_injected, "nothing was loaded, so that nothing could go wrong"
            assert one.books.causes.total(), f"a store that is {fault} failed no load"

    def test_store_that_claims_what_it_has_not_costs_a_miss(self) -> None:
        """An index may be older than its objects."""
        todo, faults = arrivals(2, num_requests=8), Faults()
        faults.begin(Fault.CLAIMS, calls={"contains"})
        with self.engine(self.make_faulty(faults), prefix_caching=False) as one:
            assert wrong_texts(one.serve(todo), todo) == []
            assert faults.num_injected, "nobody asked the store"

    @pytest.mark.parametrize("fault", _SAVES)
    def test_store_that_does_not_keep_what_it_is_given_costs_a_miss(self, fault: Fault) -> None:
        """Full, forgetful, down, or torn in the middle of an object: also for who asks for the same prompt later."""
        todo, faults = arrivals(3, num_requests=8), Faults()
        with self.engine(self.make_faulty(faults), prefix_caching=False) as one:
            faults.begin(fault, calls={"put"})
            assert wrong_texts(one.serve(todo), todo) == []
            one.rest()
            assert faults.num_injected, "nothing was saved, so that nothing could go wrong"
            faults.end()
            after = again(todo)
            assert wrong_texts(one.serve(after), after) == []

    @pytest.mark.parametrize("call", ["contains", "get", "put"])
    def test_store_that_stalls_holds_nobody_up(self, call: str) -> None:
        """Loads are given up at their deadline, their blocks come back, and what arrives late is not believed."""
        todo, faults = arrivals(4, num_requests=6), Faults()
        with self.engine(self.make_faulty(faults), prefix_caching=False, load_timeout_s=0.3) as one:
            assert wrong_texts(one.serve(todo), todo) == []
            one.rest()
            faults.begin(Fault.STALLS, calls={call})
            start_s = time.monotonic()
            others = [
                Arrival(a.step, attrs.evolve(a.request, request_id=f"new {i}", prompt_token_ids=(50 + i, 7)))
                for i, a in enumerate(todo[::2])
            ]
            both = sorted([*again(todo), *others], key=lambda arrival: arrival.step)
            assert wrong_texts(one.serve(both), both) == []
            assert time.monotonic() - start_s < _SOON_S, f"a store that stalls in {call} stalls the engine"
            faults.end()
            once_more = again(todo, mark="once more")
            assert wrong_texts(one.serve(once_more), once_more) == []

    def test_stalled_store_lets_the_engine_close(self) -> None:
        """Within seconds, whatever the store waits for."""
        todo, faults = arrivals(5, num_requests=4), Faults()
        with self.engine(self.make_faulty(faults), prefix_caching=False, load_timeout_s=0.2) as one:
            one.serve(todo)
            one.rest()
            faults.begin(Fault.STALLS, calls={"get", "put"})
            after = again(todo)
            assert wrong_texts(one.serve(after), after) == []
            faults.begin(Fault.STALLS)
            one.engine.add(attrs.evolve(todo[0].request, request_id="too late"))
            one.engine.step()
            one.settle()
            start_s = time.monotonic()
            one.engine.close()
        assert time.monotonic() - start_s < _SOON_S, "a store that stalls keeps the engine from closing"

    def test_slow_store_changes_no_text(self) -> None:
        """Some loads arrive, some are given up."""
        todo, faults = arrivals(6, num_requests=6), Faults()
        faults.slow_s = 0.02
        with self.engine(self.make_faulty(faults), prefix_caching=False, load_timeout_s=0.5) as one:
            one.serve(todo)
            one.rest()
            faults.begin(Fault.SLOW, every=2)
            after = again(todo)
            assert wrong_texts(one.serve(after), after) == []

    # ---------------------------------------------------------------------------------------- many at once

    @pytest.mark.parametrize("seed", range(2))
    def test_pressure_aborts_and_changing_faults_leave_nothing_behind(self, seed: int) -> None:
        """Preemption in a cache of few blocks, aborts, prompts that share prefixes, and another fault every few steps."""
        rng, faults = random.Random(seed), Faults()
        faults.slow_s = 0.001

        def change() -> None:
            if rng.random() < 0.1:
                faults.begin(rng.choice(list(Fault)), calls=rng.sample(sorted(CALLS), 2), every=rng.choice([1, 2, 3]))

        todo = [
            Arrival(a.step, attrs.evolve(a.request, params=SamplingParams(max_tokens=16, ignore_eos=True)))
            for a in arrivals(7 + seed, num_requests=10, longest=12)
        ]
        with self.engine(
            self.make_faulty(faults), num_blocks=24, eos=-1, load_timeout_s=1.0, prefix_caching=bool(seed)
        ) as one:
            for mark in ("first", "second"):
                part = again(todo, mark=mark)
                served = one.serve(part, abort_every=7, after_step=change)
                assert wrong_texts(served, part, eos=-1) == []
            faults.end()

    @pytest.mark.parametrize("async_scheduling", [True, False])
    def test_shared_prefix_of_requests_waiting_for_kv_survives_a_failed_load(self, *, async_scheduling: bool) -> None:
        """Two prompts with one beginning wait for the same blocks, and both loads break off in the middle."""
        faults, shared = Faults(), tuple(range(1, 22))
        todo = [
            Arrival(0, attrs.evolve(a.request, request_id=f"tail {i}", prompt_token_ids=(*shared, 30 + i, 31 + i)))
            for i, a in enumerate(arrivals(8, num_requests=3))
        ]
        with self.engine(self.make_faulty(faults), prefix_caching=False, async_scheduling=async_scheduling) as one:
            assert wrong_texts(one.serve(todo), todo) == []
            one.rest()
            faults.begin(Fault.GONE, calls={"get"})
            after = again(todo)
            assert wrong_texts(one.serve(after), after) == []
            assert one.books.causes.total(), "no load failed"

    def test_store_that_is_well_again_is_used_again(self) -> None:
        """A fault is no reason to leave a store alone for good."""
        todo, faults = arrivals(9, num_requests=6), Faults()
        with self.engine(self.make_faulty(faults), prefix_caching=False) as one:
            one.serve(todo)
            one.rest()
            faults.begin(Fault.GONE, calls={"get"})
            one.serve(again(todo))
            one.rest()
            faults.end()
            before = one.books.num_loaded
            for number in range(40):
                one.serve(again(todo, mark=str(number)))
                if one.books.num_loaded > before:
                    return
        raise AssertionError("the store is well again, and nothing is loaded from it")
