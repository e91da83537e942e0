"""A model's chat template: finds by trial which form of content it wants, and renders conversations with it.

Some templates write ``message.content`` as it is, others loop over its parts; either loses what comes in the other form. The first
conversation has both forms tried for each role, in the worker process in which every template is rendered.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, Literal, TypeAlias

from trencadis.errors import InvalidRequestError
from trencadis.text.template_pool import Render, TemplatePool, TemplateStoppedError, template_pool

__all__ = ["ChatTemplate", "ContentForm", "Message", "chat_template_of"]

Message: TypeAlias = Mapping[str, Any]
"""``role`` (a string), ``content``, and whatever else the model's template reads."""

ContentForm: TypeAlias = Literal["text", "parts"]
"""``text``: a string; ``parts``: ``[{"type": "text", "text": "..."}]``."""

_MARK: Final = "probetext"
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning in templates. Source: transformers; ``reasoning`` is vLLM's and the newest clients'."""

_OPEN_END: Final = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands at the end of the message that is continued; the space tells whether the template trims. Source: transformers."""

_TAIL, _STOPS = 64, " \t\r\n.!?"
_CALL: Final = {"id": "callprobe", "type": "function", "function": {"name": "probe", "arguments": {}}}
"""Nine letters, as templates of Mistral demand."""


class ChatTemplate:
    """One template and the special tokens whose names it may use. May be used from several threads.

    Args:
        source: The template.
        special_tokens: Values of ``bos_token``, ``eos_token`` and the like.
        pool: Where it is rendered.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any], pool: TemplatePool) -> None:
        self.source = source
        self._special_tokens = special_tokens
        self._pool = pool
        self._probing = threading.Lock()
        self._forms: dict[str, ContentForm] = {}
        self._failure: TemplateStoppedError | None = None

    def submit(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
        tenant: str = "",
    ) -> Future[str]:
        """Return a future of a conversation's text. Does not wait.

        Args:
            messages: At least one, each with a ``role``.
            add_generation_prompt: End with the opening of the assistant's turn.
            continue_final_message: Leave the last message open.
            arguments: More names for the template; they win over special tokens.
            tenant: Who asks.

        Returns:
            Fails with ``InvalidRequestError`` if the template refuses the messages, leaves one out, or takes too much time or memory.

        Raises:
            RequestRefusedError: Too many conversations wait.
        """

        def work(render: Render) -> str:
            forms = self._forms_by(render)
            plain = [_in_form(_plain(message), forms, index) for index, message in enumerate(messages)]
            texts = _texts_of(plain)
            if continue_final_message:
                _mark_end(plain[-1])
            variables = self._variables(plain, add_generation_prompt, arguments or {})
            rendered = render(self.source, variables, texts=[text for _, text in texts])
            if rendered.lost:
                raise _lost(plain, texts[rendered.lost[0]][0])
            return _cut_at_mark(rendered.text) if continue_final_message else rendered.text

        return self._pool.submit(work, tenant=tenant)

    def forms(self) -> dict[str, ContentForm]:
        """Return the form of content that each role wants; the first call tries both, and waits."""
        return dict(self._pool.submit(self._forms_by).result())

    def end_of_turn(self, tokens: Iterable[str]) -> str | None:
        """Return the token that stands right after what an assistant has said, or None; waits for a trial.

        Args:
            tokens: Texts of the tokenizer's added tokens, control signs among them.
        """
        texts = [f"{_MARK}{name}" for name in ("first", "second", "third")]
        turns = [
            {"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), texts, strict=True)
        ]

        def work(render: Render) -> str:
            forms = self._forms_by(render)
            plain = [_in_form(turn, forms, index) for index, turn in enumerate(turns)]
            return render(self.source, self._variables(plain, False, {})).text

        try:
            rendered = self._pool.submit(work).result()
        except InvalidRequestError:  # it says so to everyone who chats
            return None
        following = rendered.rpartition(texts[1])[2].lstrip()
        found = [token for token in tokens if token.strip() and following.startswith(token)]
        return max(found, key=len, default=None)

    def _variables(
        self, messages: Sequence[Message], add_generation_prompt: bool, arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **arguments,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }

    # ------------------------------------------------------------------------------------------------------- trials

    def _forms_by(self, render: Render) -> Mapping[str, ContentForm]:
        with self._probing:
            if self._failure is not None:
                raise copy.copy(self._failure)
            if not self._forms:
                try:
                    self._forms = self._probed(render)
                except TemplateStoppedError as error:  # with three words: it need not be tried with more
                    self._failure = copy.copy(error)  # without a traceback, and so without what its frames hold
                    raise
            return self._forms

    def _probed(self, render: Render) -> dict[str, ContentForm]:
        user, system = _turn("user"), _turn("system")
        forms: dict[str, ContentForm] = {}
        found = self._form(render, [user], 0, forms) or self._form(render, [system, user], 1, forms)
        forms["user"] = found or "text"
        calling = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
        answer = {**_turn("tool"), "tool_call_id": _CALL["id"], "name": "probe"}
        forms["assistant"] = self._form(render, [user, _turn("assistant"), user], 1, forms) or forms["user"]
        forms["system"] = self._form(render, [system, user], 0, forms) or forms["user"]
        forms["tool"] = self._form(render, [user, calling, answer], 2, forms) or forms["user"]
        return forms

    def _form(
        self, render: Render, turns: list[dict[str, Any]], index: int, known: Mapping[str, ContentForm]
    ) -> ContentForm | None:
        """Return the form in which a message's text is written; None: in neither."""
        forms: tuple[ContentForm, ...] = ("text", "parts")
        for form in forms:
            there = {**known, turns[index]["role"]: form}
            plain = [
                _in_form({**turn, "content": turn["content"] and f"{_MARK}{i}"}, there, i)
                for i, turn in enumerate(turns)
            ]
            try:
                written = render(self.source, self._variables(plain, True, {})).text
            except TemplateStoppedError:
                raise
            except InvalidRequestError:
                continue
            # A list that a template writes like a text is there in Python's spelling, or in JSON's.
            if re.search(rf"""(?<!['"]text['"]: ['"]){_MARK}{index}""", written):
                return form
        return None


