"""Prints an answer while it comes, and says at the end how fast it came."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from trencadis.clock import Clock, SystemClock
from trencadis.console import TextWriter
from trencadis.records import RequestOutput

__all__ = ["StreamFigures", "write_stream"]


@attrs.frozen(kw_only=True)
class StreamFigures:
    """How fast an answer came.

    Attributes:
        num_tokens: Tokens of the answer.
        first_s: Seconds until the first token; None if there was none.
        took_s: Seconds until the last one.
    """

    num_tokens: int
    first_s: float | None
    took_s: float

    @property
    def line(self) -> str:
        """In words: ``64 tokens · 87.4 tokens/s · first token after 0.21 s``. Tokens per second are those after the first."""
        parts = [f"{self.num_tokens} token{'' if self.num_tokens == 1 else 's'}"]
        if self.first_s is not None:
            if self.num_tokens > 1 and self.took_s > self.first_s:
                parts.append(f"{(self.num_tokens - 1) / (self.took_s - self.first_s):.1f} tokens/s")
            parts.append(f"first token after {self.first_s:.2f} s")
        return " · ".join(parts)


def write_stream(
    outputs: Iterable[RequestOutput], writer: TextWriter, *, clock: Clock | None = None
) -> tuple[RequestOutput, StreamFigures]:
    """Write the text of the first completion as it comes.

    Args:
        outputs: Outputs of one request, each with the whole text so far; at least one.
        writer: Writes.
        clock: Measures, from now on; the system's if none.

    Returns:
        The last output, and how fast it came.
    """
    clock = clock or SystemClock()
    start_s, first_s, num_written = clock.now_s(), None, 0
    last: RequestOutput | None = None
    for last in outputs:
        completion = last.outputs[0]
        if first_s is None and completion.token_ids:
            first_s = clock.now_s() - start_s
        writer.write(completion.text[num_written:])
        num_written = len(completion.text)
    if last is None:
        raise ValueError("a stream without an output.")
    took_s = clock.now_s() - start_s
    return last, StreamFigures(num_tokens=len(last.outputs[0].token_ids), first_s=first_s, took_s=took_s)
