"""Bodies of a great many lists and objects, found before they are parsed.

Parsing cannot be interrupted, and each new list or object that the garbage collector follows makes it look at all others again and again:
15 MB of empty lists would keep every other client waiting for three seconds. No request needs so many.
"""

from __future__ import annotations

import asyncio
import re

from trencadis.server.errors import ApiError

__all__ = ["MAX_CONTAINERS", "ContainerCheck"]

MAX_CONTAINERS = 200_000
"""Lists and objects of a body; three for each of the most messages are a quarter of it, and are parsed in a tenth of a second."""
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[{]', re.DOTALL)
"""A string, which may have no end, or what opens a list or an object. Possessive: a long string takes no memory."""


class ContainerCheck:
    """Refuses bodies with too many lists and objects. Event loop only.

    Args:
        max_containers: The most that a body may have.
    """

    def __init__(self, max_containers: int = MAX_CONTAINERS) -> None:
        self._max = max_containers
        self._gate = asyncio.Semaphore(1)

    async def check(self, body: bytes) -> None:
        """Check a body, whatever it is; a large one costs a millisecond a megabyte.

        Raises:
            ApiError: It has too many.
        """
        if len(body) <= self._max or body.count(b"[") + body.count(b"{") <= self._max:
            return
        # Many brackets; they may be text. Who looks closer does so beside the event loop, which goes on between two tokens.
        async with self._gate:
            has_too_many = await asyncio.to_thread(_has_more, body, self._max)
        if has_too_many:
            raise ApiError(
                400,
                f"The body has more than {self._max} lists and objects. Send a smaller request.",
                code="too_many_values",
            )


def _has_more(body: bytes, limit: int) -> bool:
    """Return whether JSON has more than ``limit`` lists and objects; stops when that is known. Pure."""
    num = 0
    for token in _TOKEN.finditer(body):
        if token[0][:1] != b'"':
            num += 1
            if num > limit:
                return True
    return False
