"""Renders chat templates in a subprocess with bounded time and memory: a template is a program that comes with a checkpoint.

    stdin: one JSON line per conversation ─▶ Jinja, sandboxed ─▶ stdout: one JSON line, the text or why there is none

The process runs this file alone, which therefore imports nothing of Trencadís; Jinja alone takes 0.07 s of CPU and 20 MB, transformers'
own rendering 1.8 s and 74 MB. Source of the environment: transformers' ``utils/chat_template_utils.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import html
import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, Final

import jinja2
import jinja2.debug  # else imported at the first error, when no file can be opened
import jinja2.ext
import jinja2.sandbox

__all__ = ["MAX_BYTES", "appears", "main"]

MAX_BYTES: Final = 1 << 30
"""Address space of the process, which itself takes a tenth of it."""

_MAX_GROWTH = 8
_MIN_TEXT = 1 << 20
"""A text may be ``_MAX_GROWTH`` times as long as what it is made of, and ``_MIN_TEXT`` characters in any case."""

_MAX_KEPT_BYTES = 256 << 20
"""Resident memory with which the process may wait for the next conversation; beyond it ends, and another one begins afresh."""

_PR_SET_PDEATHSIG = 1
_WINDOW = 32
"""Characters at the end of a long text that prove, where a template changes texts, that it was written."""


def main() -> None:
    """Serve the process at the other end of the pipe until it closes."""
    _end_with(os.getppid())
    _render("{{ strftime_now('%Y') }}{{ x | tojson }}{{ x | upper }}", {"x": "a"})  # whatever is read late is read now
    resident_bytes = _resident()
    _close_doors()
    for line in sys.stdin:
        job = json.loads(line)
        # A signal ends the process when the time is up, whatever it is doing.
        signal.setitimer(signal.ITIMER_PROF, job["max_cpu_s"])
        answer = _answer(job, num_bytes=len(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        if resident_bytes() > _MAX_KEPT_BYTES:
            return


def _answer(job: dict[str, Any], *, num_bytes: int) -> dict[str, Any]:
    """Return ``text`` and ``lost``, the numbers of the texts that do not appear in it; or ``error``."""
    try:
        text = _render(job["template"], job["variables"], max_characters=max(_MIN_TEXT, _MAX_GROWTH * num_bytes))
        return {"text": text, "lost": _lost(text, job["texts"])}
    except MemoryError:
        return {"error": f"it takes more than {MAX_BYTES >> 20} MiB of memory"}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except Exception as error:  # a template is a program: it may raise anything
        return {"error": str(error) or type(error).__name__}


# ---------------------------------------------------------------------------------------------------------- rendering


def _render(template: str, variables: dict[str, Any], *, max_characters: int = _MIN_TEXT) -> str:
    """Return what a template writes.

    Raises:
        Exception: Whatever the template raises; ``ValueError`` for more characters than allowed.
    """
    pieces, length = [], 0
    for piece in _compiled(template).generate(**variables):
        pieces.append(piece)
        length += len(piece)
        if length > max_characters:
            raise ValueError(f"it writes more than {max_characters} characters")
    return "".join(pieces)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)  # noqa: A006 - the name they use
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """The block ``{% generation %}``, which marks for trainers what the assistant said; here it writes what is in it."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja has it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_write"), [], [], body).set_lineno(line)

    def _write(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own escapes the signs of HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Dict:
    """``dict`` for templates, without the attributes of a class."""

    def __call__(self, *args: Any, **named: Any) -> dict[Any, Any]:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` for templates, which may not set attributes of Python's own."""

    def __init__(*args: Any, **named: Any) -> None:
        # Without a name for the first argument, so that `namespace(self=...)` works.
        own, rest = args[0], args[1:]
        given = dict(*rest, **named)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(own, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name!r}")


# ---------------------------------------------------------------------------------------------------------- lost texts


def _lost(rendered: str, texts: list[str]) -> list[int]:
    """Return the numbers of texts that do not appear. Pure."""
    if not texts:
        return []
    written = _Written(rendered)
    return [number for number, text in enumerate(texts) if not written.has(text)]


def appears(text: str, rendered: str) -> bool:
    """Return whether a template wrote a text, maybe trimmed, escaped or with some of its marks taken out. Pure."""
    return _Written(rendered).has(text)


class _Written:
    """A rendered conversation, searched for texts, which mostly come in order."""

    def __init__(self, rendered: str) -> None:
        self._packed = _packed(rendered)
        self._at = 0

    def has(self, text: str) -> bool:
        """Return whether the text was written: as it is, escaped as JSON or HTML, or its end, or all of its words."""
        return any(self._find(one) for one in _spellings(text)) or self._has_words(text)

    def _find(self, packed: str) -> bool:
        for start in (self._at, 0):
            found = self._packed.find(packed, start)
            if found >= 0:
                self._at = found + len(packed)
                return True
        return False

    def _has_words(self, text: str) -> bool:
        words = re.findall(r"\w+", text[: 64 * _WINDOW])[:_WINDOW]
        return bool(words) and all(word in self._packed for word in words)


def _spellings(text: str) -> Iterator[str]:
    packed = _packed(text)
    yield packed
    for ensure_ascii in (False, True):
        yield _packed(json.dumps(text.strip(), ensure_ascii=ensure_ascii)[1:-1])
    yield _packed(html.escape(text))
    if len(packed) > _WINDOW:
        yield packed[-_WINDOW:]


def _packed(text: str) -> str:
    """Return a text without white space, which templates add and remove. Pure."""
    return "".join(text.split())


# ---------------------------------------------------------------------------------------------------------- the process


def _close_doors() -> None:
    """Bound memory, and leave no way to open a file or to start a process, should a template get out of the sandbox."""
    time.localtime()  # reads the time zone
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    for door in ("RLIMIT_NOFILE", "RLIMIT_NPROC"):
        with contextlib.suppress(ValueError, OSError, AttributeError):  # a system that does not allow it
            resource.setrlimit(getattr(resource, door), (0, 0))


def _resident() -> Callable[[], int]:
    """Return what says how much memory the process has, read from a file that is opened now.

    The peak that ``getrusage`` says begins, on Linux, with that of the process which started this one.
    """
    try:
        file = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    page = os.sysconf("SC_PAGE_SIZE")
    return lambda: int(os.pread(file, 64, 0).split()[1]) * page


def _end_with(parent: int) -> None:
    """Have the process killed when the thread that started it ends. Source: prctl(2), PR_SET_PDEATHSIG."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:
            sys.exit()


if __name__ == "__main__":
    main()
