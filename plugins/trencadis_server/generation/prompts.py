"""Converts texts and token ids of a request to prompts, and checks their lengths."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

from trencadis.errors import InvalidRequestError
from trencadis_server.errors import ApiError

if TYPE_CHECKING:
    from trencadis import AsyncLLM
    from trencadis.api import Tokenizer
    from trencadis_server.context import ServerContext
    from trencadis_server.protocol.completions import CompletionRequest, Inputs

__all__ = [
    "TokenIds",
    "check_chat_length",
    "check_length",
    "check_prompt",
    "check_room",
    "check_size",
    "echoes",
    "encode_inputs",
    "truncated",
]

TokenIds = tuple[int, ...]
_EMBEDDED = "input"
"""Field whose texts have no output."""

_MAX_CHARACTERS_PER_TOKEN = 256
"""Assumed length of the longest token if it is unknown; no vocabulary in use has longer tokens than 128 spaces."""

_PIECE_CHARACTERS = 65_536
"""Characters of a list's texts that are encoded in one go, some tens of milliseconds; other requests run between two goes."""

_CHARACTERS_PER_TEXT = 64
"""Characters that are encoded in the time that each text takes besides its own characters."""

_MAX_BYTES_PER_CHARACTER = 4
"""Most bytes per character. Source: RFC 3629: UTF-8."""

_SPARSE = 16
"""Bytes per token of the context that no text in use has: four or five is usual."""


async def encode_inputs(
    inputs: Inputs,
    *,
    llm: AsyncLLM,
    context: ServerContext,
    caller: str,
    add_special_tokens: bool,
    is_cut: bool,
    num_output: int,
    param: str,
) -> list[TokenIds]:
    """Return the token ids of each text, in order.

    Args:
        inputs: One text or several, as strings or token ids.
        llm: The engine.
        context: Context of the server: the threads on which the tokenizer runs, and the limits of one request.
        caller: Name of the API key.
        add_special_tokens: Whether to add the tokenizer's special tokens; for strings.
        is_cut: Whether only the end of the prompt is used, so that its length is not limited.
        num_output: Output tokens that must fit as well, see :func:`check_room`; for strings that are not cut.
        param: Name of the field, for errors.

    Raises:
        ApiError: A text is too long, has no token, or has a token id that the model does not have. Texts that are
            surely too long are refused before any is encoded, and the others before the next one is.
        InvalidRequestError: Too many texts or tokens for the server; checked before the rest is encoded.
        TooBusyError: Too much of the caller's work was refused recently.
    """
    if isinstance(inputs, str):
        inputs = [inputs]
    elif isinstance(inputs[0], int):
        return _checked([cast("TokenIds", tuple(inputs))], llm.model.vocab_size, param)
    texts = [one for one in inputs if isinstance(one, str)]
    if not texts:
        return _checked([tuple(one) for one in inputs if isinstance(one, list)], llm.model.vocab_size, param)
    context.admission.check(len(texts), len(texts))
    places = [_place(param, index, len(texts)) for index in range(len(texts))]
    max_model_len = None if is_cut else llm.max_model_len
    num_tokens = 0

    def encode(piece: range) -> list[TokenIds]:
        nonlocal num_tokens
        if piece.start == 0 and max_model_len is not None:
            for text, place in zip(texts, places, strict=True):
                check_length(text, llm.tokenizer, max_model_len, place)
        prompts: list[TokenIds] = []
        for index in piece:
            prompt = _encode(
                llm.tokenizer,
                texts[index],
                places[index],
                add_special_tokens=add_special_tokens,
                max_model_len=max_model_len,
            )
            prompts.append(prompt)
            if max_model_len is not None:
                check_prompt(prompt, places[index], max_model_len=max_model_len, num_output=num_output)
                num_tokens += len(prompt)
                context.admission.check(num_tokens, len(texts))
        return prompts

    pieces = [(functools.partial(encode, piece), size) for piece, size in _pieces(texts)]
    encoded = await context.encoder.run_all(pieces, caller=caller)
    return [prompt for prompts in encoded for prompt in prompts]


