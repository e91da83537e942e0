"""A command on a pseudo-terminal: what a person sees of it, line by line, and what was written past the last column."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyte

from support.eventually import PATIENCE_S

__all__ = ["Terminal", "look_at"]

_HISTORY_LINES = 5000
_PIECE_BYTES = 65536


class _Screen(pyte.HistoryScreen):
    """Notes each line that ran past the last column, and went on in the next one."""

    def __init__(self, columns: int, lines: int) -> None:
        self.wrapped: list[str] = []
        super().__init__(columns, lines, history=_HISTORY_LINES, ratio=0.5)

    def draw(self, data: str) -> None:
        for char in data:
            if self.cursor.x == self.columns:
                self.wrapped.append(self.display[self.cursor.y])
            super().draw(char)


class Terminal:
    """Runs a command on a pseudo-terminal of its own; a context manager that ends the command's process group.

    Args:
        command: The command and its arguments.
        columns: Width.
        rows: Height.
        env: Variables beside those of this process; None as a value removes one.
        cwd: Folder to run in.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        columns: int = 80,
        rows: int = 24,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._screen = _Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self.frames: list[tuple[str, ...]] = []
        """The screen after each piece that was written: what was seen for a moment is in one of them."""
        self._main, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        merged = {
            **os.environ,
            "TERM": "xterm-256color",
            "COLUMNS": None,
            "LINES": None,
            "NO_COLOR": None,
            **(env or {}),
        }
        self.process = subprocess.Popen(
            command,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            cwd=cwd,
            env={name: value for name, value in merged.items() if value is not None},
            preexec_fn=_take_terminal,  # noqa: PLW1509 - one system call, no lock is taken
        )
        os.close(other)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    @property
    def lines(self) -> list[str]:
        """Everything that was written and not taken away, without spaces at the ends of lines."""
        history = ["".join(row[x].data for x in range(self._screen.columns)) for row in self._screen.history.top]
        lines = [line.rstrip() for line in [*history, *self._screen.display]]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def text(self) -> str:
        """:attr:`lines` as one text."""
        return "\n".join(self.lines)

    @property
    def wrapped(self) -> list[str]:
        """Lines that were longer than the terminal is wide."""
        return self._screen.wrapped

    def type(self, text: str) -> None:
        r"""Write text as if it were typed: ``"\r"`` is Enter, ``"\x03"`` Ctrl-C, ``"\x04"`` Ctrl-D."""
        os.write(self._main, text.encode())

    def wait_for(self, words: str, *, within_s: float = PATIENCE_S) -> str:
        """Read until words are on the screen or above it; returns :attr:`text`.

        Raises:
            AssertionError: The command ended or time was up without them; with all that was seen.
        """
        end_s = time.monotonic() + within_s
        while words not in self.text:
            if not self._read(end_s - time.monotonic()):
                raise AssertionError(f"{words!r} is not shown:\n{self.text}")
        return self.text

    def wait(self, *, within_s: float = PATIENCE_S) -> int:
        """Read until the command has ended; returns its status."""
        end_s = time.monotonic() + within_s
        while self._read(end_s - time.monotonic()):
            pass
        return self.process.wait(max(1.0, end_s - time.monotonic()))

    def close(self) -> None:
        """End the command and everything it started."""
        if self._main < 0:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._main)
        self._main = -1

    def _read(self, within_s: float) -> bool:
        """Show what is written next; returns False at the end, and when time is up."""
        if within_s <= 0 or not select.select([self._main], [], [], within_s)[0]:
            return False
        try:
            piece = os.read(self._main, _PIECE_BYTES)
        except OSError:  # Linux: the last process that held the other side has ended
            return False
        if not piece:
            return False
        self._stream.feed(piece)
        self.frames.append(tuple(line.rstrip() for line in self._screen.display))
        return True


def _take_terminal() -> None:
    """Make the pseudo-terminal the one that Ctrl-C is typed at; a shell's background jobs ignore it, and their children do."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def look_at(
    command: Sequence[str],
    *,
    columns: int = 80,
    rows: int = 24,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    within_s: float = 5 * PATIENCE_S,
) -> Terminal:
    """Run a command to its end on a pseudo-terminal; its status is ``process.returncode``. See :class:`Terminal`."""
    with Terminal(command, columns=columns, rows=rows, env=env, cwd=cwd) as terminal:
        terminal.wait(within_s=within_s)
    return terminal
