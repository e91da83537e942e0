"""A conversation with a model: its messages, system prompt and sampling parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs

from trencadis.client.llm import LLM, ClientStream
from trencadis.errors import InvalidRequestError, StepFailedError
from trencadis.records import FinishReason, SamplingParams

__all__ = ["CHAT_DEFAULTS", "Conversation", "check_one_answer"]

CHAT_DEFAULTS = {"max_tokens": 512, "temperature": 0.7, "min_p": 0.1}
"""Where answers of a conversation differ from ``SamplingParams``."""


class Conversation:
    """What was said so far. It is sent whole with each message, so that the prefix cache holds all but the newest of it.

    Args:
        llm: Answers.
        params: How answers are sampled; one text each.
        system: The system prompt; empty: none.

    Attributes:
        params: May be replaced between answers.
        system: The same.
        was_cut: The last answer ended because it had ``max_tokens``.

    Raises:
        InvalidRequestError: The model has no chat template.
    """

    def __init__(self, llm: LLM, params: SamplingParams, *, system: str = "") -> None:
        if not has_template(llm):
            raise InvalidRequestError(
                "this model has no chat template, so it cannot chat.",
                hint='Continue a text instead: trencadis generate "...".',
            )
        self._llm = llm
        self.params = params
        self.system = system
        self.was_cut = False
        self._said: list[dict[str, str]] = []

    @property
    def num_messages(self) -> int:
        """Messages of both sides that the next one follows."""
        return len(self._said)

    def reset(self) -> None:
        """Forget what was said; ``system`` and ``params`` stay."""
        self._said.clear()

    def answer(self, message: str, *, stops: Callable[[], bool] = lambda: False) -> Iterator[str]:
        """Yield the pieces of the answer to a message as they come.

        A message that is refused, fails or is stopped before its answer began was not said.

        Args:
            message: The user's text.
            stops: Asked after each piece; True ends the answer, which counts as far as it came.

        Raises:
            RequestError: The conversation cannot be served: it has become too long, or the template refuses it.
            StepFailedError: The answer failed.
        """
        first = [{"role": "system", "content": self.system}] if self.system else []
        asked = [*self._said, {"role": "user", "content": message}]
        stream = self._llm.stream_chat([*first, *asked], self.params)
        text = ""
        try:
            for piece in pieces_of(stream, stops=stops):
                text += piece.text
                self.was_cut = piece.reason is FinishReason.LENGTH
                yield piece.text
        finally:
            if text.strip():
                self._said = [*asked, {"role": "assistant", "content": text}]


@attrs.frozen
class Piece:
    """What has been added to an answer.

    Attributes:
        text: The new text.
        reason: Why the answer has ended; None: it goes on.
    """

    text: str
    reason: FinishReason | None


def pieces_of(stream: Iterator[Any], *, stops: Callable[[], bool] = lambda: False) -> Iterator[Piece]:
    """Yield what each output of a stream adds; ends the request when it is stopped.

    Raises:
        StepFailedError: The request failed.
    """
    num_given = 0
    for output in stream:
        completion = output.outputs[0]
        if output.error:
            raise StepFailedError(output.error)
        yield Piece(completion.text[num_given:], completion.finish_reason)
        num_given = len(completion.text)
        if stops():
            if isinstance(stream, ClientStream):
                stream.close()
            return


def has_template(llm: LLM) -> bool:
    """Return whether a model's conversations can be written. Pure."""
    tokenizer = llm.tokenizer
    return tokenizer.has_text and (tokenizer.writes_chats or bool(tokenizer.find_template()))


def check_one_answer(params: SamplingParams) -> None:
    """Raise if more than one text is asked for.

    Raises:
        InvalidRequestError: It is.
    """
    if params.num_generated > 1:
        raise InvalidRequestError(
            f"n = {params.n}, best_of = {params.best_of}: a conversation has one answer to each message.",
            hint="Use trencadis generate --chat for several.",
        )
