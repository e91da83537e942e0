"""Compiles grammars on trial in a subprocess with bounded time and memory: llguidance can be neither interrupted nor bounded.

    stdin: one JSON line per grammar ─▶ notation ▶ LLMatcher ▶ first mask ─▶ stdout: one JSON line, the grammar or why there is none

A schema of 41 characters may take ten seconds, a regex of 64 KB many minutes; what came through here costs at most as much again. The
process runs this file alone, which therefore imports nothing of Trencadís.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import resource
import signal
import sys
import time
from typing import Any, Final

__all__ = ["LIMITS", "MAX_BYTES", "MAX_CPU_S", "main", "reason_of"]

MAX_CPU_S: Final = 3.0
"""Limit of one grammar, seconds of CPU, rounded up; a schema of five properties takes 0.002, the largest that is allowed 0.3."""

MAX_BYTES: Final = 1 << 30
"""Address space of the process, which itself takes a tenth of it."""

LIMITS: Final[dict[str, Any]] = {
    "max_grammar_size": 20_000,
    "initial_lexer_fuel": 300_000,
    "step_lexer_fuel": 30_000,
    "max_lexer_states": 50_000,
    "verbose_errors": False,
}
"""Values of ``LLParserLimits``. Size: symbols, such as those of an object with 2,000 properties. Fuel: bounds a mask, to some
tens of milliseconds with 131,072 tokens."""

_WHITE_SPACE = " "
"""Between the signs of JSON: one space or nothing. Small models never leave off where they may indent, until their tokens are used up."""

_MAX_KEPT_BYTES = 256 << 20
"""Most memory that the process may hold after a grammar; beyond it ends, and the next one begins afresh."""

_NICENESS = 10
"""Added to the engine's: beside it on one core a trial gets a tenth of the time; with 5 it got a quarter, and three run at once."""
_PR_SET_PDEATHSIG = 1
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_FORMATS = frozenset(
    [
        "date-time",
        "date",
        "time",
        "duration",
        "email",
        "idn-email",
        "hostname",
        "idn-hostname",
        "ipv4",
        "ipv6",
        "uri",
        "uri-reference",
        "iri",
        "iri-reference",
        "uuid",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    ]
)
"""Formats that say something; of these, llguidance refuses those that it cannot keep to.

Source: JSON Schema 2020-12, Validation, 7.3.
"""
_VALUES = frozenset({"const", "default", "enum", "examples"})
"""Keywords that hold values, not schemas."""
_NAMED = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords that hold schemas by name, such as a property with the name format."""
_BARREN = "no text is of this kind."


def reason_of(matcher: Any) -> str:
    """Return why a matcher cannot be used, after its first mask was computed; empty: it can. Pure."""
    # The first mask compiles what the constructor left for later.
    if not matcher.is_error():
        matcher.compute_bitmask()
    reason = str(matcher.get_error()).strip()
    is_barren = matcher.is_stopped() and not matcher.is_accepting() and not reason
    return _BARREN if is_barren or reason.startswith("NoExtension") else reason


def main() -> None:
    """Serve the process at the other end of the pipe until it closes."""
    _end_with(os.getppid())
    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import llguidance

    setup = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_ByteTokens(setup)))
    for line in sys.stdin:
        # A signal ends the process when the time is up, whatever it is doing.
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + setup["max_cpu_s"]), hard))
        sys.stdout.write(json.dumps(_tried(llguidance, tokenizer, **json.loads(line))) + "\n")
        sys.stdout.flush()
        if _resident_bytes() > _MAX_KEPT_BYTES:
            return


def _tried(library: Any, tokenizer: Any, *, kind: str, text: str, choices: list[str]) -> dict[str, Any]:
    before = _held_bytes()
    try:
        grammar = _grammar_text(library, kind, text, choices)
    except Exception as error:  # the notation is read in Python, by a parser that may fail in any way
        return {"reason": str(error) or type(error).__name__}
    matcher = library.LLMatcher(tokenizer, grammar, log_level=0, limits=library.LLParserLimits(**LIMITS))
    reason = reason_of(matcher)
    return {"reason": reason} if reason else {"grammar": grammar, "num_bytes": max(_held_bytes() - before, 0)}


def _grammar_text(library: Any, kind: str, text: str, choices: list[str]) -> str:
    """Return the grammar in the library's format. Pure."""
    match kind:
        case "json_schema" | "json_object":
            schema = _without_unknown_formats(text or '{"type": "object"}')
            return str(library.LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": _WHITE_SPACE}))
        case "choice":
            # One terminal: as alternatives of a rule more than 2,000 would be too many for the parser. A terminal is never empty.
            texts = " | ".join(json.dumps(choice) for choice in choices if choice)
            optional = "?" if "" in choices else ""
            return f"start: CHOICE{optional}\nCHOICE: {texts}" if texts else 'start: ""'
        case _:
            is_gbnf = kind == "grammar" and "::=" in text
            return str(library.grammar_from(kind, _ESCAPE.sub(_written_out, text) if is_gbnf else text))


def _written_out(escape: re.Match[str]) -> str:
    """Return an escape of GBNF as llguidance's converter reads it: it drops the zeros of code points. Pure."""
    digits = escape[1] or escape[2] or ""
    code = int(digits, 16) if digits else 0
    if not digits or code > sys.maxunicode or 0xD800 <= code < 0xE000:  # another escape, or no character
        return escape[0]
    return chr(code) if code >= 0xA0 else f"\\x{code:02x}"


def _without_unknown_formats(text: str) -> str:
    """Return a schema without the formats that JSON Schema does not define, such as ``password``: they say nothing of the text. Pure.

    Source: JSON Schema 2020-12, Validation, 7.2.3: what an implementation does not know of ``format`` is an annotation.
    """
    schema = json.loads(text)
    without = _without_formats(schema)
    return text if without == schema else json.dumps(without)


def _without_formats(part: Any) -> Any:
    if isinstance(part, list):
        return [_without_formats(one) for one in part]
    if not isinstance(part, dict):
        return part
    kept: dict[str, Any] = {}
    for key, value in part.items():
        if key in _VALUES:
            kept[key] = value
        elif key in _NAMED and isinstance(value, dict):
            kept[key] = {name: _without_formats(one) for name, one in value.items()}
        elif key != "format" or not isinstance(value, str) or value in _FORMATS:
            kept[key] = _without_formats(value)
    return kept


class _ByteTokens:
    """A vocabulary of single bytes with the model's special tokens: small, and sufficient for a trial.

    Args:
        setup: ``num_tokens`` of the model, ``eos_token_id``, and ``special``: pairs of id and text.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._num_tokens: int = setup["num_tokens"]
        self.eos_token_id: int = setup["eos_token_id"]
        self.bos_token_id = None
        self.tokens = [b""] * self._num_tokens + [bytes([one]) for one in range(256)]
        for token, name in setup["special"]:
            self.tokens[token] = name.encode("latin-1")
        self.special_token_ids = [token for token, _ in setup["special"]]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # bytes are refused, by which the library learns to come with text
            raise TypeError("this tokenizer reads text")
        return [self._num_tokens + byte for byte in text.encode()]


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2``. Source: mallinfo(3)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def _held_bytes() -> int:
    """Return the allocated bytes; resident ones if malloc does not report them.

    Resident memory does not grow by what fits into what an earlier grammar has left.
    """
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # not glibc, or one before 2.33
        return _resident_bytes()
    ask.restype = _MallInfo
    info = ask()
    return int(info.uordblks + info.hblkhd)


def _resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _end_with(parent: int) -> None:
    """Have the process killed when its parent ends. Source: prctl(2), PR_SET_PDEATHSIG."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:
            sys.exit()


if __name__ == "__main__":
    main()
