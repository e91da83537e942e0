"""What each request must give: written from the definitions, it shares nothing with the engine but the detokenizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import attrs

from support.machine.world import World
from trencadis.records import CompletionOutput, FinishReason, SamplingParams
from trencadis.text import Detokenizer, Tokenizer

__all__ = ["Expected", "wrong"]


@attrs.frozen
class Expected:
    """The whole answer to a request that nothing disturbs.

    Attributes:
        token_ids: All tokens, those of a stop string included.
        text: Up to a stop string, or all.
        whole_text: With the stop string.
        reason: Why it ends.
        stop_reason: The token or the string that ended it.
    """

    token_ids: tuple[int, ...]
    text: str
    whole_text: str
    reason: FinishReason
    stop_reason: int | str | None

    @classmethod
    def of(
        cls, world: World, prompt: Sequence[int], params: SamplingParams, ends: Collection[int], tokenizer: Tokenizer
    ) -> Expected:
        """Return it. Pure.

        Args:
            world: Whose model answers.
            prompt: Token ids.
            params: Of the request; of it only what ends a text matters here, for the model takes no draws.
            ends: Tokens that end a text, unless they are ignored.
            tokenizer: Of the model.
        """
        most = min(params.max_tokens or world.max_model_len, world.max_model_len - len(prompt))
        stops = {*params.stop_token_ids, *(() if params.ignore_eos else ends)}
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens, prompt_token_ids=prompt)
        text, tokens, num_spared = "", list[int](), 0
        for number, token in enumerate(world.text(prompt, most), 1):
            tokens.append(token)
            is_end = token in stops and number >= params.min_tokens
            if not is_end or params.include_stop_str_in_output:
                text += detokenizer.add([token])
            if is_end or number == most:
                text += detokenizer.flush()
            if number <= params.min_tokens:
                num_spared = len(text)  # no stop string is looked for there
            places = ((text.find(stop, num_spared), stop) for stop in params.stop)
            found = sorted((place + len(stop), -len(stop), stop) for place, stop in places if place >= 0)
            if found:
                end, _, stop = found[0]
                cut = text[: end if params.include_stop_str_in_output else end - len(stop)]
                return cls(tuple(tokens), cut, text, FinishReason.STOP, stop)
            if is_end:
                reason = token if token in params.stop_token_ids else None
                return cls(tuple(tokens), text, text, FinishReason.STOP, reason)
        return cls(tuple(tokens), text, text, FinishReason.LENGTH, None)


def wrong(found: CompletionOutput, expected: Expected, *, is_disturbed: bool) -> str:
    """Return what is wrong with a completion, in words; empty if nothing is. Pure.

    Args:
        found: So far, or at its end.
        expected: The whole of it.
        is_disturbed: It may end anywhere, for it was aborted or failed, or has not ended.
    """
    tokens = tuple(found.token_ids)
    if tokens != expected.token_ids[: len(tokens)]:
        return f"27: tokens {tokens}, expected {expected.token_ids}"
    text, wanted = found.text, expected.text
    if (
        is_disturbed and found.finish_reason is not None
    ):  # with half a character, and with what might have begun a stop string
        text, wanted = text.removesuffix("\N{REPLACEMENT CHARACTER}"), expected.whole_text
    if not wanted.startswith(text):
        return f"27: text {found.text!r}, expected {expected.text!r}"
    if found.logprobs is not None and [one.token_id for one in found.logprobs] != list(tokens):
        return f"27: log-probabilities of {[one.token_id for one in found.logprobs]}, tokens {tokens}"
    if is_disturbed:
        return ""
    end = (tokens, found.text, found.finish_reason, found.stop_reason)
    right = (expected.token_ids, expected.text, expected.reason, expected.stop_reason)
    return "" if end == right else f"27: it ended as {end}, expected {right}"
