"""Work beside the event loop: short texts at once, long ones on a thread, so that streams go on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Encoder"]

_T = TypeVar("_T")
_MAX_INLINE_CHARACTERS = 2000
"""About one millisecond of work; handing it to a thread costs a tenth of that."""


class Encoder:
    """Keeps the work of long texts off the event loop, and the memory of it bounded. Event loop only.

    Args:
        max_threads: Long texts that are worked on at once; each may take a hundred bytes a token.
        max_inline: Characters of the longest text that is worked on at once.
    """

    def __init__(self, max_threads: int = 2, *, max_inline: int = _MAX_INLINE_CHARACTERS) -> None:
        self._gate = asyncio.Semaphore(max_threads)
        self._max_inline = max_inline

    async def run(self, call: Callable[[], _T], *, num_characters: int) -> _T:
        """Return what ``call`` returns.

        Args:
            call: Uses the tokenizer, or parses; touches nothing else.
            num_characters: Length of its text, or what takes as long.
        """
        if num_characters <= self._max_inline:
            return call()
        async with self._gate:
            return await asyncio.to_thread(call)
