"""Arguments of ``LLM`` and ``AsyncLLM``: prompts and parameters, one for all or one for each, as lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import attrs

from trencadis.errors import InvalidRequestError, RequestError, did_you_mean
from trencadis.faults import shown
from trencadis.records import DEFAULT_TERMS, ListedTerms, RequestTerms, SamplingParams

__all__ = [
    "OnRefusal",
    "Prompt",
    "as_list",
    "as_token_ids",
    "at_prompt",
    "check_on_refusal",
    "is_single",
    "per_prompt",
    "terms_per_prompt",
]

Prompt: TypeAlias = str | Sequence[int]
"""Text, or token ids."""

OnRefusal: TypeAlias = Literal["ignore", "raise"]
"""How a list is treated of which one prompt is refused."""

_T = TypeVar("_T")


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Return whether this is one prompt: a string, or a sequence that begins with a number. Pure."""
    return isinstance(prompts, str) or (len(prompts) > 0 and _is_number(prompts[0]))


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts as a list, also if there is only one. Pure.

    Raises:
        InvalidRequestError: It is neither text nor a sequence.
    """
    if not isinstance(prompts, str) and not _is_sequence(prompts):
        raise InvalidRequestError(
            f"prompts = {shown(prompts)}: neither text nor token ids.",
            hint="Give a string, a list of ids, or a list of these.",
        )
    return [prompts] if is_single(prompts) else list(prompts)  # type: ignore[list-item, arg-type]


def as_token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    """Return token ids as plain integers; those of NumPy are accepted. Pure.

    Raises:
        InvalidRequestError: It is no sequence, or an element is no whole number.
    """
    if type(prompt) is tuple and set(map(type, prompt)) <= {int}:  # from a server, and may be long
        return prompt
    if not _is_sequence(prompt) or not all(_is_number(token) for token in prompt):
        raise InvalidRequestError(f"the prompt {shown(prompt)} is neither text nor a list of token ids.")
    return tuple(int(token) for token in prompt)


def per_prompt(value: _T | Sequence[_T] | None, num_prompts: int, *, name: str, default: _T) -> list[_T]:
    """Return one value for each prompt: a list unchanged, anything else repeated. Pure.

    Raises:
        InvalidRequestError: A list of another length.
    """
    if value is None:
        return [default] * num_prompts
    if not isinstance(value, list | tuple):
        return [value] * num_prompts  # type: ignore[list-item]
    if len(value) != num_prompts:
        raise InvalidRequestError(
            f"{name} has {len(value)} entries for {num_prompts} prompts.",
            hint="Give one for all, or one for each prompt.",
        )
    return list(value)


def check_on_refusal(value: str) -> None:
    """Raise unless ``value`` is one of :data:`OnRefusal`. Pure.

    Raises:
        InvalidRequestError: It is another.
    """
    if value not in ("ignore", "raise"):
        raise InvalidRequestError(f"on_refusal = {value!r} is impossible.", hint='Choose "ignore" or "raise".')


def at_prompt(error: RequestError, index: int) -> RequestError:
    """Return an error of the same class whose message names the index of the prompt. Pure."""
    located = type(error)(f"prompts[{index}]: {error}")
    if isinstance(error, InvalidRequestError) and isinstance(located, InvalidRequestError):
        located.field = error.field
    return located


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _is_sequence(value: Any) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, str | bytes | dict)


_FIELDS = {field.metadata["listed"]: field for field in attrs.fields(RequestTerms)}
"""Fields of ``RequestTerms``, by their names in ``ListedTerms``."""


def terms_per_prompt(num_prompts: int, listed: ListedTerms) -> list[RequestTerms]:
    """Return the scheduling parameters of each prompt. Pure.

    Args:
        num_prompts: How many there are.
        listed: Lists and tuples have one value for each; None is the default.

    Raises:
        TypeError: There is no such parameter.
        InvalidRequestError: A list of another length. Or an impossible value; the message has the index of the prompt if there are several.
    """
    if not listed:
        return [DEFAULT_TERMS] * num_prompts
    columns: dict[str, list[Any]] = {}
    for name, value in listed.items():
        if name not in _FIELDS:
            is_sampling = name in {field.name for field in attrs.fields(SamplingParams)}
            meant = f". Did you mean SamplingParams({name}=...)?" if is_sampling else did_you_mean(name, _FIELDS)
            raise TypeError(f"generate() got an unexpected keyword argument {name!r}{meant}")
        field = _FIELDS[name]
        columns[field.name] = per_prompt(value, num_prompts, name=name, default=field.default)
    terms = []
    for index in range(num_prompts):
        try:
            terms.append(RequestTerms(**{name: column[index] for name, column in columns.items()}))
        except RequestError as error:
            raise at_prompt(error, index) if num_prompts > 1 else error from None
    return terms
