"""Tokens of a pass, chosen on one rank and sent to the others: equal numbers by one message, not by equal kernels.

One stage    each rank gets them in the pass, by a broadcast: its next step may be submitted before the engine knows them
a pipeline   the others get them with the batch that goes on from them (``Batch.start_token_ids``), so that no stage waits for the last one;
             but if drafts branch, keys and values of the accepted ones have to be moved before the next batch, so there is a broadcast
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from trencadis.errors import SamplingFailedError, StepFailedError
from trencadis.interfaces import Collective, Sampled

__all__ = ["Chosen", "TokenExchange"]

FAILED = -1
"""In place of a number of accepted drafts: the rank that samples has no tokens."""


@attrs.frozen(kw_only=True, eq=False)
class Chosen:
    """Tokens of a pass, of S' sequences and K steps.

    Attributes:
        token_ids: int64 ``[S', K]``; of each sequence the first ``num_accepted + 1`` count.
        num_accepted: Accepted drafts of each sequence, int64 ``[S']``; None: there are none.
        nodes: Nodes of accepted drafts, int64 ``[S', K - 1]``; None: drafts do not branch.
        sampled: Answer of the sampler, on the rank that has one.
    """

    token_ids: torch.Tensor
    num_accepted: torch.Tensor | None = None
    nodes: torch.Tensor | None = None
    sampled: Sampled | None = None


class TokenExchange:
    """The ranks of a model, one of which samples.

    Args:
        group: The ranks.
        source: The one that samples, within the group.
        is_staged: They are the stages of a pipeline.

    Attributes:
        is_output: This rank samples.
        told: The error that every rank has raised, on the CPU; all are where they would be without it, and go on with the next step.
    """

    def __init__(self, group: Collective, *, source: int = 0, is_staged: bool = False) -> None:
        self._group = group
        self._source = source
        self._is_staged = is_staged
        self._failure: Exception | None = None
        self.is_output = group.rank == source
        self.told: BaseException | None = None

    def share(
        self,
        choose: Callable[[], Chosen],
        *,
        num_sequences: int,
        num_steps: int,
        has_paths: bool,
        device: torch.device,
    ) -> Chosen | None:
        """Return what was chosen, on every rank, by one broadcast; in a pipeline on the rank that samples, and None on the others.

        Args:
            choose: Samples; called on one rank.
            num_sequences: S', rows of tokens.
            num_steps: K, tokens of each.
            has_paths: Drafts branch: the nodes of accepted ones are sent, too.
            device: Device of the tokens.

        Raises:
            StepFailedError: On every other rank, if ``choose`` raised.
        """
        if self._is_staged and not has_paths:
            return self._chosen_here(choose) if self.is_output else None
        width = num_steps + 1 + (num_steps - 1 if has_paths else 0)
        message = torch.full((num_sequences, width), FAILED, dtype=torch.int32, device=device)
        if self.is_output:
            try:
                chosen = choose()
                message[:, :num_steps] = chosen.token_ids
                message[:, num_steps] = 0 if chosen.num_accepted is None else chosen.num_accepted
                if has_paths and chosen.nodes is not None:
                    message[:, num_steps + 1 :] = chosen.nodes
            except Exception as error:
                message.fill_(FAILED)
                self.told = error if message.device.type == "cpu" else None
                raise
            finally:
                self._group.broadcast(message, source=self._source)
            return chosen
        self._group.broadcast(message, source=self._source)
        return self._received(message, num_steps, has_paths)

    def _chosen_here(self, choose: Callable[[], Chosen]) -> Chosen | None:
        """Return what was chosen; None if that failed, which :meth:`check` raises when the other passes of the step have run."""
        try:
            return choose()
        except Exception as error:
            self._failure = self._failure or error
            return None

    def check(self) -> None:
        """Raise what sampling raised in the step, if the other stages have gone on meanwhile; called after its last pass.

        Raises:
            SamplingFailedError: It did.
        """
        error, self._failure = self._failure, None
        if error is not None:
            text = (
                str(error) if isinstance(error, StepFailedError) else f"backend torch: {type(error).__name__}: {error}"
            )
            self.told = SamplingFailedError(text)
            raise self.told from error

    def _received(self, message: torch.Tensor, num_steps: int, has_paths: bool) -> Chosen:
        numbers = message.long()
        # A device is not waited for: there the rank that failed ends the group.
        if message.device.type == "cpu" and bool((message[:, num_steps] == FAILED).any()):
            self.told = StepFailedError("backend torch: the rank that samples failed; it says why.")
            raise self.told
        has_drafts = num_steps > 1
        return Chosen(
            token_ids=numbers[:, :num_steps],
            num_accepted=numbers[:, num_steps] if has_drafts else None,
            nodes=numbers[:, num_steps + 1 :] if has_paths else None,
        )
