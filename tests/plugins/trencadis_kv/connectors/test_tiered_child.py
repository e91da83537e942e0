from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.kv.tiered_children import RaisingScheduler, ScriptedScheduler
from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigValueError
from trencadis.interfaces import Lookup
from trencadis.records import Request
from trencadis_kv.connectors.tiered.child import Child, TierCounters, merged
from trencadis_kv.store.breaker import Breaker

NEAR = """# HELP trencadis_kv_lookups_total Look-ups.
# TYPE trencadis_kv_lookups_total counter
trencadis_kv_lookups_total{connector="a",result="hit"} 3.0
# HELP trencadis_kv_load_seconds Loads.
# TYPE trencadis_kv_load_seconds histogram
trencadis_kv_load_seconds_bucket{le="1.0"} 2.0
trencadis_kv_load_seconds_bucket{le="+Inf"} 2.0
trencadis_kv_load_seconds_count 2.0
trencadis_kv_load_seconds_sum 0.5
"""
FAR = NEAR.replace("3.0", "7.0").replace('connector="a",', "")


def _samples(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_children_with_the_same_metrics_are_told_apart_by_a_label():
    text = merged({"near": NEAR, "far": FAR, "silent": ""})
    samples = _samples(text)
    assert samples[("trencadis_kv_lookups_total", ("connector", "a"), ("result", "hit"), ("tier", "near"))] == 3.0
    assert samples[("trencadis_kv_lookups_total", ("result", "hit"), ("tier", "far"))] == 7.0
    assert samples[("trencadis_kv_load_seconds_bucket", ("le", "1.0"), ("tier", "far"))] == 2.0
    assert len(samples) == len(_samples(NEAR)) + len(_samples(FAR))
    assert text.count("# TYPE trencadis_kv_lookups_total counter") == 1
    assert text.count("# HELP trencadis_kv_load_seconds ") == 1


def test_a_text_that_cannot_be_read_is_left_out_with_a_warning(caplog):
    text = merged({"near": NEAR, "broken": "trencadis{ 1 2 3 what"})
    assert len(_samples(text)) == len(_samples(NEAR))
    assert "The metrics of the KV connector broken cannot be read." in caplog.text


def test_counters_are_shown_by_tier():
    counters = TierCounters()
    counters.watch("near", lambda: 2.0)
    counters.looked_up("near", "hit")
    counters.looked_up("near", "hit")
    counters.ended("near", "failed")
    counters.promoted("near", 5)
    assert counters.value("lookups_total", tier="near", result="hit") == 2
    assert counters.value("lookups_total", tier="near", result="miss") == 0
    samples = _samples(counters.text())
    assert samples[("trencadis_kv_tier_loads_total", ("result", "failed"), ("tier", "near"))] == 1
    assert samples[("trencadis_kv_tier_promoted_blocks_total", ("tier", "near"))] == 5
    assert samples[("trencadis_kv_tier_state", ("tier", "near"))] == 2


REQUEST = Request(request_id="r", prompt_token_ids=(1, 2, 3))


class Scene:
    def __init__(self, side):
        self.clock, self.counters, self.side = SimulatedClock(), TierCounters(), side
        breaker = Breaker(self.clock, name="x", failure_limit=3, failure_window_s=30.0, cooldown_s=5.0)
        self.child = Child("x", side, breaker=breaker, counters=self.counters, probe_s=0.5)

    def lookup(self):
        return self.child.lookup(REQUEST, block_hashes=[b"1"], num_local_tokens=0)

    def count(self, result):
        return self.counters.value("lookups_total", tier="x", result=result)

    @property
    def state(self):
        return self.counters.value("state", tier="x")


def test_a_look_up_that_raises_is_a_miss_and_counted():
    scene = Scene(RaisingScheduler())
    assert scene.lookup() == Lookup()
    assert scene.count("raised") == 1


def test_approximate_answer_is_declined():
    """What it loads is not what the other children have under the same hashes."""

    class Near(ScriptedScheduler):
        def lookup(self, request, **given):
            return Lookup(num_tokens=4, transfer_id=1, approximate=True)

    scene = Scene(Near())
    assert scene.lookup() == Lookup()
    assert (scene.count("declined"), scene.count("hit")) == (1, 0)


def test_one_that_keeps_raising_is_left_alone_and_asked_once_in_a_while():
    scene = Scene(RaisingScheduler())
    for _ in range(3):
        assert scene.child.can_look_up()
        scene.lookup()
    assert not scene.child.can_look_up()
    assert not scene.child.is_used
    assert scene.state == 2
    scene.clock.advance(5.0)
    assert scene.child.can_look_up()
    assert not scene.child.can_look_up(), "only one question tries it"
    scene.lookup()
    assert not scene.child.can_look_up(), "the trial raised"
    assert scene.count("skipped") == 3


def test_one_that_answers_again_is_used_again():
    scene = Scene(ScriptedScheduler())
    for _ in range(3):
        scene.child.timed_out()
    assert not scene.child.is_used
    scene.clock.advance(5.0)
    assert scene.child.can_look_up()
    scene.lookup()
    assert scene.child.is_used
    assert (scene.count("timeout"), scene.count("miss")) == (3, 1)


def test_a_trial_that_nobody_finished_is_no_answer():
    """The request was aborted, or had enough from another child."""
    scene = Scene(ScriptedScheduler())
    for _ in range(3):
        scene.child.timed_out()
    scene.clock.advance(5.0)
    assert scene.child.can_look_up()
    scene.clock.advance(0.6)
    assert not scene.child.can_look_up()
    scene.clock.advance(5.0)
    assert scene.child.can_look_up()


@pytest.mark.parametrize(
    ("cause", "num_valid_tokens", "counts"),
    [
        ("unreachable", 0, True),
        ("unreachable", 16, True),
        ("deadline", 0, True),
        ("corrupt", 0, True),
        ("evicted", 0, False),
        ("incompatible", 0, False),
        ("full", 0, False),
        ("gone fishing", 0, True),
        ("gone fishing", 16, False),
    ],
)
def test_failed_loads_count_unless_they_are_everyday_life(cause, num_valid_tokens, counts):
    scene = Scene(ScriptedScheduler())
    for _ in range(3):
        scene.child.failed(cause, num_valid_tokens=num_valid_tokens)
    assert scene.child.is_used != counts
    assert scene.counters.value("loads_total", tier="x", result="failed") == 3


def test_loads_are_predicted_from_those_that_arrived():
    scene = Scene(ScriptedScheduler())
    for num_tokens in (100, 200):
        scene.child.loaded(num_tokens=num_tokens, seconds=0.001 * num_tokens)
    assert scene.child.load_s.at(400) == pytest.approx(0.4)


def test_one_that_raises_where_blocks_are_at_stake_is_closed():
    side = ScriptedScheduler()
    scene = Scene(side)

    def fail(side):
        raise RuntimeError("half done")

    assert not scene.child.call_or_close("on_allocated", fail)
    assert scene.child.is_closed
    assert scene.state == 3
    assert ("close",) in side.told
    assert not scene.child.call_or_close("on_cancelled", lambda side: side.on_cancelled(1))
    assert scene.child.call("take_message", lambda side: b"x", b"") == b""
    assert not scene.child.can_look_up()


def test_one_that_is_not_ready_is_closed_unless_it_is_required():
    class NotReady(ScriptedScheduler):
        error = OSError("no disk")

        def on_ready(self, layout):
            raise self.error

    scene = Scene(NotReady())
    scene.child.ready(None)
    assert scene.child.is_closed
    NotReady.error = ConfigValueError("no such server")
    with pytest.raises(ConfigValueError, match="no such server"):
        Scene(NotReady()).child.ready(None)


def test_a_close_that_raises_is_contained():
    Scene(RaisingScheduler()).child.close()