@functools.lru_cache(maxsize=16)
def _known_template(source: str, special_tokens: str) -> ChatTemplate:
    return ChatTemplate(source, json.loads(special_tokens), template_pool())


def chat_template_of(source: str, special_tokens: Mapping[str, Any]) -> ChatTemplate:
    """Return a template, the same one for the same source and special tokens, so that it is tried once in a process."""
    return _known_template(source, json.dumps({name: _text_of(token) for name, token in special_tokens.items()}))


def _text_of(token: Any) -> Any:
    return list(map(str, token)) if isinstance(token, list | tuple) else str(token)


# ------------------------------------------------------------------------------------------------------------ messages


def _turn(role: str) -> dict[str, Any]:
    return {"role": role, "content": _MARK}


def _plain(message: Message) -> dict[str, Any]:
    """Return a message as templates expect it: without empty entries, and with its reasoning under each name. Pure."""
    plain = {name: value for name, value in message.items() if value is not None}
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    return (
        plain
        if reasoning is None
        else {**dict.fromkeys(_REASONING, reasoning), **plain, "reasoning_content": reasoning}
    )


def _in_form(message: dict[str, Any], forms: Mapping[str, ContentForm], index: int) -> dict[str, Any]:
    """Return a message with its content in the form that its role wants. Pure.

    Raises:
        InvalidRequestError: A part that is no text.
    """
    content = message.get("content")
    role = "system" if message["role"] == "developer" else message["role"]
    form = forms.get(role, forms.get("user", "text"))
    if isinstance(content, str) and form == "parts":
        return {**message, "content": [{"type": "text", "text": content}] if content else []}
    if isinstance(content, list | tuple):
        texts = [_part(part, f"messages[{index}].content[{i}]") for i, part in enumerate(content)]
        parts = [{"type": "text", "text": text} for text in texts]
        return {**message, "content": parts if form == "parts" else "\n".join(texts)}
    return message


def _part(part: Any, where: str) -> str:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"{where} = {part!r:.200} is no text, and this model reads text only.",
            hint='Give {"type": "text", "text": "..."}.',
        )
    return text


def _texts_of(messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Return what has to appear in a prompt: numbers of messages, and texts. Pure.

    Of an assistant's message its last word: templates drop the reasoning before it, and some all that is said beside a call.
    """
    found: list[tuple[int, str]] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        given = [part["text"] for part in content] if isinstance(content, list) else [content]
        texts = [text for text in given if isinstance(text, str) and text.strip()]
        if message["role"] == "assistant":
            last = "".join(texts[-1:])[-_TAIL:].rstrip(_STOPS)
            texts = [] if message.get("tool_calls") else re.findall(r"\w+$", last)
        found += [(index, text) for text in texts]
    return found


def _lost(messages: Sequence[Mapping[str, Any]], index: int) -> InvalidRequestError:
    role = messages[index]["role"]
    return InvalidRequestError(
        f"messages[{index}]: the model's chat template leaves out the text of this message of role {role!r}.",
        hint="Say it in a message of another role, or write the prompt yourself and send it as a completion.",
    )


def _mark_end(message: dict[str, Any]) -> None:
    """Mark where the last message ends.

    Raises:
        InvalidRequestError: It has no text.
    """
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _OPEN_END
    elif isinstance(content, list) and content:
        content[-1]["text"] += _OPEN_END
    else:
        raise InvalidRequestError("continue_final_message: the last message has no text to continue.")


def _cut_at_mark(text: str) -> str:
    """Return what stands before the mark. Pure.

    Raises:
        InvalidRequestError: The template has left it out.
    """
    head, mark, tail = text.rpartition(_OPEN_END.rstrip())
    if not mark:
        raise InvalidRequestError(
            "continue_final_message: the model's chat template leaves out the end of the last message.",
            hint="Leave continue_final_message out.",
        )
    return head if tail.startswith(" ") else head.rstrip()
