"""What of a growing completion has been sent, so that each chunk holds only what is new."""

from __future__ import annotations

from typing import Literal

from trencadis.records import CompletionOutput, FinishReason, TokenLogprobs

__all__ = ["Progress", "finish_name"]


def finish_name(output: CompletionOutput) -> Literal["stop", "length"]:
    """Return why a completion ended, in OpenAI's words; what failed or was aborted never gets here. Pure."""
    return "length" if output.finish_reason is FinishReason.LENGTH else "stop"


class Progress:
    """Follows one completion of a stream; outputs are cumulative, chunks are not.

    Args:
        has_token_ids: Token ids are wanted; else :meth:`take` does not look for them.

    Attributes:
        is_open: Whatever comes before the text was sent.
        is_finished: The finish reason was sent.
    """

    def __init__(self, *, has_token_ids: bool = True) -> None:
        self.is_open = False
        self.is_finished = False
        self._has_token_ids = has_token_ids
        self._num_characters = 0
        self._num_tokens = 0
        self._num_logprobs = 0

    def take(self, output: CompletionOutput) -> tuple[str, tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """Return the text, token ids and log-probabilities that came since the last call. O(what is new)."""
        logprobs = output.logprobs or ()
        text = output.text[self._num_characters :]
        token_ids = tuple(output.token_ids[self._num_tokens :]) if self._has_token_ids else ()
        entries = logprobs[self._num_logprobs :]
        self._num_characters, self._num_logprobs = len(output.text), len(logprobs)
        self._num_tokens += len(token_ids)
        return text, token_ids, entries
