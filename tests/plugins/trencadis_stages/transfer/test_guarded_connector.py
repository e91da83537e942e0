"""Nothing that a scheduler side raises gets out; one that keeps raising is asked no more, and still told what it must release."""

from __future__ import annotations

import logging

import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import PluginLoadError
from trencadis.faults import CallMeter
from trencadis.interfaces import (
    KVSchedulerSide,
    KVWorkerSide,
    Lookup,
    SupportsHandover,
    SupportsLayerwise,
    SupportsMetrics,
    SupportsRemotePrefill,
    SupportsStepTimes,
)
from trencadis.records import ConnectorReport, FailedLoad, Request
from trencadis_stages.transfer.guarded_connector import GuardedConnector, GuardedWorker

REQUEST = Request(request_id="r", prompt_token_ids=(1, 2, 3))
FAILED = FailedLoad(transfer_id=1, num_valid_tokens=0, cause="evicted")
HASHES = (b"h" * 32,)


class Scripted(KVSchedulerSide, SupportsStepTimes, SupportsMetrics):
    """Raises from the methods named in ``raising``; notes every call."""

    def __init__(self, *raising: str, answer: str = "retry") -> None:
        self.raising = set(raising)
        self.calls: list[str] = []
        self.answer = answer

    def _called(self, name, result=None):
        self.calls.append(name)
        if name in self.raising:
            raise RuntimeError(f"{name} is broken")
        return result

    def lookup(self, request, *, block_hashes, num_local_tokens):
        return self._called("lookup", Lookup(num_tokens=4, transfer_id=1))

    def on_allocated(self, transfer_id, *, blocks, block_hashes):
        self._called("on_allocated")

    def on_unused(self, transfer_id):
        self._called("on_unused")

    def on_computed(self, *, blocks, block_hashes):
        self._called("on_computed")

    def on_finished(self, request, *, blocks):
        return self._called("on_finished", 7)

    def on_cancelled(self, transfer_id):
        self._called("on_cancelled")

    def on_failed(self, request, failed):
        return self._called("on_failed", self.answer)

    def take_message(self):
        return self._called("take_message", b"message")

    def on_report(self, report):
        self._called("on_report")

    def on_step(self, *, num_tokens, device_s):
        self._called("on_step")

    def metrics(self):
        return self._called("metrics", "text")

    def close(self):
        self._called("close")


CALLS = {
    "lookup": (
        lambda guard: guard.lookup(REQUEST, block_hashes=HASHES, num_local_tokens=0, is_used=lambda _: False),
        Lookup(num_tokens=4, transfer_id=1),
        Lookup(),
    ),
    "on_allocated": (lambda guard: guard.on_allocated(1, blocks=[1], block_hashes=HASHES), True, False),
    "on_unused": (lambda guard: guard.on_unused(1), True, False),
    "on_computed": (lambda guard: guard.on_computed(blocks=[1], block_hashes=HASHES), True, False),
    "on_finished": (lambda guard: guard.on_finished(REQUEST, blocks=[1]), 7, None),
    "on_cancelled": (lambda guard: guard.on_cancelled(1), True, False),
    "on_failed": (lambda guard: guard.on_failed(REQUEST, FAILED), True, False),
    "take_message": (lambda guard: guard.take_message(), b"message", b""),
    "on_report": (lambda guard: guard.on_report(ConnectorReport()), True, False),
    "on_step": (lambda guard: guard.on_step(num_tokens=1, device_s=0.1), True, False),
}
TOLD_WHEN_OFF = {"on_cancelled", "take_message", "on_report", "on_unused"}


@pytest.mark.representatives(100)
@pytest.mark.parametrize("name", CALLS)
def test_answer_is_the_sides_own_and_what_raises_is_a_miss_and_is_logged(name, caplog) -> None:
    call, answer, otherwise = CALLS[name]
    side = Scripted()
    guard = GuardedConnector(side)
    assert call(guard) == answer
    assert (side.calls, guard.num_errors) == ([name], 0)
    side.raising = {name}
    assert call(guard) == otherwise
    assert (guard.num_errors, guard.is_off) == (1, False)
    assert f"the KV connector raised RuntimeError: {name} is broken in {name}(); counted as a miss." in caplog.text


