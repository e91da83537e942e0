"""What no engine of a model can run, whatever its state; where clients are, it is refused before it is sent."""

from __future__ import annotations

from collections.abc import Iterable

from trencadis.errors import InvalidRequestError, PromptTooLongError
from trencadis.faults import shown
from trencadis.records import Request, SamplingParams

__all__ = ["check_honoured", "check_request"]


def check_request(request: Request, *, vocab_size: int, max_model_len: int, eos_token_ids: Iterable[int]) -> None:
    """Refuse what no engine of this model can run. Pure; O(prompt).

    Args:
        request: A client's request.
        vocab_size: Legal token ids are 0 .. vocab_size - 1.
        max_model_len: Longest sequence, tokens.
        eos_token_ids: Tokens that end a text of this model.

    Raises:
        PromptTooLongError: The prompt leaves no room for one output token.
        InvalidRequestError: An empty prompt, a token id outside the vocabulary, or parameters that leave no token to choose.
    """
    prompt, name = request.known_token_ids, f"request {request.request_id!r}"
    if not request.prompt_token_ids:
        raise InvalidRequestError(f"{name} has an empty prompt.", hint="Give at least one token.")
    if len(prompt) >= max_model_len:
        raise PromptTooLongError(
            f"{name}: the prompt has {len(prompt)} tokens; with room for one output token the limit is "
            f"{max_model_len - 1} (model.max_model_len = {max_model_len}).",
            hint="Shorten the prompt, or raise model.max_model_len if the model allows it.",
        )
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequestError(
            f"{name}: token id {wrong} in the prompt is outside the vocabulary, 0 to {vocab_size - 1}.",
            hint="Use the model's own tokenizer.",
        )
    outside = request.params.token_id_outside(vocab_size)
    if outside is not None:
        field, token = outside
        raise InvalidRequestError(
            f"sampling parameter {field}: token id {token} is outside the vocabulary, 0 to {vocab_size - 1}.",
            hint="Use the model's own tokenizer.",
            field=field,
        )
    _check_choice(request.params, vocab_size, (*eos_token_ids, *request.end_token_ids))


def _check_choice(params: SamplingParams, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
    """Refuse parameters under which the first token could be none. Pure; O(listed tokens).

    Raises:
        InvalidRequestError: There is no token that may be chosen.
    """
    allowed, bad = params.allowed_token_ids, params.bad_token_ids
    if allowed is None and len(bad) + len(params.stop_token_ids) < vocab_size // 2:
        return  # some are left, however many the model's own ends are
    left = set(range(vocab_size) if allowed is None else allowed).difference(bad)
    if not left:
        raise InvalidRequestError(
            "sampling parameter bad_token_ids bans every token there is to choose.",
            hint="Ban fewer.",
            field="bad_token_ids",
        )
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    if params.min_tokens > 0 and left <= ends:
        raise InvalidRequestError(
            f"sampling parameter min_tokens = {params.min_tokens}: every token that may be chosen ends the text, so that none "
            "can come before.",
            hint="Allow another token, or leave min_tokens out.",
            field="min_tokens",
        )


def check_honoured(params: SamplingParams, honoured: frozenset[str], sampler: str) -> None:
    """Refuse parameters that would have no effect. Pure.

    Args:
        params: Sampling parameters of a request.
        honoured: Parameters that the sampler honours, ``parameters_in`` of what it states.
        sampler: Names the component in the message.

    Raises:
        InvalidRequestError: The sampler does not honour one of those that the request asks for; names both.
    """
    for name in params.asked:
        if name not in honoured:
            field = "temperature" if name == "greedy" else name
            raise InvalidRequestError(
                f"{field} = {shown(getattr(params, field))}: this engine's {sampler} does not honour it.",
                hint='Leave the field out, or ask the operator for a sampler that does, such as [sampling] name = "standard".',
                field=field,
            )
