from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from trencadis.client.control import EngineControl, no_answer
from trencadis.client.dispatcher import ControlRequest
from trencadis.errors import BackendError, InvalidRequestError


class Engine:
    """Answers, or does not."""

    def __init__(self, answer: Callable[[ControlRequest], None]) -> None:
        self.asked: list[ControlRequest] = []
        self._answer = answer

    def send(self, command: ControlRequest) -> None:
        self.asked.append(command)
        self._answer(command)


def ask(
    call: Callable[[EngineControl], Any], answer: Callable[[ControlRequest], None] | None = None
) -> tuple[Any, ControlRequest]:
    engine = Engine(answer or (lambda command: command.future.set_result({"a": 1})))
    result = asyncio.run(call(EngineControl(engine)))
    return result, engine.asked[0]


@pytest.mark.parametrize(
    ("call", "question", "arguments"),
    [
        (lambda q: q.totals(), "totals", {}),
        (lambda q: q.scheduling(), "scheduling", {}),
        (lambda q: q.explain("r"), "explain", {"request_id": "r"}),
        (lambda q: q.change_scheduling({"name": "x"}), "set_scheduling", {"table": {"name": "x"}, "source": "set_scheduling", "may_import": False}),
        (lambda q: q.reject_transfer({"b": 2}), "reject_transfer", {"transfer_params": {"b": 2}}),
    ],
)  # fmt: skip
def test_question_reaches_the_engine_with_its_arguments(
    call: Callable[[EngineControl], Any], question: str, arguments: dict[str, Any]
) -> None:
    result, asked = ask(call)
    assert (asked.name, asked.arguments) == (question, arguments)
    assert result == (None if question == "reject_transfer" else {"a": 1})


def test_only_what_was_given_is_changed() -> None:
    _, asked = ask(lambda q: q.set_scheduling("fcfs", shadow=None))
    assert asked.arguments["table"] == {"name": "fcfs", "shadow": None}


def test_error_of_the_engine_is_raised() -> None:
    with pytest.raises(InvalidRequestError, match="no such request"):
        ask(
            lambda q: q.explain("r"),
            lambda command: command.future.set_exception(InvalidRequestError("no such request")),
        )


def test_engine_that_does_not_answer_is_an_error_in_words() -> None:
    with pytest.raises(BackendError, match=r"did not answer within 0\.01 s"):
        ask(lambda q: q._control("totals", timeout_s=0.01), lambda _: None)
    assert "ask again" in no_answer(1).hint
