"""Commands within a conversation on a terminal, such as ``/reset`` and ``/set``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from trencadis.cli.conversation import Conversation
from trencadis.cli.sampling_flags import default_of, parameter_from_text, parameter_names, show_parameter
from trencadis.errors import InvalidRequestError, did_you_mean
from trencadis.other_engines import parameters

__all__ = ["LEAVE", "obey"]

LEAVE = "/exit"

_NOT_SET = frozenset({"n", "best_of", "logprobs", "prompt_logprobs"})
"""Parameters that change nothing one could see in a conversation, or ask for several texts."""

_HELP: Mapping[str, str] = {
    "/reset": "forget what was said",
    "/system TEXT": "what the model is told first (none: nothing)",
    "/set NAME VALUE": "a sampling parameter, as /set temperature 0.7",
    "/set": "show those that were set",
    "/help": "show this",
    LEAVE: "leave, as Ctrl-D does",
}

_MORE = "Ctrl-C stops an answer. A line that begins with a space is always a message."


def obey(line: str, conversation: Conversation) -> str:
    """Do what a line that begins with a slash says, and return what there is to print.

    Args:
        line: Such as ``/set temperature 0.7``; not ``/exit``, which ends the conversation.
        conversation: Is changed.

    Raises:
        InvalidRequestError: There is no such word or parameter, or the value is impossible; nothing has changed.
    """
    word, _, rest = line.strip().partition(" ")
    act = _WORDS.get(word)
    if act is None:
        raise InvalidRequestError(
            f'there is no word "{word}".{did_you_mean(word, [*_WORDS, LEAVE])}',
            hint=f"{LEAVE} leaves, /help lists all.",
        )
    return act(conversation, rest.strip())


def _reset(conversation: Conversation, rest: str) -> str:
    if rest:
        raise InvalidRequestError(f'/reset takes nothing, and "{rest}" was given.')
    conversation.reset()
    return "Nothing was said so far."


def _system(conversation: Conversation, rest: str) -> str:
    if rest:
        conversation.system = "" if rest == "none" else rest
    return f"system: {conversation.system or 'none'}"


def _set(conversation: Conversation, rest: str) -> str:
    name, _, text = rest.partition(" ")
    name = name.replace("-", "_")
    names = [one for one in parameter_names() if one not in _NOT_SET]
    if not name:
        changed = [one for one in names if getattr(conversation.params, one) != default_of(one)]
        return "\n".join(f"{one} = {show_parameter(getattr(conversation.params, one))}" for one in changed)
    if name not in names:
        other = parameters().get(name, "")
        meant = f' Did you mean "{other}"?' if other in names else did_you_mean(name, names)
        raise InvalidRequestError(f'no sampling parameter "{name}" can be set.{meant}')
    if not text.strip():
        return f"{name} = {show_parameter(getattr(conversation.params, name))}"
    value = parameter_from_text(name, text.strip())
    conversation.params = attrs.evolve(conversation.params, **{name: value})
    return f"{name} = {show_parameter(getattr(conversation.params, name))}"


def _help(conversation: Conversation, rest: str) -> str:
    return "\n".join([*(f"{word:16} {meaning}" for word, meaning in _HELP.items()), _MORE])


_WORDS: Mapping[str, Callable[[Conversation, str], str]] = {
    "/reset": _reset,
    "/system": _system,
    "/set": _set,
    "/help": _help,
}
