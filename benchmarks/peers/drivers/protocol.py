"""What a driver says to the benchmark: JSON lines, one question and one reply at a time. Only the standard library.

::

    {"do": "load", ...}   ▶  {"reply": "load", ...}
    {"do": "ready", ...}  ▶  {"reply": "ready"}                      what is not measured: room for the sizes that come next
    {"do": "run", ...}    ▶  {"reply": "run", "wall_s": 1.5, ...}
    anything that fails   ▶  {"reply": "error", "message": "ValueError: ..."}
    end of input          ▶  the driver ends

Runs under the Python of each peer. What libraries print goes to standard error, so that nothing gets between the lines.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

__all__ = ["serve", "timed", "versions_of"]


def serve(**commands: Callable[..., dict[str, Any]]) -> None:
    """Answer questions until the input ends.

    Args:
        commands: By the name in ``do``; called with what else the question holds, returns what else the reply holds.
    """
    commands.setdefault("ready", lambda **_: {})
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        question = json.loads(line)
        name = question.pop("do")
        try:
            reply = {"reply": name, **commands[name](**question)}
        except Exception as error:  # the benchmark goes on without this engine, and says why
            reply = {"reply": "error", "message": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


def timed(generate: Callable[[list[list[int]], int], Sequence[Sequence[int]]]) -> Callable[..., dict[str, Any]]:
    """Return the command ``run`` of a function from prompts and a number of tokens to the tokens."""

    def run(prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        start_s = time.perf_counter()
        tokens = generate(prompts, output_len)
        wall_s = time.perf_counter() - start_s
        return {"wall_s": wall_s, "tokens": [[int(token) for token in row] for row in tokens]}

    return run


def versions_of(*names: str) -> dict[str, str]:
    """Return versions of installed distributions, and of Python."""
    found = {"python": sys.version.split()[0]}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
