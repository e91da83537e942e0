"""The prompts of ``trencadis generate``: arguments, lines of standard input, a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from trencadis.errors import InvalidRequestError
from trencadis.files import read_bytes

__all__ = ["prompts_of"]

_LINES = "-"


def prompts_of(given: Sequence[str], file: str | None) -> list[str]:
    """Return the prompts; with a file it is one: what was given, a line break, and the file's text as it is.

    Args:
        given: From the command line; ``-`` stands for the lines of standard input.
        file: A text file in UTF-8, or None.

    Raises:
        InvalidRequestError: No prompt, more than one beside a file, or a file that is no text.
    """
    prompts = list(_with_lines(given)) if file is None else [_with_file(given, file)]
    if not any(prompts):
        raise InvalidRequestError(
            "there is no prompt.",
            hint='Write trencadis generate "Once upon a time", or pipe lines into trencadis generate -.',
        )
    return prompts


def _with_lines(given: Sequence[str]) -> Iterator[str]:
    for prompt in given:
        if prompt == _LINES:
            yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip())
        else:
            yield prompt


def _with_file(given: Sequence[str], file: str) -> str:
    if len(given) > 1 or _LINES in given:
        shown = " ".join(repr(prompt) for prompt in given)
        raise InvalidRequestError(
            f"--file {file!r} goes with one prompt or none, and there are: {shown}.",
            hint="Put the prompt into quotation marks, or run the command once for each.",
        )
    return "\n".join([*given, _read(file)])


def _read(file: str) -> str:
    try:
        # Bytes, so that line ends stay as they are.
        return read_bytes(file).decode("utf-8")
    except OSError as error:
        raise InvalidRequestError(
            f"--file {file!r} cannot be read: {error.strerror or error}.", hint="Correct the path."
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"--file {file!r} is no text in UTF-8: byte {error.start} is {error.object[error.start]:#04x}.",
            hint="Convert it first, for example with iconv.",
        ) from error
