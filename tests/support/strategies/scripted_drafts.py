"""Drafters for whole engines, by import path: runs of every length, right and wrong, with distributions and without."""

from __future__ import annotations

import random
from typing import ClassVar

import numpy as np

from trencadis.interfaces import DraftView, Speculator
from trencadis.records import DraftDistributions, Drafts, Int32Array, Request


class EveryLength(Speculator):
    """Drafts 0 to 7 tokens by the length of the sequence, out of a text that is told beforehand or, half of the time, at random.

    Attributes:
        texts: Outputs by request id; shared by all instances.
        lengths: Of all runs so far; shared too.
        vocab_size: Of the model.
    """

    texts: ClassVar[dict[str, list[int]]] = {}
    vocab_size = 131
    lengths: ClassVar[set[int]] = set()
    max_draft_tokens = 7

    def propose(self, view: DraftView) -> Drafts:
        """Return a run for each."""
        runs = [
            self._run(tokens.tolist(), request)[:most]
            for tokens, request, most in zip(view.token_ids, view.requests, view.max_draft_tokens.tolist(), strict=True)
        ]
        self.lengths.update(map(len, runs))
        token_ids = np.array([token for run in runs for token in run], np.int32)
        return Drafts(
            num_drafts=np.array([len(run) for run in runs], np.int32),
            token_ids=token_ids,
            distributions=self._distributions_of(token_ids) if len(token_ids) else None,
        )

    def _run(self, known: list[int], request: Request) -> list[int]:
        rng = random.Random(len(known) * 31 + known[-1])
        rest = self.texts.get(request.request_id, [])[len(known) - len(request.prompt_token_ids) :]
        count = rng.randrange(8)
        if rest and rng.random() < 0.6:
            place = rng.randrange(min(3, len(rest)))
            rest = [*rest[:place], (rest[place] + 1) % self.vocab_size, *rest[place + 1 :]]
        return (rest + [rng.randrange(3, self.vocab_size) for _ in range(count)])[:count]

    def _distributions_of(self, token_ids: Int32Array) -> DraftDistributions | None:
        return None


class DrawnLengths(EveryLength):
    """The same drafts; half of each made-up distribution by which they were drawn is on the draft itself."""

    def _distributions_of(self, token_ids: Int32Array) -> DraftDistributions:
        import torch

        distributions = torch.full((len(token_ids), self.vocab_size), 0.5 / (self.vocab_size - 1))
        distributions[torch.arange(len(token_ids)), torch.from_numpy(token_ids).long()] = 0.5
        return DraftDistributions(rows=np.arange(len(token_ids), dtype=np.int32), probabilities=distributions)
