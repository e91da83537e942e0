"""Chooses tokens for a draft model, and keeps the distributions that they were drawn from.

Shapes: L logits rows in a call, V vocabulary of the draft model, W most likely tokens that are kept.
"""

from __future__ import annotations

import attrs
import numpy as np
import torch

from trencadis.interfaces import AcceptanceRule, Sampled, Sampler, SamplingContext, Verification
from trencadis.records import BoolArray, RowStart, SamplingParams
from trencadis_plugins.sampling.arithmetic import likeliest
from trencadis_plugins.sampling.drawing import draw, num_times
from trencadis_plugins.sampling.min_p import MinP
from trencadis_plugins.sampling.philox import Purpose, RowNumbers
from trencadis_plugins.sampling.temperature import Temperature
from trencadis_plugins.sampling.top_k import TopK
from trencadis_plugins.sampling.top_p import TopP

__all__ = ["DraftSampler", "Echo", "Guesses"]


@attrs.frozen(kw_only=True, eq=False)
class Guesses:
    """Output of the draft model in one call.

    Attributes:
        rows: Device row of each logits row, on the host, ``[L]``. A row's come in the order of its tokens; padding repeats
            some, after the real ones.
        positions: Position of the token that yields each, on the host, ``[L]``.
        token_ids: Chosen tokens, int64 ``[L]``.
        distributions: By which they were drawn, float32 ``[L, V]``; None if nothing was drawn.
        top: Log-probabilities of the most likely tokens, best first, float32 ``[L, W]``, and the tokens, int64 ``[L, W]``; None if
            none are kept.
    """

    rows: tuple[int, ...]
    positions: tuple[int, ...]
    token_ids: torch.Tensor
    distributions: torch.Tensor | None = None
    top: tuple[torch.Tensor, torch.Tensor] | None = None


class DraftSampler(Sampler):
    """Takes the most likely token, or draws with the request's temperature and truncations.

    A draw belongs to the row's seed, the position, and the number of tokens that were known when the row started: it is
    independent of every draw that samples or verifies, and of those of earlier steps for the same position, on which it may have
    depended that the text is what it is.

    Args:
        num_kept: How many of the most likely tokens are kept of each logits row.

    Attributes:
        closed: Tokens that are never chosen, bool ``[V]``; None: there are none.
    """

    def __init__(self, *, num_kept: int = 0) -> None:
        self._num_kept = num_kept
        self._is_static = False
        self.closed: BoolArray | None = None
        self._closed: torch.Tensor | None = None
        self._taken: list[Guesses] | None = None
        # The order of the standard sampler. Drafts are accepted the oftener, the nearer their distribution comes to the target's.
        self._chain = (Temperature(), MinP(), TopK(), TopP())

    def use_static_shapes(self) -> tuple[SamplingParams, ...]:
        """Work with static shapes from now on: one path that draws nothing, and one that draws."""
        self._is_static = True
        return SamplingParams(temperature=0.0), SamplingParams(temperature=0.7)

    def close_tokens(self, closed: BoolArray) -> None:
        """Never choose some tokens; before ``allocate``.

        Args:
            closed: Which, bool ``[V]``.
        """
        self.closed = closed.copy() if closed.any() else None
        self._closed = None if self.closed is None else torch.from_numpy(self.closed)

    def allocate(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Make room for ``num_rows`` sequences."""
        self._is_greedy = np.ones(num_rows, np.bool_)
        self._keys = np.zeros((num_rows, 2), np.int64)
        self._rounds = np.zeros(num_rows, np.int64)
        if self._closed is not None:
            self._closed = self._closed.to(device)
        for processor in self._chain:
            processor.allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)

    def start_row(self, start: RowStart) -> None:
        """Take the parameters and the seed of a sequence; forgets what the row held."""
        self._is_greedy[start.row] = start.params.is_greedy
        self._keys[start.row] = start.seed & 0xFFFFFFFF, start.seed >> 32
        self._rounds[start.row] = len(start.token_ids)
        for processor in self._chain:
            processor.start_row(start)

    @torch.no_grad()
    def sample(self, logits: torch.Tensor, context: SamplingContext) -> Sampled:
        """Choose a token for each logits row.

        Args:
            logits: ``[L, V]`` in the model's dtype; overwritten if float32.
            context: Whose they are.
        """
        logits = logits.float()
        if self._closed is not None:
            logits = logits.masked_fill(self._closed, -torch.inf)
        rows = np.asarray(context.rows, np.intp)
        is_greedy = self._is_greedy[rows]
        top = _largest(logits.log_softmax(-1), self._num_kept) if self._num_kept else None
        token_ids, distributions = likeliest(logits), None
        if not is_greedy.all():
            drawn, distributions = self._draw(logits, context, rows)
            token_ids = torch.where(torch.as_tensor(is_greedy, device=logits.device), token_ids, drawn)
        if self._taken is not None:
            self._taken.append(
                Guesses(
                    rows=context.rows,
                    positions=context.positions,
                    token_ids=token_ids,
                    distributions=distributions,
                    top=top,
                )
            )
        return Sampled(token_ids=token_ids)

    def supports_drafts(self, params: SamplingParams, *, branching: bool) -> bool:
        """Return True: nothing that is chosen here depends on the history."""
        return True

    def begin(self) -> None:
        """Keep what is chosen from now on."""
        self._taken = []

    def take(self) -> list[Guesses]:
        """Return what was chosen since ``begin`` or the last ``take``, call by call."""
        taken, self._taken = self._taken or [], []
        return taken

    def end(self) -> None:
        """Keep nothing any more."""
        self._taken = None

    def _draw(
        self, logits: torch.Tensor, context: SamplingContext, rows: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for processor in self._chain:
            if self._is_static:
                logits = processor.apply_all(logits, context, width=logits.shape[1])
            else:
                logits = processor.apply(logits, context)
        keys, positions, rounds = self._keys[rows], np.add(context.positions, 1), self._rounds[rows]
        numbers = RowNumbers(keys=keys, positions=positions, rounds=rounds, device=logits.device)
        drawn = draw(logits, logits.amax(-1), numbers.times(Purpose.DRAFT, num_times(logits.shape[1])))
        return drawn, logits.softmax(-1)


def _largest(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    found = logprobs.topk(min(count, logprobs.shape[1]))
    return found.values, found.indices


class Echo(AcceptanceRule):
    """Lets a draft backend take tokens as they are given: those of a line all stand, those of a tree leave no trace."""

    lossless = False
    supports_trees = True

    def accept(self, verification: Verification) -> torch.Tensor:
        """Return 1 for every draft, and 0 where drafts branch, ``[B, N]``."""
        steps = torch.arange(verification.tokens.shape[1], device=verification.tokens.device)
        return ((steps < verification.num_drafts[:, None]) & verification.is_linear).float()
