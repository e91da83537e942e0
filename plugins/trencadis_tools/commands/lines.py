"""Sentences that commands print: wrapped to the width of a terminal, elsewhere one line each."""

from __future__ import annotations

import shutil
import sys
import textwrap

__all__ = ["say"]


def say(sentences: str = "") -> None:
    """Print sentences on standard output.

    Args:
        sentences: Text of one paragraph.
    """
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        sentences = textwrap.fill(sentences, width, break_long_words=False, break_on_hyphens=False)
    print(sentences)
