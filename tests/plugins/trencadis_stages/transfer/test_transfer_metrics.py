"""What operators see of KV transfers is what the engine's books say, at any time and not only after a step."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from support.kv.wild_connector import WildConnector
from trencadis.clock import SimulatedClock
from trencadis.engine.engine import Engine
from trencadis.records import Request, SamplingParams
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend

PREFIX = "trencadis_transfer_"


def shown(engine: Engine) -> dict[str, float]:
    """Return every metric of transfers by its name, with the end behind it."""
    return {
        sample.name.removeprefix(PREFIX) + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for metric in text_string_to_metric_families(engine.metrics())
        for sample in metric.samples
        if metric.name.startswith(PREFIX)
    }


def request(name: str) -> Request:
    return Request(request_id=name, prompt_token_ids=range(1, 21), params=SamplingParams(max_tokens=8))


def test_loads_are_counted_from_their_beginning_to_whatever_their_end_is() -> None:
    wild, clock = WildConnector(), SimulatedClock()
    engine = make_engine(connector=wild.pair(), clock=clock, prefix_caching=False, backend=FakeBackend(eos=-1))
    for name in ("first", "kick"):
        engine.add(request(name))
        while name in engine.inspect().sequences:
            engine.step()
            for transfer_id in list(wild.loads):
                wild.arrive(transfer_id)
    engine.step()
    start = shown(engine)
    for name in ("whole", "broken", "aborted"):
        engine.add(request(name))
        engine.step()
    whole, broken, aborted = sorted(wild.loads)
    assert shown(engine)["loads_total"] - start["loads_total"] == 3
    assert (shown(engine)["waiting_sequences"], shown(engine)["pinned_blocks"]) == (3, 0)
    wild.arrive(whole)
    wild.fail(broken, num_valid=1)
    engine.abort("aborted")
    assert shown(engine)["pinned_blocks"] == 4, "without a step, too"
    wild.repeat(4711)
    for _ in range(3):
        engine.step()
    wild.release(aborted)
    drain(engine)
    end = shown(engine)
    names = ("ended_loads_total loaded", "ended_loads_total failed", "ended_loads_total cancelled")
    assert [end[name] - start[name] for name in names] == [1, 1, 1]
    assert (end["waiting_sequences"], end["pinned_blocks"], end["ignored_reports_total"]) == (0, 0, 2)
    assert end["connector_on"] == 1


def test_hits_that_are_not_used_and_calls_that_raise_are_counted() -> None:
    wild = WildConnector()
    engine = make_engine(connector=wild.pair(), backend=FakeBackend(eos=-1), clock=SimulatedClock())
    engine.add(request("first"))
    drain(engine)
    wild.claims = 4
    engine.add(request("second"))
    drain(engine)
    assert shown(engine)["unused_hits_total"] == 1
    wild.raising = {"lookup", "on_computed", "on_finished"}
    for number in range(3):
        engine.add(request(f"third {number}"))
        drain(engine)
    assert shown(engine)["connector_errors_total"] >= 3
    assert shown(engine)["connector_on"] == 1, "it was right in between"
    engine.close()
    assert shown(engine)["connector_on"] == 0


def test_engine_without_a_connector_shows_nothing_of_it() -> None:
    assert shown(make_engine()) == {}
