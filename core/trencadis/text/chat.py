"""Chat messages to a prompt, with the template that comes with the model, and the tokens that end a turn."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from trencadis.errors import InvalidRequestError
from trencadis.faults import cut, shown
from trencadis.text.chat_template import Message, chat_template_of
from trencadis.text.template_pool import template_pool
from trencadis.text.tokenizer import Tokenizer, needs_tokenizer

__all__ = ["encode_chat", "ends_of_turn", "render_chat"]

_MAX_QUOTED = 60
"""Characters of a text in an example."""


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    template_arguments: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Return the token ids of a conversation as the model's chat template writes it; waits for a worker process.

    Args:
        tokenizer: The model's.
        messages: At least one; each with a ``role``.
        add_generation_prompt: End with the opening of the assistant's turn.
        template_arguments: More names for the template, such as ``enable_thinking``; ``chat_template`` is another template.

    Raises:
        InvalidRequestError: No messages, a message without a role, a model without a template, or a template that refuses the
            messages, leaves out the text of one, or takes too much time or memory.
    """
    rendered = render_chat(
        tokenizer, messages, add_generation_prompt=add_generation_prompt, template_arguments=template_arguments
    )
    return tokenizer.encode_rendered(rendered.result())


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_arguments: Mapping[str, Any] | None = None,
    tenant: str = "",
) -> Future[str | tuple[int, ...]]:
    """Return a future of a conversation as the model's chat template writes it, for ``Tokenizer.encode_rendered``. Does not wait.

    Args:
        tokenizer: See :func:`encode_chat`.
        messages: See :func:`encode_chat`.
        add_generation_prompt: See :func:`encode_chat`.
        continue_final_message: Leave the last message open.
        template_arguments: See :func:`encode_chat`.
        tenant: Who asks: conversations of one tenant wait for each other.

    Returns:
        Text; or token ids, from a tokenizer whose own code writes conversations. Fails as :func:`encode_chat` raises.

    Raises:
        InvalidRequestError: No messages, a message without a role, or a model without a template.
        RequestRefusedError: Too many conversations wait.
    """
    _check(messages)
    if not tokenizer.has_text:
        raise needs_tokenizer("chat")
    arguments = dict(template_arguments or {})
    given = str(arguments.pop("chat_template", ""))
    if tokenizer.writes_chats and not given:
        own_arguments = {**arguments, "add_generation_prompt": add_generation_prompt}
        if continue_final_message:
            own_arguments["continue_final_message"] = True
        plain = [dict(message) for message in messages]
        return template_pool().submit(lambda _: tokenizer.write_chat(plain, own_arguments), tenant=tenant)
    source = tokenizer.find_template(given, has_tools=bool(arguments.get("tools")))
    if not source:
        raise InvalidRequestError(
            "this model has no chat template, so it cannot chat.",
            hint="Give a plain prompt, or a model.tokenizer that has a template.",
        )
    return chat_template_of(source, tokenizer.special_tokens).submit(  # type: ignore[return-value]  # a str is one of both
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        arguments=arguments,
        tenant=tenant,
    )


def _check(messages: Sequence[Message]) -> None:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError(
            f"messages = {shown(messages)}: a chat needs a list of at least one message.",
            hint=f"Give {_as_chat(messages)}.",
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            is_message = isinstance(message, Mapping)
            raise InvalidRequestError(
                f"messages[{index}] = {shown(message)} {'has no role' if is_message else 'is no message'}.",
                hint='Give {"role": "user", "content": "..."}.' if is_message else f"Give {_as_chat(message)}.",
            )


def _as_chat(value: object) -> str:
    """Return how a text or a message is given as a conversation. Pure."""
    if isinstance(value, Mapping) and "role" in value:
        return f"[{shown(value)}]"
    text = json.dumps(cut(value, _MAX_QUOTED), ensure_ascii=False) if isinstance(value, str) and value else '"..."'
    return f'[{{"role": "user", "content": {text}}}]'


def ends_of_turn(
    tokenizer: Tokenizer, named: Mapping[str, Iterable[int]], *, always_tries: bool = False
) -> dict[int, tuple[str, ...]]:
    """Return the tokens that end a turn, each with those who name it: generation config, config, tokenizer and chat template.

    They often disagree: fine-tuned models come with a tokenizer that ends turns with ``<|im_end|>`` and a config that says ``<|endoftext|>``.
    The template's own end counts where the template writes none of the others: what a template writes after an assistant's text need
    not end an answer. That of gpt-oss ends a channel, after which the answer goes on with the next one; it writes ``<|return|>`` as well.

    Args:
        tokenizer: The model's.
        named: Ends by where they stand, such as ``generation_config.json``.
        always_tries: Render the template, in a worker process, also where it could add none, to name it beside the others.
    """
    found: dict[int, list[str]] = {}
    for source, token_ids in named.items():
        for token_id in token_ids:
            found.setdefault(token_id, []).append(source)
    if tokenizer.eos_token_id is not None:
        found.setdefault(tokenizer.eos_token_id, []).append("tokenizer")
    source = tokenizer.find_template()
    writes_known = _writes(source, tokenizer, found)
    if source and (always_tries or not writes_known):
        token = chat_template_of(source, tokenizer.special_tokens).end_of_turn(tokenizer.control_tokens)
        end = None if token is None else tokenizer.control_tokens[token]
        if end is not None and (end in found or not writes_known):
            found.setdefault(end, []).append("chat template")
    return {token_id: tuple(sources) for token_id, sources in found.items()}


def _writes(source: str, tokenizer: Tokenizer, ends: Iterable[int]) -> bool:
    """Return whether a template's source has one of some tokens, or the name of the tokenizer's end. Pure."""
    ids = set(ends)
    texts = [text for text, token_id in tokenizer.control_tokens.items() if token_id in ids]
    return any(text in source for text in texts) or (tokenizer.eos_token_id is not None and "eos_token" in source)
