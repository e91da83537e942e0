from __future__ import annotations

import io
from collections.abc import Iterator

import pytest

from trencadis.cli.generate_command import StreamFigures, write_stream
from trencadis.clock import SimulatedClock
from trencadis.console import stream_text
from trencadis.records import CompletionOutput, RequestOutput


def output(*token_ids: int) -> RequestOutput:
    completion = CompletionOutput(index=0, text="ab" * len(token_ids), token_ids=token_ids, finish_reason=None)
    return RequestOutput(request_id="0", prompt=None, prompt_token_ids=(1,), outputs=(completion,), finished=False)


def test_a_stream_is_written_as_it_grows_and_its_times_are_those_of_its_tokens() -> None:
    clock, out = SimulatedClock(), io.StringIO()
    seen = []

    def outputs() -> Iterator[RequestOutput]:
        for number in range(4):
            clock.advance(0.5)
            yield output(*range(number))
            seen.append(out.getvalue())

    with stream_text(out) as writer:
        last, figures = write_stream(outputs(), writer, clock=clock)
    assert seen == ["", "ab", "abab", "ababab"]
    assert last == output(0, 1, 2)
    assert figures == StreamFigures(num_tokens=3, first_s=1.0, took_s=2.0)
    assert figures.line == "3 tokens · 2.0 tokens/s · first token after 1.00 s"


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        (StreamFigures(num_tokens=0, first_s=None, took_s=1.0), "0 tokens"),
        (StreamFigures(num_tokens=1, first_s=0.25, took_s=0.25), "1 token · first token after 0.25 s"),
    ],
)
def test_figures_that_there_are_none_of_are_left_out(figures: StreamFigures, line: str) -> None:
    assert figures.line == line
