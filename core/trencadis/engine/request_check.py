"""What a request must be for a model, whoever else is there: known before the engine sees it."""

from __future__ import annotations

from trencadis.errors import InvalidRequestError, PromptTooLongError
from trencadis.records import Request

__all__ = ["check_request"]


def check_request(request: Request, *, vocab_size: int, max_model_len: int) -> None:
    """Refuse what no engine of this model can run. Pure; O(prompt).

    Args:
        request: What a client asked.
        vocab_size: Legal token ids are 0 .. vocab_size - 1.
        max_model_len: Longest sequence, tokens.

    Raises:
        PromptTooLongError: The prompt leaves no room for one output token.
        InvalidRequestError: An empty prompt, or a token id outside the vocabulary.
    """
    prompt, name = request.prompt_token_ids, f"request {request.request_id!r}"
    if not prompt:
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
