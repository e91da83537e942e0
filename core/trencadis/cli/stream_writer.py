"""Streamed text on a terminal: broken between words at its right edge, without anything that moves the cursor."""

from __future__ import annotations

import shutil
from typing import TextIO

__all__ = ["StreamWriter"]


class StreamWriter:
    """Writes text as it comes; on a terminal a word that does not fit begins the next line.

    Elsewhere text is written as it is.

    Args:
        stream: Where to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._column = 0
        self._word = ""
        self._is_empty = True

    def write(self, text: str) -> None:
        """Write a piece; of its last word, what may still grow waits for the next piece."""
        if not self._is_terminal:
            self._put(text)
        else:
            for char in text:
                self._take(char)
        self._stream.flush()

    def end(self) -> None:
        """Write what is left, and end the line; on a terminal, if there was any text."""
        self._put_word()
        if not (self._is_terminal and self._is_empty):
            self._put("\n")
        self._column = 0
        self._stream.flush()

    def _take(self, char: str) -> None:
        if char == "\n":
            self._put_word()
            self._put("\n")
            self._column = 0
        elif char.isspace():
            self._put_word()
            if 0 < self._column < self._width() - 1:
                self._put(" ")
                self._column += 1
            elif self._column:
                self._put("\n")
                self._column = 0
        else:
            self._word += char if char.isprintable() else "\N{REPLACEMENT CHARACTER}"
            if _cells(char) > 1 or _cells(self._word) >= self._width() - 1:
                # Wide characters are of scripts that break lines anywhere; a word longer than a line is broken as well.
                self._put_word()

    def _put_word(self) -> None:
        cells = _cells(self._word)
        if self._column and self._column + cells > self._width() - 1:
            self._put("\n")
            self._column = 0
        self._put(self._word)
        self._column += cells
        self._word = ""

    def _put(self, text: str) -> None:
        self._is_empty = self._is_empty and not text
        self._stream.write(text)

    @staticmethod
    def _width() -> int:
        return max(10, shutil.get_terminal_size().columns)


def _cells(text: str) -> int:
    """Return how many columns a text takes. Pure."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
