"""One completion of a prompt while it grows: token ids, text, stop strings, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import msgspec
import numpy as np

from trencadis.errors import RequestError
from trencadis.records import CompletionOutput, FinishedSequence, FinishReason, Request, TokenLogprobs
from trencadis.text import Detokenizer, StopChecker, Tokenizer

__all__ = ["Completion", "TokenPrefix"]

_RUNNING = FinishedSequence(
    request_id="", slot=-1, token_ids=np.empty(0, np.int32), finish_reason=FinishReason.ABORT, num_prompt_tokens=0
)


class Completion:
    """Detokenizes one sequence, checks it for stop strings, and collects its log-probabilities.

    A *watched* completion is given its tokens step by step, any other all of them at its end.

    Args:
        request: Request as the engine runs it.
        index: Index of the completion, 0 .. n - 1.
        tokenizer: Tokenizer of the model.
        streams: The text is streamed.

    Attributes:
        request_id: Id of the engine request.
        slot: In the engine; -1 before the engine has the request.
        finish_reason: None while it runs.
        error: Why the completion failed, or empty; a tokenizer that fails on its tokens fails the completion alone.
        ended: The sequence that left the engine, whose facts an output may have; until then one without any.
    """

    __slots__ = (
        "_detokenizer",
        "_index",
        "_logprobs",
        "_params",
        "_stop_reason",
        "_stops",
        "_text",
        "_token_ids",
        "ended",
        "error",
        "finish_reason",
        "is_watched",
        "request_id",
        "slot",
    )

    def __init__(self, request: Request, *, index: int, tokenizer: Tokenizer, streams: bool) -> None:
        params = request.params
        self.request_id = request.request_id
        self.slot = -1
        self.finish_reason: FinishReason | None = None
        self.error = ""
        self.ended = _RUNNING
        self.is_watched = streams or bool(params.stop)
        self._index = index
        self._params = params
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_token_ids=request.prompt_token_ids
        )
        self._stops = StopChecker(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        self._token_ids: list[int] = []
        self._text = ""
        self._stop_reason: str | int | None = None
        self._logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []

    def append(self, token_ids: Sequence[int], ends_with_stop_token: bool = False) -> bool:
        """Append new tokens; True if a stop string is complete, or they have no text. The tokens after it are dropped.

        Args:
            token_ids: In order.
            ends_with_stop_token: The last one ended the sequence: it is kept as a token, but not as text.
        """
        num_text = len(token_ids)
        if ends_with_stop_token and not self._params.include_stop_str_in_output:
            num_text -= 1
        if self.error:
            return False  # an engine in another process makes tokens until it is told to stop
        try:
            if self._stops is not None:
                return self._append_and_look(self._stops, token_ids, num_text)
            self._token_ids += token_ids
            self._text += self._detokenizer.add(token_ids if num_text == len(token_ids) else token_ids[:num_text])
        except RequestError as error:
            self.error = str(error)
            return True
        return False

    def _append_and_look(self, stops: StopChecker, token_ids: Sequence[int], num_text: int) -> bool:
        if stops.matched is not None:
            return False  # the same
        for position, token in enumerate(token_ids):
            self._token_ids.append(token)
            if position < num_text:
                self._add_text(self._detokenizer.add((token,)))
            if stops.matched is not None:
                return True
        return False

    def add_logprobs(self, entry: TokenLogprobs) -> None:
        """Append the log-probabilities of the next output token."""
        if self._logprobs is not None:
            self._logprobs.append(msgspec.structs.replace(entry, index=self._index))

    def finish(self, finished: FinishedSequence) -> None:
        """Finish: flush the text and store why the sequence ended."""
        stop_token = finished.stop_token_id
        if not self.is_watched:
            self.append(finished.token_ids.tolist(), ends_with_stop_token=stop_token is not None)
        self._flush()
        # An end of the model's own is no news to a client; a token that it has named is.
        self.finish_reason = finished.finish_reason
        self._stop_reason = stop_token if stop_token in self._params.stop_token_ids else None
        self.ended = finished
        if self.error:
            self.finish_reason, self._stop_reason = FinishReason.ERROR, None
        elif self._stops is not None and self._stops.matched is not None:
            self.finish_reason, self._stop_reason = FinishReason.STOP, self._stops.matched
        self.error = self.error or finished.error

    def _flush(self) -> None:
        try:
            if self.error:
                pass
            elif self._stops is None:
                self._text += self._detokenizer.flush()
            elif self._stops.matched is None:
                self._add_text(self._detokenizer.flush())
                self._text += self._stops.flush()
        except RequestError as error:
            self.error = str(error)

    def fail(self, error: str) -> None:
        """Finish a request that was refused and never ran."""
        self.finish_reason, self.error = FinishReason.IGNORED, error

    def output(self) -> CompletionOutput:
        """Return the output so far. Pure; O(length) at the end and with log-probabilities."""
        tokens = self._token_ids
        logprobs = None if self._logprobs is None else tuple(self._logprobs[: len(tokens)])
        return CompletionOutput(
            index=self._index,
            text=self._text,
            token_ids=TokenPrefix(tokens, len(tokens)) if self.finish_reason is None else tuple(tokens),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            logprobs=logprobs,
        )

    def _add_text(self, delta: str) -> None:
        """Add text, unless it may be part of a stop string; none is looked for before ``min_tokens``."""
        if self._stops is not None and len(self._token_ids) > self._params.min_tokens:
            delta = self._stops.feed(delta)
        self._text += delta


class TokenPrefix(Sequence[int]):
    """The first tokens of a list that only grows: behaves as a tuple and equals one. O(1) to make, O(length) to read whole.

    Outputs of a stream hold it, so that no token costs a copy of those before it.

    Args:
        token_ids: Only ever appended to.
        length: Length of the prefix.
    """

    __slots__ = ("_length", "_token_ids")

    def __init__(self, token_ids: list[int], length: int) -> None:
        self._token_ids = token_ids
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return tuple(self._token_ids[start:stop:step]) if step > 0 else tuple(self)[index]
        return self._token_ids[range(self._length)[index]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._token_ids[: self._length])

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, TokenPrefix | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))