@pytest.mark.parametrize("name", CALLS)
def test_third_error_in_a_row_switches_it_off(name, caplog) -> None:
    call, _, otherwise = CALLS[name]
    side = Scripted(name)
    guard = GuardedConnector(side)
    for _ in range(2):
        call(guard)
    assert not guard.is_off
    with caplog.at_level(logging.ERROR):
        call(guard)
    assert guard.is_off
    assert "switched off for 60 s; serving goes on without it" in caplog.text
    side.raising.clear()
    side.calls.clear()
    for other, (call, answer, otherwise) in CALLS.items():
        assert call(guard) == (answer if other in TOLD_WHEN_OFF else otherwise)
    assert set(side.calls) == TOLD_WHEN_OFF


def test_a_side_that_was_switched_off_is_asked_again_after_a_while_and_not_once_it_is_closed(caplog) -> None:
    clock, side = SimulatedClock(), Scripted("lookup")
    guard = GuardedConnector(side, meter=CallMeter("c", clock=clock))
    call, answer, otherwise = CALLS["lookup"]
    for _ in range(3):
        call(guard)
    assert guard.is_off
    side.raising.clear()
    clock.advance(59.0)
    assert call(guard) == otherwise
    clock.advance(2.0)
    assert call(guard) == answer
    assert not guard.is_off
    assert "is asked again" in caplog.text
    guard.close()
    assert guard.is_off
    assert call(guard) == otherwise


def test_call_that_works_in_between_forgives() -> None:
    side = Scripted("on_step")
    guard = GuardedConnector(side)
    for _ in range(5):
        for _ in range(2):
            guard.on_step(num_tokens=1, device_s=0.1)
        guard.on_report(ConnectorReport())
    assert guard.num_errors == 10
    assert not guard.is_off


def test_transfer_id_that_is_in_use_breaks_the_contract() -> None:
    guard = GuardedConnector(Scripted())
    found = guard.lookup(REQUEST, block_hashes=HASHES, num_local_tokens=0, is_used=lambda transfer_id: transfer_id == 1)
    assert found == Lookup()
    assert guard.num_errors == 1


@pytest.mark.parametrize("found", [Lookup(pending=True, transfer_id=1), Lookup(transfer_id=1)])
def test_transfer_id_means_nothing_where_there_is_no_hit(found, monkeypatch) -> None:
    side = Scripted()
    monkeypatch.setattr(side, "lookup", lambda *_, **__: found)
    guard = GuardedConnector(side)
    assert guard.lookup(REQUEST, block_hashes=HASHES, num_local_tokens=0, is_used=lambda _: True) is found
    assert guard.num_errors == 0


def test_metrics_and_close_may_raise_too(caplog) -> None:
    side = Scripted("metrics", "close")
    guard = GuardedConnector(side)
    assert guard.metrics() == ""
    guard.close()
    guard.close()
    assert guard.is_off
    assert side.calls == ["metrics", "close", "close"]
    assert "metrics is broken in metrics()" in caplog.text
    assert "close is broken in close()" in caplog.text


def test_metrics_that_are_no_text_are_none(caplog, monkeypatch) -> None:
    """As of a library that returns bytes: whoever scrapes gets the rest, and serving goes on."""
    for text in (b"trencadis_mine 1\n", None, {}, 3):
        monkeypatch.setattr(Scripted, "metrics", lambda self, text=text: text)
        assert GuardedConnector(Scripted()).metrics() == ""
        assert f"metrics() returned {type(text).__name__}, which is no text" in caplog.text


def test_metrics_are_the_sides_own_even_when_it_is_off() -> None:
    guard = GuardedConnector(Scripted())
    guard.close()
    assert guard.metrics() == "text"


class Brings(Scripted, SupportsHandover, SupportsRemotePrefill):
    """Has requests of other engines."""

    def on_backlog(self, num_tokens):
        self._called("on_backlog")

    def on_abandoned(self, request):
        self._called("on_abandoned")

    def on_role(self, role):
        self._called("on_role")

    def on_waker(self, wake):
        self._called("on_waker")

    def take_requests(self):
        return self._called("take_requests", [REQUEST])

    def take_withdrawn(self):
        return self._called("take_withdrawn", ["r"])

    def on_request_ended(self, request_id, *, transfer_params, error):
        self._called("on_request_ended")


def bring(guarded: GuardedConnector) -> tuple[tuple[Request, ...], tuple[str, ...]]:
    handover, remote = guarded.handover, guarded.remote_prefill
    assert handover is not None
    assert remote is not None
    handover.on_abandoned(REQUEST)
    handover.on_role("both")
    remote.on_waker(print)
    remote.on_backlog(5)
    remote.on_request_ended("r", transfer_params=None, error="")
    return tuple(remote.take_requests()), tuple(remote.take_withdrawn())