def truncated(
    prompt: TokenIds, limit: int | None, *, tokenizer: Tokenizer, max_model_len: int, max_tokens: int | None
) -> TokenIds:
    """Return the last tokens of a prompt, after the special tokens that begin each prompt, which models need. Pure.

    Args:
        prompt: Token ids of the prompt.
        limit: Number of tokens to keep; -1: as many as leave room for the output; None: all.
        tokenizer: Tokenizer with these special tokens; they are kept if the prompt has them and ``limit`` leaves room
            for more than them.
        max_model_len: Longest sequence, tokens.
        max_tokens: Most output tokens; None: one is enough.
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
        prompts: Token ids of each prompt.
        max_model_len: Longest sequence, tokens.
        num_output: Output tokens that must fit: as many as the request asks for, 1 if it does not say, 0 if there is no
            output.
        param: Name of the prompts' field, for errors.
        output_param: Name of the field that asks for the output, for errors.

    Raises:
        ApiError: A prompt is empty, or too long (``context_length_exceeded``).
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
        check_prompt(prompt, where, max_model_len=max_model_len, num_output=num_output, output_param=output_param)


def check_prompt(
    prompt: TokenIds, where: str, *, max_model_len: int, num_output: int, output_param: str = "max_tokens"
) -> None:
    """Check that a prompt is not empty and leaves room for its output. Pure.

    Args:
        prompt: Token ids of the prompt.
        where: Name of the field, such as ``prompt[2]``, for errors.
        max_model_len: Longest sequence, tokens.
        num_output: Output tokens that must fit as well, see :func:`check_room`.
        output_param: Name of the field that asks for the output, for errors.

    Raises:
        ApiError: The prompt is empty, or leaves no room for the output.
    """
    if not prompt:
        raise ApiError(400, f"{where} has no tokens. Give at least one.", param=where)
    if len(prompt) + num_output > max_model_len:
        what = f"{where} has {_counted(len(prompt), 'token')}{_wanted(num_output, output_param)}"
        raise _too_long(what, max_model_len, where, output_param if num_output > 1 else "")


def echoes(body: CompletionRequest, prompts: Sequence[TokenIds], tokenizer: Tokenizer) -> list[str | None]:
    """Return for each prompt the text before its output, or None without ``echo``. Pure.

    A prompt that came as text is echoed unchanged, unless it was cut.
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


def check_length(text: str, tokenizer: Tokenizer, max_model_len: int, param: str) -> None:
    """Check that a text may fit, before it is encoded. Pure.

    Args:
        text: Text of a prompt.
        tokenizer: The model's tokenizer.
        max_model_len: Longest sequence, tokens.
        param: Name of the field, for errors.

    Raises:
        ApiError: The text is longer than any that fits (``context_length_exceeded``).
    """
    if len(text) <= max_model_len // _MAX_BYTES_PER_CHARACTER:
        return  # it fits, whatever its tokens are
    most = tokenizer.max_bytes_per_token
    if most is None:
        check_size(text, max_model_len, param)
    elif len(text) * _MAX_BYTES_PER_CHARACTER > most * max_model_len:
        least = -(-_num_bytes(text) // most)
        if least > max_model_len:
            raise _too_long(f"{param} has {_counted(least, 'token')} or more", max_model_len, param)


def check_size(text: str, max_model_len: int, param: str) -> None:
    """Check that a text is not longer than any that is worth encoding. Pure.

    Raises:
        ApiError: The text is longer (``context_length_exceeded``).
    """
    if len(text) > _MAX_CHARACTERS_PER_TOKEN * max_model_len:
        raise _too_long(f"{param} has {_counted(len(text), 'character')}", max_model_len, param)


def check_chat_length(num_messages: int, num_characters: int, max_model_len: int) -> None:
    """Check that a conversation may fit, before it is rendered: a message has one token at least. Pure.

    Raises:
        ApiError: The conversation is longer than any that fits (``context_length_exceeded``).
    """
    if num_messages > max_model_len:
        raise _too_long(f"messages has {num_messages} messages", max_model_len, "messages")
    if num_characters > _MAX_CHARACTERS_PER_TOKEN * max_model_len:
        raise _too_long("messages has " + _counted(num_characters, "character"), max_model_len, "messages")


def _checked(prompts: list[TokenIds], vocab_size: int, param: str) -> list[TokenIds]:
    """Return a client's token ids after validation. Pure.

    Raises:
        ApiError: A token id is outside the vocabulary.
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


def _encode(
    tokenizer: Tokenizer, text: str, where: str, *, add_special_tokens: bool, max_model_len: int | None
) -> TokenIds:
    """Return the tokens of a text; it is refused after its beginning is encoded if that is already far too long.

    Args:
        tokenizer: The model's tokenizer.
        text: Text of a prompt.
        where: Name of the field, for errors.
        add_special_tokens: Whether to add the tokenizer's special tokens.
        max_model_len: Longest sequence, tokens; None: it will be cut.

    Raises:
        ApiError: The text has no token, or is too long.
    """
    try:
        if max_model_len is not None and len(text) > 2 * _SPARSE * max_model_len and tokenizer.max_bytes_per_token:
            # A cut changes only the tokens next to it, so twice as many tokens as fit are too many, wherever the text
            # is cut.
            beginning = tokenizer.encode(text[: _SPARSE * max_model_len], add_special_tokens=False)
            if len(beginning) > 2 * max_model_len:
                raise _too_long(f"{where} has more than {len(beginning) // 2} tokens", max_model_len, where)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except InvalidRequestError as error:
        raise ApiError(400, str(error), param=where) from error


def _pieces(texts: Sequence[str]) -> Iterator[tuple[range, int]]:
    """Yield ranges of texts that are encoded in one go, and the number of characters that take as long."""
    first, size = 0, 0
    for index, text in enumerate(texts):
        size += len(text) + (_CHARACTERS_PER_TEXT if len(texts) > 1 else 0)
        if size >= _PIECE_CHARACTERS or index == len(texts) - 1:
            yield range(first, index + 1), size
            first, size = index + 1, 0


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))


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
    if param.partition("[")[0] == _EMBEDDED:
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
