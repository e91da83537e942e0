"""Whose fault a config class's exception is, and what to say: validators' own words are for programmers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from trencadis.config.messages import show
from trencadis.errors import must_be_one_of

__all__ = ["culprit", "demand", "reason"]

_CHOICES = "one of: "


def culprit(config_class: type[Any], values: Mapping[str, Any]) -> tuple[Any, Exception] | None:
    """Return the first attrs field whose converter or validator objects, with its objection, or None. Pure.

    Args:
        config_class: The attrs class whose construction raised.
        values: The values it was constructed with, by field name.
    """
    instance = object.__new__(config_class)
    for field in attrs.fields(config_class):
        if field.name not in values:
            continue
        value = values[field.name]
        try:
            if callable(field.converter):
                value = field.converter(value)
        except Exception as error:
            return field, error
        object.__setattr__(instance, field.name, value)
    for field in attrs.fields(config_class):
        if field.validator is None or field.name not in values:
            continue
        try:
            field.validator(instance, field, getattr(instance, field.name))
        except Exception as error:
            return field, error
    return None


def demand(validator: Any) -> str:
    """Return what one of attrs' own validators asks for: ``> 0 and <= 1``, ``one of: a, b``, or nothing. Pure."""
    parts = getattr(validator, "_validators", None) or (validator,)
    for part in parts:
        if hasattr(part, "options"):
            return _CHOICES + ", ".join(str(option) for option in part.options)
    return " and ".join(f"{part.compare_op} {show(part.bound)}" for part in parts if hasattr(part, "compare_op"))


def reason(validator: Any, value: Any, error: Exception) -> str:
    """Return what a value must be, in words: ``must be >= 1.`` Pure.

    Args:
        validator: The attrs validator that objected; None if something else did.
        value: To what.
        error: Error of the validator; its text is used where the validator is not one of attrs' own.
    """
    wanted = demand(validator)
    if wanted.startswith(_CHOICES):
        return must_be_one_of(str(value), wanted.removeprefix(_CHOICES).split(", "))
    if wanted and _is_number(value):
        return f"must be {wanted}."
    text = str(error.args[0]) if error.args else type(error).__name__
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
