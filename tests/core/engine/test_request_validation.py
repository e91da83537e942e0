"""Who is turned away, and who hears of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from trencadis.engine.engine import Engine
from trencadis.errors import InvalidRequestError, PromptTooLongError, RequestRefusedError
from trencadis.records import FinishReason, Request, SamplingParams
from trencadis_testing.doubles import LoopConnector
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend

PARAMS = {"from": "elsewhere"}


class Told(LoopConnector):
    """Remembers what it is told of requests that carry parameters, and answers with the id of those that ended well."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rejected: list[Mapping[str, Any]] = []
        self.scheduler.finished_params = lambda request: {"held for": request.request_id}  # type: ignore[method-assign]
        self.scheduler.on_rejected = self.rejected.append  # type: ignore[method-assign]


def engine_of(told: Told, **options: Any) -> Engine:
    return make_engine(connector=told.pair(), backend=FakeBackend(eos=-1, max_model_len=32), **options)


def request(name: str = "r", num_tokens: int = 10, **more: Any) -> Request:
    given: dict[str, Any] = {"params": SamplingParams(max_tokens=4), "transfer_params": PARAMS, **more}
    return Request(request_id=name, prompt_token_ids=tuple(range(1, num_tokens + 1)), **given)


def test_request_that_is_refused_is_told_to_the_connector_whatever_the_reason() -> None:
    told = Told()
    engine = engine_of(told, tenants={"capped": {"max_waiting": 1}})
    with pytest.raises(PromptTooLongError):
        engine.add(request(num_tokens=40))
    engine.add(request("first", transfer_params=None, tenant="capped"))
    with pytest.raises(InvalidRequestError):
        engine.add(request("first"))
    with pytest.raises(RequestRefusedError):
        engine.add(request("second", tenant="capped"))
    assert told.rejected == [PARAMS] * 3


def test_request_that_is_given_up_before_it_was_looked_up_is_told_and_later_ones_are_not() -> None:
    told = Told()
    engine = engine_of(told)
    engine.add(request("early"))
    engine.abort("early")
    assert told.rejected == [PARAMS]
    engine.add(request("late"))
    engine.step()
    engine.abort("late")
    assert told.rejected == [PARAMS]


def test_request_that_was_never_sent_to_the_engine_is_told_by_a_question() -> None:
    told = Told()
    assert engine_of(told).answer("reject_transfer", {"transfer_params": PARAMS}) == {}
    assert told.rejected == [PARAMS]


def test_parameters_of_a_finished_request_come_with_its_end() -> None:
    told = Told(holds=True)
    engine = engine_of(told)
    engine.add(request())
    assert drain(engine)["r"].transfer_params == {"held for": "r"}


def test_what_was_aborted_is_not_held_and_says_nothing() -> None:
    told = Told(holds=True)
    engine = engine_of(told)
    engine.add(request())
    engine.step()
    end = engine.abort("r")
    assert end is not None
    assert (end.finish_reason, end.transfer_params) == (FinishReason.ABORT, None)
    assert engine.inspect().stages["transfer"].num_pinned_blocks == 0
    drain(engine)


def test_connector_that_raises_costs_nothing() -> None:
    told = Told(holds=True)

    def fails(_: Any) -> Any:
        raise RuntimeError("planted")

    told.scheduler.finished_params = told.scheduler.on_rejected = fails  # type: ignore[method-assign]
    engine = engine_of(told)
    engine.add(request())
    assert drain(engine)["r"].transfer_params is None
    with pytest.raises(PromptTooLongError):
        engine.add(request(num_tokens=40))


def test_handover_without_a_connector_is_warned_of_once_and_served(caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(backend=FakeBackend(eos=-1, max_model_len=32))
    for name in ("a", "b"):
        engine.add(request(name, transfer_params={"do_remote_decode": True, "do_remote_prefill": False}))
    (warning,) = [one.getMessage() for one in caplog.records if one.name == "trencadis.engine"]
    assert "do_remote_decode, which has no effect: this engine has no KV connector" in warning
    assert set(drain(engine)) == {"a", "b"}
