"""Contract of the noun ``acceptance``: which drafts stand, and what follows them.

A rule is arithmetic on probabilities and draws nothing. The backend walks from the sequence's newest token along its drafts:
at each token the rule says how likely the walk goes on to each draft behind it; where the walk stops, the rule says by which distribution
the step's last token is drawn. The random numbers are the core's, so a rule can be proven by enumeration.

Shapes: B sequences, N most drafts of one of them, V vocabulary. Node 0 is the sequence's newest token, node i + 1 its draft i; the
distribution at a node is that of the token behind it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import attrs

from trencadis.renames import RenamedMembers

if TYPE_CHECKING:
    import torch

__all__ = ["INTERFACE_VERSION", "AcceptanceRule", "Verification"]

INTERFACE_VERSION = 1


@attrs.frozen(kw_only=True, eq=False)
class Verification:
    """Drafts, and what the model says at each of them. All tensors lie on the device and are read-only.

    Attributes:
        tokens: The drafts, int64 ``[B, N]``, padded with -1.
        parents: Node before each draft, int64 ``[B, N]``, 0 .. N - 1: of draft i at most i. Of linear drafts ``0, 1, 2, …``.
        num_drafts: int64 ``[B]``, 0 .. N.
        is_linear: No sequence has two drafts after one node.
        sampled: Token that the ordinary sampler chose at each node, int64 ``[B, N + 1]``; None if the rule asks for distributions.
        target: The model's distribution at each node, every sampling parameter applied and every draft up to the node counted in:
            ``[B, N + 1, V]``, sums are 1; one token has all of it where a sequence is greedy. None if the rule does not ask.
        proposal: Distribution by which each draft was drawn, ``[B, N, V]``, all 0 where the drafter made no draw: such a draft was certain.
            None if all were. Drafts after one node were drawn one after another, without replacement, from one distribution; certain ones
            take nothing from it.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    num_drafts: torch.Tensor
    is_linear: bool
    sampled: torch.Tensor | None = None
    target: torch.Tensor | None = None
    proposal: torch.Tensor | None = None


class AcceptanceRule(
    RenamedMembers, ABC, renamed={"needs_laws": "needs_distributions", "takes_trees": "supports_trees"}
):
    """Says how likely each draft stands. Lives with the backend; every method is pure.

    The number of operations and every shape follow from B, N and V alone, so that a device that compiles has one graph for each.

    Attributes:
        lossless: Emitted text has the distribution of sampling without speculation.
        needs_distributions: Reads ``target`` and ``proposal``; else ``sampled``, and the step's last token is the sampled one.
        supports_trees: Right when several drafts follow one node.
    """

    lossless: bool
    needs_distributions: bool = False
    supports_trees: bool = False

    @abstractmethod
    def accept(self, verification: Verification) -> torch.Tensor:
        """Return how likely the walk goes on to each draft if it stands at the node before it, ``[B, N]``.

        0 .. 1; the drafts after one node sum to at most 1 + 1e-6, and the walk stops there with what is left. Padding gets 0.
        """

    def last(self, verification: Verification, stops: torch.Tensor) -> torch.Tensor:
        """Return the distribution of the token after the node where the walk stops; only asked if ``needs_distributions``.

        Args:
            verification: As for :meth:`accept`.
            stops: Where, int64 ``[B]``, 0 .. N.

        Returns:
            Weights, ``[B, V]``, at least 0, not all 0; they need not sum to 1.
        """
        raise NotImplementedError(f"{type(self).__name__} needs no distributions, so its last token is the sampled one")
