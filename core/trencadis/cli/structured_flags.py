"""Flags that say what the text must be; one of them at a time."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence

from trencadis.errors import ConfigError, InvalidRequestError
from trencadis.files import read_text
from trencadis.records import FinishReason, RequestOutput, StructuredOutput

__all__ = ["add_structured_flags", "cut_notice", "structured_of"]

_FLAGS = frozenset({"json_schema", "json_object", "regex", "choice", "grammar_file"})
_LIBRARY = "llguidance"
"""Which the extra ``structured`` brings."""


def add_structured_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--json-schema``, ``--json-object``, ``--regex``, ``--choice`` and ``--grammar-file``."""
    title = "structured output (needs the extra: pip install 'trencadis[structured]')"
    group = parser.add_argument_group(title).add_mutually_exclusive_group()
    group.add_argument("--json-schema", metavar="FILE", help="the text is JSON of the schema in this file")
    group.add_argument("--json-object", action="store_true", help="the text is a JSON object")
    group.add_argument("--regex", metavar="REGEX", help="the whole text matches this")
    group.add_argument("--choice", metavar="TEXT", action="append", help="the text is this; repeat it for each choice")
    group.add_argument(
        "--grammar-file",
        metavar="FILE",
        help="the text is of the grammar in this file, in the notation of Lark or GBNF",
    )


def cut_notice(outputs: Sequence[RequestOutput], *, max_tokens: int | None) -> str:
    """Return a line about texts that are not whole because their tokens were used up; empty: all are. Pure."""
    reasons = [completion.finish_reason for output in outputs for completion in output.outputs]
    num_cut = reasons.count(FinishReason.LENGTH)
    if not num_cut:
        return ""
    return (
        f"{num_cut} of {len(reasons)} texts were cut after {max_tokens} tokens and are not whole: raise --max-tokens.\n"
    )


def structured_of(args: argparse.Namespace) -> StructuredOutput | None:
    """Return what the flags ask the text to be; None: anything. Reads the file that they name.

    Raises:
        ConfigError: The extra that this needs is not installed.
        InvalidRequestError: The file cannot be read, or what it holds is not what the flag says.
    """
    for flag, value in vars(args).items():
        if flag in _FLAGS and value:
            _check_extra(f"--{flag.replace('_', '-')}")
    if args.json_schema is not None:
        return StructuredOutput.json_schema(_read("--json-schema", args.json_schema))
    if args.json_object:
        return StructuredOutput.json_object()
    if args.regex is not None:
        return StructuredOutput.regex(args.regex)
    if args.choice is not None:
        return StructuredOutput.choice(args.choice)
    if args.grammar_file is not None:
        return StructuredOutput.grammar(_read("--grammar-file", args.grammar_file))
    return None


def _check_extra(flag: str) -> None:
    """Refuse a flag whose library is missing, before a model is loaded for it."""
    if importlib.util.find_spec(_LIBRARY) is None:
        raise ConfigError(
            f"{flag}: structured output needs {_LIBRARY}, which is not installed.",
            hint='Run pip install "trencadis[structured]".',
        )


def _read(flag: str, name: str) -> str:
    try:
        return read_text(name).replace("\r\n", "\n")
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"{flag} {name!r} cannot be read: {error}.", hint="Correct the path.") from error
