from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.core.remote_parts import AtMostTwo
from trencadis.errors import (
    EngineEndedError,
    InternalError,
    InvalidRequestError,
    PromptTooLongError,
    RequestRefusedError,
)
from trencadis.interfaces import SchedulingPolicy
from trencadis.records import EmbeddingRequest, FinishReason, Request, SamplingParams
from trencadis_remote.process.client import RequestHandles
from trencadis_testing.fakes import fake_embedding

PROMPT = (5, 6, 7)


def request(name: str, num_tokens: int = 5, **more: Any) -> Request:
    params = {"max_tokens": num_tokens, **more.pop("params", {})}
    return Request(**{"request_id": name, "prompt_token_ids": PROMPT, "params": SamplingParams(**params), **more})


def endings(outputs: list[Any]) -> dict[str, FinishReason]:
    return {finished.request_id: finished.finish_reason for deltas in outputs for finished in deltas.finished}


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"prompt_token_ids": ()}, InvalidRequestError),
        ({"prompt_token_ids": (4096,)}, InvalidRequestError),
        ({"prompt_token_ids": (2**40,)}, InvalidRequestError),
        ({"prompt_token_ids": (5,) * 1024}, PromptTooLongError),
        ({"params": {"stop_token_ids": [4096]}}, InvalidRequestError),
    ],
)
def test_what_can_be_known_here_is_refused_at_once(
    open_line: Callable[..., Any], bad: dict[str, Any], error: type[Exception]
) -> None:
    line = open_line()
    with pytest.raises(error):
        line.client.add(request("a", **bad))
    assert not line.client.has_work
    assert not line.client.has_work


def test_a_live_id_is_refused_until_its_end_has_come(open_line: Callable[..., Any]) -> None:
    line = open_line()
    line.client.add(request("a"))
    with pytest.raises(InvalidRequestError, match="live already"):
        line.client.add(request("a"))
    with pytest.raises(InvalidRequestError, match="live already"):
        line.client.embed(EmbeddingRequest(request_id="a", token_ids=(1,)))
    line.settle()
    line.client.add(request("a"))
    assert endings(line.settle()) == {"a": FinishReason.LENGTH}


class NotC(SchedulingPolicy):
    """Refuses by name: how many wait when a request arrives depends on who was quicker."""

    def admit(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        return "nobody serves c" if request.request_id == "c" else ""


def test_a_refusal_of_the_engine_comes_with_its_class_and_words(open_line: Callable[..., Any]) -> None:
    line = open_line(policy=NotC())
    for name in "abc":
        line.client.add(request(name))
    line.settle()
    ((name, error),) = line.refused
    assert name == "c"
    assert type(error) is RequestRefusedError
    assert "nobody serves c" in str(error)
    assert not line.client.has_outputs
    assert (line.client.has_work, line.worker.num_live) == (False, 0)


def test_an_abort_is_answered_with_what_there_is(open_line: Callable[..., Any]) -> None:
    line = open_line()
    line.client.add(request("a", 500))
    line.client.add(request("b", 500))
    while not line.client.step(timeout_s=0.01).slots:
        line.worker.turn()
    assert line.client.abort("a") is None
    assert line.client.stop("b") is None
    line.client.abort("a")
    line.client.abort("nobody")
    ends = [end for deltas in line.settle() for end in deltas.finished]
    assert {end.request_id: end.finish_reason for end in ends} == {"a": FinishReason.ABORT, "b": FinishReason.STOP}
    assert all(0 < len(end.token_ids) < 500 for end in ends)
    assert (line.client.has_work, line.worker.num_live) == (False, 0)


def test_texts_are_embedded_and_bad_ones_refused(open_line: Callable[..., Any]) -> None:
    line = open_line()
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        line.client.embed(EmbeddingRequest(request_id="x", token_ids=(2**40,)))
    line.client.embed(EmbeddingRequest(request_id="a", token_ids=(5, 6)))
    line.client.embed(EmbeddingRequest(request_id="empty", token_ids=()))
    (embedding,) = [one for deltas in line.settle() for one in deltas.embeddings]
    assert embedding.request_id == "a"
    assert embedding.vector == pytest.approx(np.array(fake_embedding([5, 6]), np.float32))
    ((name, error),) = line.refused
    assert (name, type(error)) == ("empty", InvalidRequestError)


def test_after_its_end_nothing_can_be_asked_and_closing_is_harmless(open_line: Callable[..., Any]) -> None:
    line = open_line()
    line.client.add(request("a", 500))
    line.peer.end()
    for _ in range(2):
        with pytest.raises(EngineEndedError, match="ended in a test"):
            line.client.step()
    with pytest.raises(EngineEndedError):
        line.client.add(request("b"))
    with pytest.raises(EngineEndedError):
        line.client.request_metrics(lambda text: None)
    assert line.client.abort("a") is None
    line.client.interrupt()
    line.client.close()
    line.client.close()
    line.client.interrupt()
    assert line.peer.was_closed


MOVES = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 12)),
    st.tuples(st.sampled_from(["abort", "stop", "embed", "drop"]), st.integers(0, 40)),
    st.tuples(st.sampled_from(["client", "host"]), st.just(0)),
)


