"""``trencadis chat``: a conversation on a terminal, or a message from each line of standard input."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

from trencadis.cli.chat_words import LEAVE, obey
from trencadis.cli.conversation import CHAT_DEFAULTS, Conversation, check_one_answer
from trencadis.cli.sampling_flags import add_sampling_flags, sampling_params_of
from trencadis.client.llm import LLM
from trencadis.config import Config
from trencadis.console import dimmed, stream_text, write_line
from trencadis.errors import PromptTooLongError, RequestError, StepFailedError
from trencadis.registry import Registry

__all__ = ["TAKES_MODEL", "NEEDS_ALL_PLUGINS", "TERMINAL_LOG_LEVELS", "add_arguments", "converse", "run"]

TAKES_MODEL = True
NEEDS_ALL_PLUGINS = False
TERMINAL_LOG_LEVELS = "warning", "warning"

_PROMPT = ">>> "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own flags."""
    parser.epilog = (
        "Ctrl-C stops an answer, Ctrl-D leaves, /help lists the words that change the conversation. "
        "From a pipe each line is a message, and standard output gets the answers alone."
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="what the model is told first")
    add_sampling_flags(parser, defaults=CHAT_DEFAULTS)


def run(args: argparse.Namespace, config: Config, registry: Registry) -> int:
    """Converse until the input ends; returns 0.

    Raises:
        RequestError: Impossible sampling parameters, a model that cannot chat, or a message from a pipe that is refused.
        TrencadisError: The model cannot be loaded.
    """
    params = sampling_params_of(args, defaults=CHAT_DEFAULTS)
    check_one_answer(params)
    with LLM.from_config(config, registry) as llm:
        converse(Conversation(llm, params, system=args.system), model=config.model.path)
    return 0


def converse(conversation: Conversation, *, model: str) -> None:
    """Answer lines of standard input until it ends.

    On a terminal a message that is refused or fails is said in words, and the conversation goes on; from a pipe it ends it.

    Args:
        conversation: Is changed.
        model: Named in the greeting.

    Raises:
        RequestError: A message from a pipe is refused.
        StepFailedError: The request failed.
    """
    is_seen = sys.stdin.isatty() and sys.stdout.isatty()
    if is_seen:
        _note(f"{model}: /help lists the words, {LEAVE} or Ctrl-D leaves.")
    for line in _typed() if is_seen else map(_without_end, sys.stdin):
        if line.strip() == LEAVE:
            return
        if not line.strip():
            continue
        try:
            if line.startswith("/"):
                _note(obey(line, conversation))
            else:
                _answer(conversation, line.strip(), can_stop=is_seen)
        except (RequestError, StepFailedError) as error:
            if not is_seen:
                raise
            more = " /reset forgets what was said." if isinstance(error, PromptTooLongError) else ""
            write_line(f"error: {error}{more}")


def _without_end(line: str) -> str:
    return line.rstrip("\r\n")


def _typed() -> Iterator[str]:
    """Yield lines as they are typed, with a history to go back in; Ctrl-C takes back the line, Ctrl-D ends."""
    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # noqa: F401 - input() uses it once it is imported
    while True:
        try:
            yield input(_PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            _note(f"{LEAVE} or Ctrl-D leaves.")


def _answer(conversation: Conversation, message: str, *, can_stop: bool) -> None:
    interrupts: list[int] = []
    with contextlib.ExitStack() as stack:
        if can_stop:
            interrupts = stack.enter_context(_interrupts())
            stack.enter_context(_no_echo())
        writer = stack.enter_context(stream_text())
        for piece in conversation.answer(message, stops=lambda: bool(interrupts)):
            writer.write(piece)
    if interrupts:
        _note("(stopped)")
    elif conversation.was_cut:
        _note(f"(cut after {conversation.params.max_tokens} tokens; /set max_tokens allows more)")


@contextlib.contextmanager
def _no_echo() -> Iterator[None]:
    """Keep what is typed while the block runs out of the answer; it is read afterwards."""
    try:
        import termios
    except ImportError:  # Windows
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = termios.tcgetattr(sys.stdin)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


@contextlib.contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Collect Ctrl-C while the block runs: raised within a step it would leave the engine half way. A second one is raised."""
    came: list[int] = []

    def note(number: int, frame: Any) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def _note(text: str) -> None:
    """Print what is no answer: dimmed on a terminal, on standard error where standard output is not one."""
    if not sys.stdout.isatty():
        if text:
            write_line(text)
        return
    width = max(20, shutil.get_terminal_size().columns - 1)
    for line in text.splitlines():
        write_line(dimmed(textwrap.fill(line, width, replace_whitespace=False), sys.stdout), stream=sys.stdout)
