"""What a driver says to the benchmark: JSON lines, one question and one reply at a time. Only the standard library.

::

    {"do": "load", ...}   ▶  {"reply": "load", "versions": {...}}
    {"do": "run", ...}    ▶  {"reply": "run", "wall_s": 1.5, ...}
    {"do": "score", ...}  ▶  {"reply": "score", "logprobs": [[-2.5, ...], ...]}
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
from dataclasses import dataclass
from importlib import metadata
from typing import Any

__all__ = ["Opened", "Wanted", "drive", "serve", "versions_of"]


@dataclass(frozen=True)
class Wanted:
    """What an engine is to be opened with.

    Attributes:
        model: File or directory, as the engine reads it.
        precision: ``fp32``, ``bf16``, ``int8``, ``int4``, or that of a published file.
        threads: To compute with.
        max_num_seqs: Requests that come at once, at most.
        max_model_len: Longest prompt and output together, tokens.
        max_num_tokens: Of all requests that come at once.
        options: Settings of this engine alone.
    """

    model: str
    precision: str
    threads: int
    max_num_seqs: int
    max_model_len: int
    max_num_tokens: int
    options: dict[str, Any]


@dataclass(frozen=True)
class Opened:
    """An engine that is loaded.

    Attributes:
        versions: For the table.
        generate: From prompts, all at once, and a number of tokens to the tokens.
        score: From texts to the natural logarithm of the probability of each token but the first, NaN for one of which it cannot say it;
            None: it cannot say any.
    """

    versions: dict[str, str]
    generate: Callable[[list[list[int]], int], Sequence[Sequence[int]]]
    score: Callable[[list[list[int]]], Sequence[Sequence[float]]] | None = None


def drive(open_engine: Callable[[Wanted], Opened]) -> None:
    """Answer for one engine until the input ends.

    Args:
        open_engine: Loads it.
    """
    opened: list[Opened] = []

    def load(**wanted: Any) -> dict[str, Any]:
        opened[:] = [open_engine(Wanted(**wanted))]
        return {"versions": opened[0].versions}

    def run(prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        start_s = time.perf_counter()
        tokens = opened[0].generate(prompts, output_len)
        wall_s = time.perf_counter() - start_s
        return {"wall_s": wall_s, "tokens": [[int(token) for token in row] for row in tokens]}

    def score(texts: list[list[int]]) -> dict[str, Any]:
        if opened[0].score is None:
            raise ValueError("it does not tell the probability of a given token")
        return {"logprobs": [[float(one) for one in row] for row in opened[0].score(texts)]}

    serve(load=load, run=run, score=score)


def serve(**commands: Callable[..., dict[str, Any]]) -> None:
    """Answer questions until the input ends.

    Args:
        commands: By the name in ``do``; called with what else the question holds, returns what else the reply holds.
    """
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


def versions_of(*names: str) -> dict[str, str]:
    """Return versions of installed distributions, and of Python."""
    found = {"python": sys.version.split()[0]}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
