"""Log-probabilities in the format of each endpoint.

The entry of each token is encoded as soon as it is made: an answer may have millions of candidates, which as objects
would be visited by the garbage collector repeatedly, and encoded in one call that cannot be interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from trencadis.api import Detokenizer
from trencadis_server.protocol.answers import PromptLogprob
from trencadis_server.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from trencadis_server.protocol.completions import CompletionLogprobs

if TYPE_CHECKING:
    from trencadis.api import Tokenizer
    from trencadis.records import TokenLogprobs

__all__ = ["CompletionLogprobsWriter", "chat_logprobs", "prompt_logprobs", "token_text"]

_T = TypeVar("_T")
_encode = msgspec.json.Encoder().encode
_LOWEST = -9999.0
"""Replaces minus infinity, which JSON does not have. Source: OpenAI's API returns this for impossible tokens."""


def token_text(data: bytes, *, prefix: str = "") -> str:
    r"""Return a token's bytes as text; part of a character is written as ``\xe2\x82``. Pure.

    Args:
        data: Bytes of the token.
        prefix: Prefix of a result that is not text.
    """
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(entries: Iterable[TokenLogprobs], tokenizer: Tokenizer) -> ChatLogprobs:
    """Return log-probabilities in the format of chat completions. Pure."""
    content = []
    for entry in entries:
        data = tokenizer.token_bytes(entry.token_id)
        tops = [
            _top(tokenizer.token_bytes(token), logprob)
            for token, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        ]
        content.append(
            _encoded(
                TokenLogprob(
                    token=token_text(data), logprob=_finite(entry.logprob), bytes=list(data), top_logprobs=tops
                )
            )
        )
    return ChatLogprobs(content=content)


def prompt_logprobs(entries: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> list[dict[str, PromptLogprob] | None]:
    """Return log-probabilities of a prompt in vLLM's format: by token id, null for the first token. Pure."""
    written: list[dict[str, PromptLogprob] | None] = [None]
    for entry in entries:
        candidates = {
            str(token): _candidate(tokenizer, token, logprob, rank)
            for rank, (token, logprob) in enumerate(zip(entry.top_token_ids, entry.top_logprobs, strict=True), start=1)
        }
        candidates[str(entry.token_id)] = _candidate(tokenizer, entry.token_id, entry.logprob, entry.rank)
        written.append(_encoded(candidates))
    return written


class CompletionLogprobsWriter:
    """Writes the log-probabilities of one text completion, in one or several parts with continued offsets.

    Alternatives at a token are written by text. If several have the same text, such as a letter and the byte that it
    consists of, the chosen token or else the likeliest has the text, and each other one is ``token_id:`` and its id, as
    in vLLM.

    Args:
        tokenizer: Tokenizer of the model.
        hides_special: Whether special tokens have no text in the answer.
        prompt_token_ids: Tokens before the first one; their end decides whether the first word has a space before it.
        offset: Start of the first token in the text, characters.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        hides_special: bool = False,
        prompt_token_ids: Sequence[int] = (),
        offset: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        # Offsets are counted in the text that is sent.
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=hides_special, prompt_token_ids=prompt_token_ids)
        self._offset = offset

    def prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        """Return the log-probabilities of an echoed prompt; the first token has none.

        Args:
            token_ids: Token ids of the prompt.
            entries: Log-probabilities of all tokens except the first.
        """
        first = self._text(token_ids[0])
        offset = self._advance(token_ids[0])
        rest = self.output(entries)
        return CompletionLogprobs(
            tokens=[first, *rest.tokens],
            token_logprobs=[None, *rest.token_logprobs],
            top_logprobs=[None, *rest.top_logprobs],
            text_offset=[offset, *rest.text_offset],
        )

    def output(self, entries: Iterable[TokenLogprobs]) -> CompletionLogprobs:
        """Return the log-probabilities of the next tokens."""
        written = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for entry in entries:
            text = self._text(entry.token_id)
            written.tokens.append(text)
            written.token_logprobs.append(_finite(entry.logprob))
            written.top_logprobs.append(_encoded(self._alternatives(entry, text)))
            written.text_offset.append(self._advance(entry.token_id))
        return written

    def end(self) -> int:
        """Return the length of the text of all tokens; call once, after the last of them."""
        return self._offset + len(self._detokenizer.flush())

    def _alternatives(self, entry: TokenLogprobs, chosen: str) -> dict[str, float]:
        """Return the log-probability of each alternative and of the chosen token. Pure."""
        by_text: dict[str, float] = {}
        for token, logprob in zip(entry.top_token_ids, entry.top_logprobs, strict=True):
            text = chosen if token == entry.token_id else self._text(token)
            if token != entry.token_id and (text == chosen or text in by_text):
                text = f"token_id:{token}"
            by_text[text] = _finite(logprob)
        return {**by_text, chosen: _finite(entry.logprob)}

    def _text(self, token_id: int) -> str:
        return token_text(self._tokenizer.token_bytes(token_id), prefix="bytes:")

    def _advance(self, token_id: int) -> int:
        """Return a token's offset in the text, and advance to the end of the token."""
        offset = self._offset
        self._offset += len(self._detokenizer.add((token_id,)))
        return offset


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Concatenate two log-probability lists. Pure."""
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def _encoded(value: _T) -> _T:
    """Return a value as raw JSON, typed as the value itself. Pure."""
    return cast("_T", msgspec.Raw(_encode(value)))


def _top(data: bytes, logprob: float) -> TopLogprob:
    return TopLogprob(token=token_text(data), logprob=_finite(logprob), bytes=list(data))


def _candidate(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> PromptLogprob:
    text = token_text(tokenizer.token_bytes(token_id))
    return PromptLogprob(logprob=_finite(logprob), rank=rank, decoded_token=text)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
