"""``docs/errors.md``: every error class with its cause, what to do, its exit code and its HTTP status."""

from __future__ import annotations

import re
from collections.abc import Iterator

from docs_pages.markdown import code_spans, heading_note, paragraphs, table
from trencadis import errors
from trencadis.errors import TrencadisError
from trencadis_server import errors as server_errors
from trencadis_server.errors import EngineUnavailableError, TooBusyError, as_api_error

__all__ = ["errors_page"]

_HEAD = f"""# Errors

{heading_note("the docstrings of trencadis.errors")}

Every error that Trencadís raises on purpose is a `TrencadisError`.
Its message says what happened, the value, where it came from, and what to do; `hint` holds the last part alone.

On the command line an error is one line on stderr, without a traceback; `--traceback` shows where it was raised.
The *exit code* is that of the command.
"""

_ANSWERS = """## In answers of the server

Every error has OpenAI's shape, `{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}`.
`message` is for people, `type` and `code` for programs; `param` names the field at fault if there is one.
"""

_STATES = ("loading", "restarting", "failed", "draining", "closed")


def errors_page() -> str:
    """Return the page."""
    server = [value for value in vars(server_errors).values() if _is_error(value)]
    sections = [_section(error, 3 if depth > 1 else 2) for error, depth in _tree(TrencadisError, 0)]
    return "\n".join([_HEAD, *sections, _ANSWERS, _answers(), *(_section(error, 3) for error in server)])


def _is_error(value: object) -> bool:
    return (
        isinstance(value, type) and issubclass(value, TrencadisError) and value.__module__ == "trencadis_server.errors"
    )


def _tree(error: type[TrencadisError], depth: int) -> Iterator[tuple[type[TrencadisError], int]]:
    """Yield a class and those below it, in the order in which they are written; each one once, under its first parent."""
    yield error, depth
    for name in list(vars(errors)):
        child = getattr(errors, name)
        if isinstance(child, type) and child.__bases__[0] is error:
            yield from _tree(child, depth + 1)


def _section(error: type[TrencadisError], level: int) -> str:
    what, *rest = [re.sub(r"\s*\n\s*", " ", part) for part in paragraphs(error) if not part.startswith("Args:")]
    facts = f"Exit code {error.exit_code}, HTTP status {error.http_status}"
    parents = [f"`{parent.__name__}`" for parent in error.__bases__ if issubclass(parent, TrencadisError)]
    if parents:
        facts += f", a kind of {' and '.join(parents)}"
    told = [_sentence(piece) for part in rest for piece in re.split(r"\s(?=Fix: )", part)]
    return "\n\n".join([f"{'#' * level} `{error.__name__}`", code_spans(what), *told, f"{facts}."]) + "\n"


def _sentence(part: str) -> str:
    """Return one paragraph; ``Cause:`` and ``Fix:`` in bold in front."""
    label, separator, text = part.partition(": ")
    if separator and label in {"Cause", "Fix"}:
        return f"**{label}:** {code_spans(text[:1].upper() + text[1:])}"
    return code_spans(part)


def _answers() -> str:
    """Return what clients are told about each kind of error that can reach them."""
    raised: list[TrencadisError] = [
        errors.InvalidRequestError(""),
        errors.PromptTooLongError(""),
        errors.RequestRefusedError(""),
        TooBusyError("", retry_after_s=1.0),
        *(EngineUnavailableError("", state=state) for state in _STATES),
        errors.EngineEndedError(""),
        errors.StepFailedError(""),
        errors.InternalError(""),
    ]
    return table(("raised", "status", "`type`", "`code`"), (_answer(error) for error in raised))


def _answer(error: TrencadisError) -> tuple[str, str, str, str]:
    seen = as_api_error(error)
    name = f"`{type(error).__name__}`"
    if isinstance(error, EngineUnavailableError):
        name += f", {error.state}"
    return name, str(seen.status), f"`{seen.type}`", f"`{seen.code}`" if seen.code else ""
