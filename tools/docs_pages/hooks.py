"""``docs/hooks.md``: every hook, from the docstrings of its specification."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

from docs_pages.markdown import code_spans, heading_note
from trencadis import hookspecs

__all__ = ["hooks_page"]

_HEAD = f"""# Hooks

{heading_note("the docstrings of trencadis.hookspecs")}

A plugin is a module named by an entry point of the group `trencadis`; its functions marked `@hookimpl` are called at start-up and shut-down.
A step calls no hook: it calls plain methods of the objects that the factories made.

*Register* hooks yield components, one hook for each noun.
*Life cycle* hooks return nothing.
*Decide* hooks return the first answer that is not None.
"""
_KINDS = {"register": "Register", "life cycle": "Life cycle", "decide": "Decide"}


def hooks_page() -> str:
    """Return the page."""
    hooks = [value for name, value in vars(hookspecs).items() if name.startswith("trencadis_") and callable(value)]
    parts = [_HEAD]
    for kind, title in _KINDS.items():
        parts.append(f"## {title}\n")
        parts += [_section(hook) for hook in hooks if _kind(hook) == kind]
    return "\n".join(parts)


def _kind(hook: Callable[..., Any]) -> str:
    options = getattr(hook, f"{hookspecs.PROJECT_NAME}_spec")
    if options["firstresult"]:
        return "decide"
    return "register" if hook.__name__ in hookspecs.NOUNS.values() else "life cycle"


def _section(hook: Callable[..., Any]) -> str:
    text, _, example = (inspect.getdoc(hook) or "").partition("Example::\n")
    parts = [f"### `{hook.__name__}({', '.join(inspect.signature(hook).parameters)})`"]
    parts += [_paragraph(part) for part in re.split(r"\n\s*\n", text.strip())]
    if example:
        code = f"from trencadis import Component, hookimpl\n\n\n{textwrap.dedent(example).strip()}"
        parts.append(f"```python\n{code}\n```")
    nouns = [noun for noun, name in hookspecs.NOUNS.items() if name == hook.__name__]
    parts += [f"What the factory returns is described in [{noun}](plugins/{noun}.md)." for noun in nouns]
    return "\n\n".join(parts) + "\n"


def _paragraph(text: str) -> str:
    if not text.startswith("Args:"):
        return code_spans(text)
    arguments = re.findall(r"^ {4}(\w+): (.+?)(?=^ {4}\w|\Z)", text, re.DOTALL | re.MULTILINE)
    return "\n".join(f"* `{name}`: {code_spans(meaning)}" for name, meaning in arguments)
