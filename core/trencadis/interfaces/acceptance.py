"""Contract of the noun ``acceptance``: which drafts are accepted, and the distribution of the token after them.

A rule is arithmetic on probabilities and draws nothing. Draft verification starts at the sequence's newest token: at each token the
rule gives the probability that each draft after it is accepted. After the last accepted draft the rule gives the distribution from
which the step's last token is drawn. The random numbers are the core's, so a rule can be proven by enumeration.

Shapes: B sequences, N most drafts of one of them, V vocabulary. Node 0 is the sequence's newest token, node i + 1 its draft i; the
distribution at a node is that of the token after it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    import torch

__all__ = ["INTERFACE_VERSION", "STABILITY", "AcceptanceRule", "Verification"]

INTERFACE_VERSION = 1
STABILITY = "stable"


@attrs.frozen(kw_only=True, eq=False)
class Verification:
    """Drafts to verify, with the model's output at each of them. All tensors lie on the device and are read-only.

    Attributes:
        tokens: The drafts, int64 ``[B, N]``, padded with -1.
        parents: Node before each draft, int64 ``[B, N]``, 0 .. N - 1: of draft i at most i. Of linear drafts ``0, 1, 2, …``.
        num_drafts: int64 ``[B]``, 0 .. N.
        is_linear: No sequence has two drafts after one node.
        sampled: Token that the ordinary sampler chose at each node, int64 ``[B, N + 1]``; None if the rule needs distributions.
        target: The model's distribution at each node, with every sampling parameter applied and every draft up to the node in the history:
            ``[B, N + 1, V]``, sums are 1; one-hot where a sequence is greedy. None if the rule does not need it.
        proposal: Distribution that each draft was drawn from, ``[B, N, V]``, all 0 for deterministic drafts.
            None if all are deterministic. Drafts after one node were drawn one after another, without replacement, from one distribution; deterministic ones
            take nothing from it.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    num_drafts: torch.Tensor
    is_linear: bool
    sampled: torch.Tensor | None = None
    target: torch.Tensor | None = None
    proposal: torch.Tensor | None = None


class AcceptanceRule(ABC):
    """Gives the acceptance probability of each draft. Lives with the backend; every method is pure.

    The number of operations and every shape follow from B, N and V alone, so that a device that compiles has one graph for each.

    Attributes:
        lossless: Emitted text has the distribution of sampling without speculation.
        needs_distributions: Reads ``target`` and ``proposal``; otherwise it reads ``sampled``, and the step's last token is the sampled one.
        supports_trees: Correct when several drafts follow one node.
    """

    lossless: bool
    needs_distributions: bool = False
    supports_trees: bool = False

    @abstractmethod
    def accept(self, verification: Verification) -> torch.Tensor:
        """Return the probability that each draft is accepted after the node before it was, ``[B, N]``.

        0 .. 1; the drafts after one node sum to at most 1 + 1e-6; with the rest, none of them is accepted. Padding gets 0.
        """

    def last(self, verification: Verification, stops: torch.Tensor) -> torch.Tensor:
        """Return the distribution of the token after the last accepted node; only called if ``needs_distributions``.

        Args:
            verification: As for :meth:`accept`.
            stops: Last accepted node, int64 ``[B]``, 0 .. N.

        Returns:
            Weights, ``[B, V]``, at least 0, not all 0; they need not sum to 1.
        """
        raise NotImplementedError(f"{type(self).__name__} needs no distributions, so its last token is the sampled one")
