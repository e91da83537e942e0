"""Converts fields of a request to ``SamplingParams`` or ``BeamSearchParams``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs

from trencadis.errors import InvalidRequestError
from trencadis.records import BeamSearchParams, RequestTerms, SamplingParams
from trencadis_server.errors import ApiError
from trencadis_server.generation.structured import structured_field, structured_of

if TYPE_CHECKING:
    from trencadis.api import Tokenizer
    from trencadis_server.protocol.generation import GenerationRequest

__all__ = ["beam_params", "http_field", "sampling_params"]

_NAMES = tuple(attrs.fields_dict(SamplingParams))
_OTHER_NAMES = {
    "bad_token_ids": "bad_words",
    "bad_words_ids": "bad_words",
    "dry_breaker_token_ids": "dry_sequence_breakers",
}
_NUM_SEEDS = 2**63
_BREAKERS = ("\n", ":", '"', "*")
"""Texts that end a run of tokens for DRY unless the request sets others.

Source: p-e-w, text-generation-webui pull request 5677.
"""
_OWN = ("length_penalty", "early_stopping")
"""Fields that control a beam search."""
_HONOURED = frozenset(
    {
        *("model", "prompt", "messages", "use_beam_search", "n", "best_of", *_OWN, "stream", "user"),
        *("max_tokens", "max_completion_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
        *("skip_special_tokens", "return_token_ids", "logprobs", "top_logprobs", "echo", "truncate_prompt_tokens"),
        *("add_special_tokens", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
        *attrs.fields_dict(RequestTerms),
        *("ttft_target_ms", "tpot_target_ms"),
        # Beam search draws nothing, so these change nothing; nor is there one prefix to hand over.
        *("seed", "temperature", "kv_transfer_params"),
    }
)
"""Fields that apply to beam search; any other, including later additions, is refused rather than ignored."""
_NOTHING: tuple[Any, ...] = ([], {}, {"type": "text"})
"""Values with which a field requests nothing; the last is a response_format."""


def sampling_params(
    body: GenerationRequest,
    *,
    tokenizer: Tokenizer,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Return the sampling parameters of a request. Pure.

    Args:
        body: Request body.
        tokenizer: Tokenizer of the model.
        max_tokens: Most tokens of a choice; None: as many as there is room for.
        logprobs: Number of alternatives at each output token; None: no log-probabilities.
        prompt_logprobs: Number of alternatives at each prompt token; None: no log-probabilities.

    Raises:
        ApiError: A banned word has no tokens, or two fields constrain the text.
        InvalidRequestError: Values contradict each other.
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
    """Return the request field for a field of :class:`trencadis.records.SamplingParams`. Pure.

    Args:
        body: Request body that :func:`sampling_params` accepted.
        name: Name of an attribute, such as ``bad_words_ids``.
    """
    return structured_field(body) if name == "structured" else _OTHER_NAMES.get(name, name)


def _bad_words(words: Iterable[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of words: each as it begins a text, as it follows something else, and as it follows a space. Pure.

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
            # A tokenizer may put a space in front of a text, so that the word has other tokens where it follows no
            # space.
            banned += [ids, tokenizer.encode_literally(form)]
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


def beam_params(body: GenerationRequest, *, max_tokens: int | None, logprobs: int | None) -> BeamSearchParams | None:
    """Return the beam search parameters of a request, or None if it samples. Pure.

    The beam width is ``best_of``, or else ``n``; ``n`` continuations are returned.

    Args:
        body: Request body.
        max_tokens: Most tokens of a choice; None: as many as there is room for.
        logprobs: Number of alternatives at each output token; None: no log-probabilities.

    Raises:
        ApiError: The request is a stream, sets a parameter of sampling, or one of beam search without beam search.
        InvalidRequestError: A value is out of range.
    """
    if not body.use_beam_search:
        _refuse_without_search(body)
        return None
    _refuse_sampling(body)
    width = getattr(body, "best_of", None) or body.num_choices
    _check_width(body, width, logprobs)
    return BeamSearchParams(
        beam_width=width,
        n=body.num_choices,
        max_tokens=max_tokens,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=body.early_stopping or False,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=logprobs,
    )


def _refuse_without_search(body: GenerationRequest) -> None:
    for name, idle in zip(_OWN, (1.0, False), strict=True):
        if getattr(body, name) not in (None, idle):
            raise ApiError(400, f"{name} needs use_beam_search to be true.", param=name)


def _refuse_sampling(body: GenerationRequest) -> None:
    if body.stream:
        raise ApiError(
            400,
            "use_beam_search cannot stream: which text is best is known at the end only. Leave out stream.",
            param="stream",
        )
    if body.temperature not in (None, 0, 1):
        raise _no_effect("temperature")
    if getattr(body, "echo", None) and getattr(body, "logprobs", None) is not None:
        raise ApiError(400, "echo with logprobs is not answered with use_beam_search.", param="echo")
    defaults = SamplingParams()
    for name in sorted(body.model_fields_set - _HONOURED):
        value: Any = getattr(body, name)
        if not (value is None or value == getattr(defaults, name, None) or value in _NOTHING):
            raise _no_effect(name)


def _check_width(body: GenerationRequest, width: int, logprobs: int | None) -> None:
    if width < body.num_choices:
        raise ApiError(400, f"best_of = {width} is below n = {body.num_choices}.", param="best_of")
    if logprobs is not None and logprobs > width:
        raise ApiError(
            400,
            f"{logprobs} alternatives at each token, but beam search with a width of {width} knows {width}.",
            param="top_logprobs" if hasattr(body, "top_logprobs") else "logprobs",
        )


def _no_effect(name: str) -> ApiError:
    return ApiError(400, f"{name} has no effect with use_beam_search, which draws nothing. Leave it out.", param=name)
