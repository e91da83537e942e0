"""What every engine is asked to do; prompts are token ids, equal for all engines of a round."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

__all__ = ["SHORT", "WORKLOADS", "Workload", "workload_of"]

RESERVED = 5  # token ids that a tokenizer may treat as special


@attrs.frozen(kw_only=True)
class Workload:
    """Requests that come at once, all of the same lengths, tokens.

    Attributes:
        name: In results and on the command line.
        num_requests: That come at once.
        prompt_len: Of each.
        output_len: Of each, exactly; with 1 it is the prompts that are counted.
    """

    name: str
    num_requests: int
    prompt_len: int
    output_len: int

    @property
    def title(self) -> str:
        """In the table."""
        if self.is_prefill:
            return f"prefill {self.num_requests} × {self.prompt_len}"
        return f"{self.num_requests} × ({self.prompt_len} + {self.output_len})"

    @property
    def is_prefill(self) -> bool:
        """Whether it is the prompts that are counted."""
        return self.output_len == 1

    @property
    def num_counted_tokens(self) -> int:
        """Tokens that rates are of: outputs, or prompts where there is one output."""
        return self.num_requests * (self.prompt_len if self.is_prefill else self.output_len)

    def prompts(self, *, seed: int, vocab_size: int, text: Sequence[int] = ()) -> list[list[int]]:
        """Return prompts drawn evenly from the vocabulary, or passages of a text where there is one.

        Args:
            seed: Other prompts for each.
            vocab_size: Number of token ids.
            text: Token ids, longer than a prompt, or none.
        """
        source = random.Random(f"{self.name}/{seed}")
        if text:
            starts = [source.randrange(len(text) - self.prompt_len) for _ in range(self.num_requests)]
            return [list(text[start : start + self.prompt_len]) for start in starts]
        return [
            [source.randrange(RESERVED, vocab_size) for _ in range(self.prompt_len)] for _ in range(self.num_requests)
        ]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="batch32", num_requests=32, prompt_len=128, output_len=64),
        Workload(name="streams8", num_requests=8, prompt_len=128, output_len=64),
        Workload(name="single", num_requests=1, prompt_len=128, output_len=64),
        Workload(name="prefill1024", num_requests=1, prompt_len=1024, output_len=1),
        Workload(name="prefill8x512", num_requests=8, prompt_len=512, output_len=1),
    )
}

SHORT = {
    workload.name: workload
    for workload in (
        Workload(name="single", num_requests=1, prompt_len=64, output_len=32),
        Workload(name="streams8", num_requests=8, prompt_len=32, output_len=24),
        Workload(name="batch32", num_requests=32, prompt_len=16, output_len=12),
        Workload(name="prefill1024", num_requests=1, prompt_len=1024, output_len=1),
        Workload(name="prefill8x512", num_requests=8, prompt_len=256, output_len=1),
    )
}
"""The same with fewer tokens, the ones that say most first: what ``--quick`` has time for."""


def workload_of(name: str, *, is_short: bool) -> Workload:
    """Return a workload by its name. Pure."""
    return (SHORT if is_short else WORKLOADS)[name]