def test_requests_of_other_engines_pass_and_what_raises_brings_none():
    assert bring(GuardedConnector(Brings())) == ((REQUEST,), ("r",))
    for name in ("take_requests", "take_withdrawn", "on_abandoned", "on_role", "on_waker", "on_backlog"):
        guarded = GuardedConnector(Brings(name))
        requests, withdrawn = bring(guarded)
        assert guarded.num_errors == 1
        assert (bool(requests), bool(withdrawn)) == tuple(name != one for one in ("take_requests", "take_withdrawn"))


def test_a_capability_that_the_side_does_not_inherit_is_not_there():
    """A method of that name is not enough: it may be the author's own."""

    class Plain(Scripted):
        on_layerwise = on_role = take_requests = Scripted.on_unused

    guarded = GuardedConnector(Plain())
    assert (guarded.handover, guarded.remote_prefill, guarded.is_layerwise) == (None, None, False)
    assert not guarded.on_layerwise(1)
    assert guarded.num_errors == 0
    assert guarded.is_timed


@pytest.mark.parametrize(("answer", "again"), [("retry", True), ("compute", False)])
def test_failed_load_is_computed_unless_retry_is_the_answer(answer, again) -> None:
    assert GuardedConnector(Scripted(answer=answer)).on_failed(REQUEST, FAILED) is again


@pytest.mark.parametrize("found", [None, Lookup(num_tokens=-4, transfer_id=1)])
def test_an_answer_against_the_law_is_a_miss(found, caplog, monkeypatch) -> None:
    side = Scripted()
    monkeypatch.setattr(side, "lookup", lambda *_, **__: found)
    guard = GuardedConnector(side, label="connector c of p 1.0")
    assert guard.lookup(REQUEST, block_hashes=HASHES, num_local_tokens=0, is_used=lambda _: False) == Lookup()
    assert guard.num_errors == 1
    assert "connector c of p 1.0 raised" in caplog.text


def test_a_report_against_the_law_is_none(caplog) -> None:
    assert GuardedWorker(Worker(ConnectorReport(failed=(1,)))).poll() == ConnectorReport()  # type: ignore[arg-type] # what the contract forbids
    assert "raised ContractError" in caplog.text


def test_layers_are_announced_to_a_side_that_has_them():
    class Layers(Scripted, SupportsLayerwise):
        def on_layerwise(self, transfer_id):
            self._called("on_layerwise")

    assert GuardedConnector(Layers()).on_layerwise(1)
    assert not GuardedConnector(Layers("on_layerwise")).on_layerwise(1)


class Worker(KVWorkerSide):
    """Raises, or answers with what it is given."""

    def __init__(self, does) -> None:
        self.does = does

    def _do(self):
        if isinstance(self.does, BaseException):
            raise type(self.does)(*self.does.args)  # the same one would carry the traceback of every time before
        return self.does

    def register(self, kv_cache):
        self._do()

    def expect_layers(self):
        self._do()

    def begin_step(self, message):
        self._do()

    @property
    def wants_layers(self):
        return self._do()

    def wait_layer(self, layer, *, budget_s):
        return self._do()

    def end_step(self):
        self._do()

    def poll(self):
        return self._do()

    def close(self):
        self._do()


WORKER_CALLS = {
    "expect_layers": (lambda worker: worker.expect_layers(), None),
    "begin_step": (lambda worker: worker.begin_step(b""), None),
    "wants_layers": (lambda worker: worker.wants_layers, False),
    "wait_layer": (lambda worker: worker.wait_layer(0, budget_s=0.1), False),
    "end_step": (lambda worker: worker.end_step(), None),
    "poll": (lambda worker: worker.poll(), ConnectorReport()),
    "close": (lambda worker: worker.close(), None),
}


@pytest.mark.parametrize("name", WORKER_CALLS)
@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_what_a_worker_side_raises_ends_there_with_one_traceback(name, error, caplog) -> None:
    call, otherwise = WORKER_CALLS[name]
    worker = GuardedWorker(Worker(error), label="connector c of p 1.0")
    for _ in range(1000):
        assert call(worker) == otherwise
    assert len(caplog.records) == 1
    said = f"connector c of p 1.0 raised {type(error).__name__}: {error} in {name}() of its worker side"
    assert said in caplog.text


def test_a_worker_side_that_cannot_register_ends_the_start_in_words() -> None:
    worker = GuardedWorker(Worker(KeyError("device")), label="connector c of p 1.0")
    with pytest.raises(PluginLoadError, match=r"connector c of p 1.0 raised KeyError: 'device' in register\(\)"):
        worker.register(None)  # type: ignore[arg-type] # it is not looked at
