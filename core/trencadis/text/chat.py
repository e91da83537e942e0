"""Chat messages to a prompt, with the template that comes with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from trencadis.errors import InvalidRequestError
from trencadis.text.tokenizer import Tokenizer

__all__ = ["Message", "encode_chat"]

Message: TypeAlias = Mapping[str, Any]
"""``role`` (a string), ``content``, and whatever else the model's template reads."""


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    template_arguments: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Return the token ids of a conversation as the model's chat template writes it. Pure.

    Args:
        tokenizer: Of the model.
        messages: At least one; each with a ``role``.
        add_generation_prompt: End with the opening of the assistant's turn.
        template_arguments: More names for the template, such as ``enable_thinking``.

    Raises:
        InvalidRequestError: No messages, a message without a role, a model without a template, or a template that refuses
            the messages.
    """
    if isinstance(messages, str | Mapping) or not messages:
        raise InvalidRequestError(
            f"messages = {messages!r}: a chat needs a list of at least one message.",
            hint='Give [{"role": "user", "content": "..."}].',
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(
                f"messages[{index}] = {message!r} has no role.", hint='Give {"role": "user", "content": "..."}.'
            )
    return tokenizer.apply_chat_template(
        [dict(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        template_arguments=dict(template_arguments or {}),
    )
