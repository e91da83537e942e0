"""Converts texts and token ids of a request to prompts, and checks their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from trencadis.errors import InvalidRequestError
from trencadis_server.errors import ApiError

if TYPE_CHECKING:
    from trencadis import AsyncLLM
    from trencadis.api import Tokenizer
    from trencadis_server.context import Encoder
    from trencadis_server.protocol.completions import CompletionRequest, Inputs

__all__ = ["TokenIds", "check_chat_length", "check_length", "check_room", "echoes", "encode_inputs", "truncated"]

TokenIds = tuple[int, ...]
_EMBEDDED = "input"
"""The field whose texts have no output."""

_MAX_CHARACTERS_PER_TOKEN = 256
"""No vocabulary in use has a longer token; those of 128 spaces are the longest that are common."""


async def encode_inputs(
    inputs: Inputs, *, llm: AsyncLLM, encoder: Encoder, add_special_tokens: bool, is_cut: bool, param: str
) -> list[TokenIds]:
    """Return the token ids of each text, in order.

    Args:
        inputs: One text or several, as strings or token ids.
        llm: The engine.
        encoder: Where the tokenizer runs; all texts together are one piece of work, since many short ones take as long as one.
        add_special_tokens: With those that the tokenizer adds; for strings.
        is_cut: Only the end of the prompt will be used, so it may be as long as it likes.
        param: The field, for errors.

    Raises:
        ApiError: A text that is surely too long, found before any is encoded; one without a token; or a token id that the model
            does not have.
    """
    if isinstance(inputs, str):
        inputs = [inputs]
    elif isinstance(inputs[0], int):
        return _checked([cast("TokenIds", tuple(inputs))], llm.model.vocab_size, param)
    texts = [one for one in inputs if isinstance(one, str)]
    if not texts:
        return _checked([tuple(one) for one in inputs if isinstance(one, list)], llm.model.vocab_size, param)
    if not is_cut:
        for text in texts:
            check_length(text, llm.max_model_len, param)

    def encode_all() -> list[TokenIds]:
        return [
            _encode(llm.tokenizer, text, _place(param, index, len(texts)), add_special_tokens=add_special_tokens)
            for index, text in enumerate(texts)
        ]

    return await encoder.run(encode_all, num_characters=sum(map(len, texts)))


def truncated(
    prompt: TokenIds, limit: int | None, *, tokenizer: Tokenizer, max_model_len: int, max_tokens: int | None
) -> TokenIds:
    """Return the last tokens of a prompt, after the special tokens with which each prompt begins, which models need there. Pure.

    Args:
        prompt: Token ids.
        limit: How many to keep; -1: as many as leave room for the output; None: all.
        tokenizer: Knows these special tokens; they are kept if the prompt has them and ``limit`` leaves room for more than them.
        max_model_len: Longest sequence, tokens.
        max_tokens: The most output tokens; None: one is enough.
    """
    if limit is None:
        return prompt
    if limit < 0:
        limit = max(1, max_model_len - max(1, max_tokens or 1))
    opening = tokenizer.opening
    kept = opening if prompt[: len(opening)] == opening and len(opening) < limit < len(prompt) else ()
    return kept + prompt[-(limit - len(kept)) :] if limit else ()


def check_room(
    prompts: Sequence[TokenIds], *, max_model_len: int, num_output: int, param: str, output_param: str = "max_tokens"
) -> None:
    """Check that each prompt is not empty and leaves room for its output. Pure.

    Args:
        prompts: Token ids.
        max_model_len: Longest sequence, tokens.
        num_output: Output tokens that must fit: as many as the request asks for, 1 if it does not say, 0 if there is no output.
        param: The field, for errors.
        output_param: The field that asks for the output, for errors.

    Raises:
        ApiError: It is empty, or too long (``context_length_exceeded``).
    """
    if num_output >= max(2, max_model_len):
        raise ApiError(
            400,
            f"{output_param} asks for {num_output} tokens: {_limit(max_model_len)} Lower or leave out {output_param}.",
            param=output_param,
            code="context_length_exceeded",
        )
    for index, prompt in enumerate(prompts):
        where = _place(param, index, len(prompts))
        if not prompt:
            raise ApiError(400, f"{where} has no tokens. Give at least one.", param=where)
        if len(prompt) + num_output > max_model_len:
            what = f"{where} has {_counted(len(prompt), 'token')}{_wanted(num_output, output_param)}"
            raise _too_long(what, max_model_len, param, output_param if num_output > 1 else "")


def echoes(body: CompletionRequest, prompts: Sequence[TokenIds], tokenizer: Tokenizer) -> list[str | None]:
    """Return for each prompt the text before its output, or None without ``echo``. Pure.

    A prompt that came as text is echoed as it came, unless it was cut.
    """
    if not body.echo:
        return [None] * len(prompts)
    if body.truncate_prompt_tokens is None:
        if isinstance(body.prompt, str):
            return [body.prompt]
        if all(isinstance(one, str) for one in body.prompt):
            return [str(one) for one in body.prompt]
    hides = body.skip_special_tokens is None or body.skip_special_tokens
    return [tokenizer.decode(prompt, skip_special_tokens=hides) for prompt in prompts]


def check_length(text: str, max_model_len: int, param: str) -> None:
    """Check that a text may fit, before it is encoded. Pure.

    Raises:
        ApiError: It is longer than any text that fits (``context_length_exceeded``).
    """
    if len(text) > _MAX_CHARACTERS_PER_TOKEN * max_model_len:
        raise _too_long(f"{param} has {_counted(len(text), 'character')}", max_model_len, param)


def check_chat_length(num_messages: int, num_characters: int, max_model_len: int) -> None:
    """Check that a conversation may fit, before it is rendered: a message has one token at least. Pure.

    Raises:
        ApiError: It is longer than any that fits (``context_length_exceeded``).
    """
    if num_messages > max_model_len:
        raise _too_long(f"messages has {num_messages} messages", max_model_len, "messages")
    if num_characters > _MAX_CHARACTERS_PER_TOKEN * max_model_len:
        raise _too_long("messages has " + _counted(num_characters, "character"), max_model_len, "messages")


def _checked(prompts: list[TokenIds], vocab_size: int, param: str) -> list[TokenIds]:
    """Return a client's token ids after validation. Pure.

    Raises:
        ApiError: One is outside the vocabulary.
    """
    for index, prompt in enumerate(prompts):
        where, largest = _place(param, index, len(prompts)), max(prompt)
        if largest >= vocab_size:
            raise ApiError(
                400,
                f"{where}: token id {largest} is outside the vocabulary, 0 to {vocab_size - 1}. Use the model's own tokenizer.",
                param=where,
            )
    return prompts


def _encode(tokenizer: Tokenizer, text: str, where: str, *, add_special_tokens: bool) -> TokenIds:
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except InvalidRequestError as error:
        raise ApiError(400, str(error), param=where) from error


def _place(param: str, index: int, num_prompts: int) -> str:
    """Return a prompt's name in error messages: ``prompt``, or ``prompt[2]`` if there are several. Pure."""
    return f"{param}[{index}]" if num_prompts > 1 else param


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _limit(max_model_len: int) -> str:
    return f"this model's maximum context length is {_counted(max_model_len, 'token')}, prompt and output together."


def _wanted(num_output: int, output_param: str) -> str:
    if num_output > 1:
        return f", and {output_param} asks for {num_output} more"
    return f", and at least {num_output} more is wanted" if num_output else ""


def _too_long(what: str, max_model_len: int, param: str, output_param: str = "") -> ApiError:
    """Return the error for a text that is too long; ``output_param`` names the field that can be lowered instead. Pure."""
    if param == _EMBEDDED:
        limit = f"this model embeds at most {max_model_len} tokens of a text. Shorten or divide it."
    else:
        lower = f", lower or leave out {output_param}," if output_param else ""
        limit = f"{_limit(max_model_len)} Shorten the prompt{lower} or set truncate_prompt_tokens."
    return ApiError(
        400,
        f"{what}: {limit}",
        param=param,
        code="context_length_exceeded",
    )
