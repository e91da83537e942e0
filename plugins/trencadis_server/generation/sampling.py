"""Fields of a request to ``SamplingParams``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs

from trencadis.errors import InvalidRequestError
from trencadis.records import SamplingParams
from trencadis_server.errors import ApiError
from trencadis_server.generation.structured import structured_field, structured_of

if TYPE_CHECKING:
    from trencadis.api import Tokenizer
    from trencadis_server.protocol.generation import GenerationRequest

__all__ = ["http_field", "sampling_params"]

_NAMES = tuple(attrs.fields_dict(SamplingParams))
_OTHER_NAMES = {
    "bad_token_ids": "bad_words",
    "bad_words_ids": "bad_words",
    "dry_breaker_token_ids": "dry_sequence_breakers",
}
_NUM_SEEDS = 2**63
_BREAKERS = ("\n", ":", '"', "*")
"""What ends a run of tokens to DRY unless the request says otherwise.

Source: p-e-w, text-generation-webui pull request 5677.
"""


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
        ApiError: A banned word has no tokens, or fields contradict each other about what the text must be.
        InvalidRequestError: Values that contradict each other.
    """
    bad = _bad_words(body.bad_words or (), tokenizer)
    converted: dict[str, Any] = {
        "stop": body.stops,
        "seed": None if body.seed is None else body.seed % _NUM_SEEDS,
        "logit_bias": {int(token): bias for token, bias in (body.logit_bias or {}).items()},
        "bad_token_ids": tuple(ids[0] for ids in bad if len(ids) == 1),
        "bad_words_ids": tuple(ids for ids in bad if len(ids) > 1),
        "dry_breaker_token_ids": _breakers(body, tokenizer),
        "structured": structured_of(body),
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    given = {name: value for name in _NAMES if (value := getattr(body, name, None)) is not None}
    return SamplingParams(**{**given, **converted})


def http_field(body: GenerationRequest, name: str) -> str:
    """Return how a request calls what :class:`trencadis.records.SamplingParams` calls ``name``. Pure.

    Args:
        body: A request that :func:`sampling_params` took.
        name: Of an attribute, such as ``bad_words_ids``.
    """
    return structured_field(body) if name == "structured" else _OTHER_NAMES.get(name, name)


def _bad_words(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of words: each as it begins a text and as it follows a space. Pure.

    Raises:
        ApiError: A word has no tokens.
    """
    banned: list[tuple[int, ...]] = []
    for index, word in enumerate(words):
        for form in (word, f" {word.lstrip()}"):
            ids = _tokens_of(form, tokenizer)
            if not ids:
                raise ApiError(
                    400,
                    f"bad_words[{index}] = {word!r} has no tokens as {form!r}, so that there is nothing to ban. Leave it out.",
                    param=f"bad_words[{index}]",
                )
            banned.append(ids)
    return tuple(dict.fromkeys(banned))


def _breakers(body: GenerationRequest, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token that each breaker ends with after a letter, as it would in a text. Pure."""
    if not body.dry_multiplier:
        return ()
    texts = _BREAKERS if body.dry_sequence_breakers is None else body.dry_sequence_breakers
    return tuple(dict.fromkeys(token for text in texts for token in _tokens_of(f"a{text}", tokenizer)[-1:]))


def _tokens_of(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    try:
        return tuple(tokenizer.encode(text, add_special_tokens=False))
    except InvalidRequestError:
        return ()
