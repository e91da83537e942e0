"""Fields of a request to ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from trencadis.errors import InvalidRequestError
from trencadis.records import SamplingParams
from trencadis.server.errors import ApiError

if TYPE_CHECKING:
    from trencadis.server.protocol.generation import GenerationRequest
    from trencadis.text import Tokenizer

__all__ = ["sampling_params"]

_SAME_NAME = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "allowed_token_ids",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
_NUM_SEEDS = 2**63


def sampling_params(
    body: GenerationRequest,
    *,
    tokenizer: Tokenizer,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Return how the tokens of a request are chosen. Pure.

    Args:
        body: The request.
        tokenizer: Of the model.
        max_tokens: The most tokens of a choice; None: as many as there is room for.
        logprobs: Alternatives at each output token; None: no log-probabilities.
        prompt_logprobs: The same for the prompt.

    Raises:
        ApiError: A banned word has several tokens.
        InvalidRequestError: Values that contradict each other.
    """
    given: dict[str, Any] = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    return SamplingParams(
        **given,
        stop=body.stops,
        seed=None if body.seed is None else body.seed % _NUM_SEEDS,
        logit_bias={int(token): bias for token, bias in (body.logit_bias or {}).items()},
        bad_token_ids=_bad_tokens(body.bad_words or (), tokenizer),
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _bad_tokens(words: Iterable[str], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens of words: each as it begins a text and as it follows a space. Pure.

    Raises:
        ApiError: A word has several tokens: to ban one of them would ban other words, too.
    """
    banned: list[int] = []
    for index, word in enumerate(words):
        for form in (word, f" {word.lstrip()}"):
            try:
                ids = tokenizer.encode(form, add_special_tokens=False)
            except InvalidRequestError:
                ids = ()
            if len(ids) != 1:
                raise ApiError(
                    400,
                    f"bad_words[{index}] = {word!r} is {len(ids)} tokens as {form!r}, and only single tokens can be banned. "
                    "Use logit_bias, or leave it out.",
                    param=f"bad_words[{index}]",
                )
            banned += ids
    return tuple(dict.fromkeys(banned))