@settings(
    phases=[Phase.explicit, Phase.generate],
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(moves=st.lists(MOVES, max_size=60), refuses=st.booleans())
def test_whatever_the_order_of_requests_aborts_and_steps_nothing_is_left(
    open_line: Callable[..., Any], moves: list[tuple[str, int]], refuses: bool
) -> None:
    options = {"policy": AtMostTwo()} if refuses else {}
    line = open_line(**options)
    num_added, ended = 0, []
    for move, number in moves:
        match move:
            case "add":
                line.client.add(request(f"r{num_added}", number))
                num_added += 1
            case "abort":
                line.client.abort(f"r{number}")
            case "stop":
                line.client.stop(f"r{number}")
            case "embed" if f"e{number}" not in line.client._embedding:
                line.client.embed(EmbeddingRequest(request_id=f"e{number}", token_ids=(5, 6)))
            case "drop":
                line.client.abort(f"e{number}")
            case "client":
                outputs = line.client.step(timeout_s=0.0)
                ended += [end.request_id for end in outputs.finished]
                line.refused.extend(outputs.refused)
            case "host":
                line.worker.turn()
    ended += [end.request_id for deltas in line.settle() for end in deltas.finished]
    ended += [name for name, _ in line.refused if name.startswith("r")]
    assert sorted(ended) == sorted(f"r{number}" for number in range(num_added))
    assert (line.client.has_work, line.worker.num_live) == (False, 0)
    assert not line.engine.has_work
    assert line.engine._state.blocks.num_used == 0


def test_questions_are_answered_in_their_order_each_with_its_own_answer_or_error(open_line: Callable[..., Any]) -> None:
    line = open_line()
    answers: list[Any] = []
    line.client.control("nonsense", {}, answers.append)
    line.client.control("scheduling", {}, answers.append)
    with pytest.raises(InvalidRequestError, match="request_id is of the type object"):
        line.client.control("explain", {"request_id": object()}, answers.append)
    line.settle()
    error, answer = answers
    assert isinstance(error, InvalidRequestError)
    assert answer["quarantined"] == []


POISONS: list[tuple[dict[str, Any], str]] = [
    ({"params": {"logits_processors": {"x": {"a": 10**30}}}}, "logits_processors"),
    ({"params": {"logits_processors": {"x": {"a": [1, "\ud800"]}}}}, "logits_processors"),
    ({"params": {"logits_processors": {"x": {"a": object()}}}}, "logits_processors"),
    ({"params": {"logits_processors": {"\ud800": {}}}}, "logits_processors"),
    ({"params": {"top_k": 10**30}}, "top_k"),
    ({"params": {"ignore_eos": 10**30}}, "ignore_eos"),
    ({"params": {"stop": ["\ud800"]}}, "stop"),
    ({"tenant": "\ud800"}, "tenant"),
    ({"cache_salt": "\ud800"}, "cache_salt"),
    ({"transfer_params": {"a": 10**30}}, "transfer_params"),
    ({"transfer_params": {"a": "\ud800"}}, "transfer_params"),
]


@pytest.mark.parametrize("skips_checks", [False, True], ids=["at the door", "when it is sent"])
@pytest.mark.parametrize(("poison", "field"), POISONS, ids=lambda value: ascii(value)[:60])
def test_a_value_that_cannot_be_sent_is_refused_alone_and_named(
    open_line: Callable[..., Any], poison: dict[str, Any], field: str, skips_checks: bool
) -> None:
    line = open_line()
    line.client.add(request("before"))
    attrs.validators.set_disabled(skips_checks)
    try:
        with pytest.raises(InvalidRequestError) as caught:
            line.client.add(request("bad", **poison))
    finally:
        attrs.validators.set_disabled(False)
    assert caught.value.field == field
    line.client.add(request("bad"))  # the id is free again
    assert set(endings(line.settle())) == {"before", "bad"}
    assert (line.client.has_work, line.worker.num_live) == (False, 0)


def test_numbers_of_numpy_are_sent_as_numbers(open_line: Callable[..., Any]) -> None:
    line = open_line()
    line.client.add(request("a", params={"temperature": np.float64(0.5), "logit_bias": {np.int64(3): np.float32(1)}}))
    assert set(endings(line.settle())) == {"a"}


@pytest.mark.parametrize(
    "answer", [{"a": 10**30}, {"a": ["\ud800"]}, {"a": object()}], ids=["number", "text", "object"]
)
def test_an_answer_that_cannot_be_sent_becomes_an_error_and_the_engine_goes_on(
    open_line: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    line = open_line()
    answers: list[Any] = []
    monkeypatch.setattr(line.engine, "answer", lambda name, arguments: answer)
    line.client.control("scheduling", {}, answers.append)
    line.client.add(request("after"))
    assert set(endings(line.settle())) == {"after"}
    assert isinstance(answers[0], InternalError)


def test_the_smallest_free_number_is_given() -> None:
    handles = RequestHandles()
    assert [handles.take() for _ in range(4)] == [0, 1, 2, 3]
    handles.give_back(2)
    handles.give_back(0)
    assert handles.num_taken == 2
    assert [handles.take() for _ in range(3)] == [0, 2, 4]
    assert handles.num_taken == 5
