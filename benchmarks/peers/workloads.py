"""What every engine is asked to do; prompts are token ids, equal for all engines of a round."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

__all__ = ["WORKLOADS", "Workload"]

RESERVED = 5  # token ids that a tokenizer may treat as special


@attrs.frozen(kw_only=True)
class Workload:
    """Requests that come at once, all of the same lengths, tokens.

    Attributes:
        name: In results and on the command line.
        title: In the table.
        num_requests: That come at once.
        prompt_len: Of each.
        output_len: Of each, exactly; with 1 it is the prompts that are counted.
    """

    name: str
    title: str
    num_requests: int
    prompt_len: int
    output_len: int

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
        Workload(name="batch32", title="32 × (128 + 64)", num_requests=32, prompt_len=128, output_len=64),
        Workload(name="streams8", title="8 × (128 + 64)", num_requests=8, prompt_len=128, output_len=64),
        Workload(name="single", title="1 × (128 + 64)", num_requests=1, prompt_len=128, output_len=64),
        Workload(name="prefill1024", title="prefill 1 × 1024", num_requests=1, prompt_len=1024, output_len=1),
        Workload(name="prefill8x512", title="prefill 8 × 512", num_requests=8, prompt_len=512, output_len=1),
    )
}
