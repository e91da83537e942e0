"""Tokens of a pass, chosen on one rank and sent to the others: equal numbers by one message, not by equal kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from trencadis.errors import StepFailedError
from trencadis.interfaces import Collective

if TYPE_CHECKING:
    from trencadis_torch.verify import Chosen

__all__ = ["TokenExchange"]

FAILED = -1
"""In place of a number of accepted drafts: the rank that samples has no tokens."""


class TokenExchange:
    """The ranks of a stage, one of which samples.

    Args:
        group: The ranks.
        source: The one that samples, within the group.

    Attributes:
        is_output: This rank samples.
        told: The error that every rank has raised, on the CPU; all are where they would be without it, and go on with the next step.
    """

    def __init__(self, group: Collective, *, source: int = 0) -> None:
        self._group = group
        self._source = source
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
    ) -> Chosen:
        """Return what was chosen, on every rank; one broadcast.

        Args:
            choose: Samples; called on one rank.
            num_sequences: S', rows of tokens.
            num_steps: K, tokens of each.
            has_paths: Drafts branch: the nodes of accepted ones are sent, too.
            device: Of the tokens.

        Raises:
            StepFailedError: On every other rank, if ``choose`` raised.
        """
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

    def _received(self, message: torch.Tensor, num_steps: int, has_paths: bool) -> Chosen:
        from trencadis_torch.verify import Chosen

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
