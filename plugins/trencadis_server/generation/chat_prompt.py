"""Converts chat messages to a prompt, by the model's template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trencadis.api import render_chat
from trencadis.errors import RequestError
from trencadis_server.errors import ApiError
from trencadis_server.generation.prompts import check_chat_length

if TYPE_CHECKING:
    from trencadis.api import Tokenizer
    from trencadis_server.fair_threads import FairThreads
    from trencadis_server.protocol.chat import ChatMessage

__all__ = ["encode_messages"]

_EACH = 100
"""Characters that are encoded in the time that rendering a message, a part or a call takes."""

_RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "processor_kwargs",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that transformers uses itself when it renders a template; clients cannot set them."""


async def encode_messages(
    messages: Sequence[ChatMessage],
    *,
    tokenizer: Tokenizer,
    encoder: FairThreads,
    caller: str = "",
    add_generation_prompt: bool | None = None,
    continue_final_message: bool | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
    finish: Callable[[tuple[int, ...]], tuple[int, ...]] = tuple,
) -> tuple[int, ...]:
    """Return the token ids of a conversation; the event loop does not wait for the template.

    Args:
        messages: Messages of the conversation, at least one.
        tokenizer: Tokenizer of the model.
        encoder: Threads that encode.
        caller: Name of the API key, by which encoding is shared out; at the template, conversations of one key leave a
            process to others.
        add_generation_prompt: Whether to end with the opening of the assistant's turn; None: unless the last message is
            continued.
        continue_final_message: Whether to leave the last message open.
        template_arguments: More names for the template.
        max_model_len: Longest sequence, tokens: a conversation that is surely longer is refused before it is rendered;
            None: it may be cut.
        finish: Cuts or checks the token ids where they are made, so that the time of a refusal counts against the caller.

    Raises:
        ApiError: A part is no text, arguments contradict each other, or the conversation is surely too long.
        InvalidRequestError: The model has no template, or it refuses the messages, leaves out the text of one, or takes too long.
    """
    arguments = _arguments(template_arguments or {})
    num_characters, num_items = map(sum, zip(*map(_size, messages), strict=True))
    if max_model_len is not None:
        check_chat_length(len(messages), num_characters, max_model_len)
    if continue_final_message and add_generation_prompt:
        raise ApiError(
            400,
            "continue_final_message and add_generation_prompt cannot both be true: a message is open or a new one begins.",
            param="continue_final_message",
        )
    knows_developer = "developer" in tokenizer.chat_template
    opens_turn = not continue_final_message if add_generation_prompt is None else add_generation_prompt

    plain = await encoder.run(
        lambda: [_plain(message, index, knows_developer) for index, message in enumerate(messages)],
        num_characters=num_characters + _EACH * num_items,
        caller=caller,
    )
    encoder.refuse_costly(caller)
    try:
        rendered = await asyncio.wrap_future(
            render_chat(
                tokenizer,
                plain,
                add_generation_prompt=opens_turn,
                continue_final_message=bool(continue_final_message),
                template_arguments=arguments,
                tenant=caller,
            )
        )
    except RequestError as error:
        encoder.charge(caller, error.cost_s)
        raise
    return await encoder.run(
        lambda: finish(tokenizer.encode_rendered(rendered)), num_characters=len(rendered), caller=caller
    )


def _size(message: ChatMessage) -> tuple[int, int]:
    """Return the characters of a message and its number of items: itself, its parts and its tool calls. Pure."""
    content, num_items = message.content or "", 1 + len(message.tool_calls or ())
    if not isinstance(content, str):
        num_items += len(content)
        content = "".join(text for part in content if isinstance(text := part.get("text"), str))
    return len(content) + len(message.reasoning_content or message.reasoning or ""), num_items


def _arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    for name in given:
        if name in _RESERVED:
            raise ApiError(
                400,
                f"chat_template_kwargs cannot set {name!r}: it is not the template's.",
                param="chat_template_kwargs",
            )
    return dict(given)


def _plain(message: ChatMessage, index: int, knows_developer: bool) -> dict[str, Any]:
    """Return a message as a dictionary for templates. Pure.

    Raises:
        ApiError: A part is no text, or the arguments of a call are no JSON.
    """
    # "developer" is the newer name of "system"; most templates know the older one only.
    role = "system" if message.role == "developer" and not knows_developer else message.role
    plain: dict[str, Any] = {"role": role, "content": _content(message, index)}
    for name in ("name", "tool_call_id", "reasoning", "reasoning_content", "function_call"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.tool_calls is not None:
        plain["tool_calls"] = [
            _call(call, f"messages[{index}].tool_calls[{i}]") for i, call in enumerate(message.tool_calls)
        ]
    return plain


def _content(message: ChatMessage, index: int) -> str | list[dict[str, str]]:
    if message.content is None:
        return message.refusal or ""
    if isinstance(message.content, str):
        return message.content
    return [
        {"type": "text", "text": _part(part, f"messages[{index}].content[{i}]")}
        for i, part in enumerate(message.content)
    ]


def _part(part: Mapping[str, Any], path: str) -> str:
    kind = part.get("type")
    key = "refusal" if kind == "refusal" else "text"
    if kind not in ("text", "refusal"):
        raise ApiError(
            400,
            f"{path} has type {kind!r}: this model reads text only.",
            param=f"{path}.type",
            code="unsupported_content",
        )
    text = part.get(key)
    if not isinstance(text, str):
        raise ApiError(400, f"{path}.{key} = {text!r} is no text.", param=f"{path}.{key}")
    return text


def _call(call: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a tool call with parsed arguments: clients send a JSON string, templates expect an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError as error:
        raise ApiError(
            400, f"{path}.function.arguments is no JSON: {error}.", param=f"{path}.function.arguments"
        ) from None
    return {**call, "function": {**function, "arguments": arguments}}
