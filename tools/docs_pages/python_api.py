"""``docs/python.md``: the names that ``import trencadis`` offers for use, from their docstrings."""

from __future__ import annotations

import enum
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import attrs

import trencadis
from docs_pages.markdown import code_spans, heading_note, table
from trencadis import records
from trencadis.records import RequestTerms

__all__ = ["python_page", "told"]

_SHOWN = (
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "StructuredOutput",
    "BeamSearchParams",
    "RequestOutput",
    "CompletionOutput",
    "FinishReason",
)

_HEAD = f"""# Python

{heading_note("the docstrings of the names that trencadis offers")}

What a program uses; what plugins use is in [Hooks](hooks.md) and in the pages of the nouns.
Errors are listed in [Errors](errors.md).
"""

_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):\n((?:(?:    .*)?\n?)*)", re.MULTILINE)
_ENTRY = re.compile(r"^(\w+): (.+?)(?=^\w+: |\Z)", re.DOTALL | re.MULTILINE)


def python_page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *(_class_section(getattr(trencadis, name)) for name in _SHOWN)])


def _class_section(documented: type[Any]) -> str:
    parts = [f"## `{documented.__name__}`", *told(documented)]
    if issubclass(documented, enum.Enum):
        parts.append(", ".join(f"`{member.name}` is `{member.value!r}`" for member in documented) + ".")
    elif not attrs.has(documented):
        parts += [_method_section(name, method) for name, method in _methods(documented)]
    return "\n\n".join(parts) + "\n"


def _methods(documented: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield what the class itself defines and shows: methods, class methods and properties."""
    for name, value in vars(documented).items():
        if not name.startswith("_") and (callable(value) or isinstance(value, classmethod | property)):
            yield name, value


def _method_section(name: str, method: Any) -> str:
    if isinstance(method, property):
        return "\n\n".join([f"### `{name}`", *told(method)])
    function = getattr(method, "__func__", method)
    waits = "await " if inspect.iscoroutinefunction(function) else ""
    return "\n\n".join([f"### `{waits}{name}({_parameters(function)})`", *told(function)])


def _parameters(function: Any) -> str:
    """Return the parameters as a call would name them, without types and without ``self``. Pure."""
    shown = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD) and "*" not in shown:
            shown.append("*")
        if parameter.kind is parameter.VAR_KEYWORD:
            shown += [f"{name}={default!r}" for name, default, _ in _unpacked(parameter)]
            continue
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        shown.append(f"{parameter.name}{default}")
    return ", ".join(shown)


def _unpacked(parameter: inspect.Parameter) -> Iterator[tuple[str, Any, str]]:
    """Yield name, default and meaning of each keyword argument that ``Unpack[TermKeywords]`` or ``Unpack[ListedTerms]`` stands for. Pure."""
    keywords = getattr(records, parameter.annotation.removeprefix("Unpack[").removesuffix("]"))
    (attributes,) = (body for title, body in _SECTION.findall(inspect.getdoc(RequestTerms)) if title == "Attributes")
    meanings = dict(_ENTRY.findall(textwrap.dedent(attributes)))
    for name, field in zip(keywords.__annotations__, attrs.fields(RequestTerms), strict=True):
        yield name, field.default if name == field.name else None, meanings[field.name]


def told(documented: Any) -> Iterator[str]:
    """Yield a docstring as blocks of Markdown: prose, then a table for each of Google's sections."""
    text = inspect.getdoc(documented) or ""
    for part in re.split(r"\n\s*\n", _SECTION.sub("", text)):
        if part.strip() and not part.startswith(("Example::", "    ")):
            yield code_spans(part)
    for title, body in _SECTION.findall(text):
        entries = _ENTRY.findall(textwrap.dedent(body))
        if entries and title == "Args" and inspect.isfunction(documented):
            entries = list(_with_keywords(documented, entries))
        if entries:
            defaults = _defaults(documented) if title == "Attributes" else {}
            yield _entries(title, entries, defaults)
        elif body.strip():
            yield f"**{title}:** {code_spans(body)}"


def _with_keywords(function: Any, entries: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the entries of arguments; that of ``**terms`` is followed by one for each keyword argument. Pure."""
    parameters = inspect.signature(function).parameters
    for name, meaning in entries:
        if parameters[name].kind is not inspect.Parameter.VAR_KEYWORD:
            yield name, meaning
            continue
        yield f"**{name}", meaning
        if not meaning.startswith("See "):
            yield from ((keyword, text) for keyword, _, text in _unpacked(parameters[name]))


def _defaults(documented: Any) -> dict[str, str]:
    """Return the default of each attribute that has one. Pure."""
    if not attrs.has(documented):
        return {}
    return {
        field.name: _shown(field.default) for field in attrs.fields(documented) if field.default is not attrs.NOTHING
    }


def _shown(default: Any) -> str:
    """Return a default as a cell of a table; a function, and a record with fields of its own, by what it is. Pure."""
    if isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # a class at run time
        if default.takes_self:
            return "from the others"
        default = default.factory()
    if inspect.isroutine(default):
        return "a function"
    if hasattr(default, "dtype"):
        return "an empty array"
    if attrs.has(type(default)):
        return f"`{type(default).__name__}()`"
    return f"`{default.value if isinstance(default, enum.Enum) else default!r}`"


def _entries(title: str, entries: list[tuple[str, str]], defaults: dict[str, str]) -> str:
    names = {"Args": "argument", "Attributes": "attribute", "Raises": "raises", "Returns": "returns"}
    if defaults:
        rows = [(f"`{name}`", defaults.get(name, "required"), code_spans(text)) for name, text in entries]
        return table((names[title], "default", "meaning"), rows).rstrip("\n")
    return table((names[title], "meaning"), [(f"`{name}`", code_spans(text)) for name, text in entries]).rstrip("\n")
