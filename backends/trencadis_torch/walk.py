"""The walk along drafts: an acceptance rule says how likely each step is, random numbers of the core decide.

Shapes: B sequences, N most drafts of one of them. Node 0 is a sequence's newest token, node i + 1 its draft i.
"""

from __future__ import annotations

import attrs
import torch

from trencadis.interfaces import AcceptanceRule, Verification

__all__ = ["MatchingPrefix", "Walked", "walk"]


class MatchingPrefix(AcceptanceRule):
    """Drafts stand while the sampler chooses the very same tokens: the text is that of no speculation."""

    lossless = True
    takes_trees = True

    def accept(self, verification: Verification) -> torch.Tensor:
        """Return 1 where a draft is the token that was sampled at the node before it, float64 ``[B, N]``."""
        assert verification.sampled is not None, "a rule that needs no laws is shown the sampled tokens"
        return (verification.sampled.gather(1, verification.parents) == verification.tokens).double()


@attrs.frozen(kw_only=True, eq=False)
class Walked:
    """Where the walks went.

    Attributes:
        nodes: The nodes behind node 0, int64 ``[B, N]``, or fewer; what is beyond the stop does not count.
        num_accepted: How many there are, int64 ``[B]``.
        stops: Node at which each walk stopped, int64 ``[B]``.
    """

    nodes: torch.Tensor
    num_accepted: torch.Tensor
    stops: torch.Tensor


def walk(
    verification: Verification, accept: torch.Tensor, uniforms: torch.Tensor, *, max_depth: int | None = None
) -> Walked:
    """Return how far each walk gets. Pure; every shape follows from those of the arguments.

    At a node the drafts behind it have, one after another, their shares of (0, 1); the walk goes to the one in whose share the
    node's number lies, and stops if it lies behind them all.

    Args:
        verification: The drafts.
        accept: Share of each draft at the node before it, ``[B, N]``.
        uniforms: A number of (0, 1) for each node, ``[B, N + 1]``.
        max_depth: No walk is longer, if known: then branching drafts have so many ``Walked.nodes``.
    """
    num_nodes = torch.arange(accept.shape[1], device=accept.device)
    is_real = num_nodes < verification.num_drafts[:, None]
    if verification.is_linear:
        stands = (uniforms[:, :-1] < accept) & is_real
        num_accepted = stands.long().cumprod(1).sum(1)
        return Walked(nodes=(num_nodes + 1).expand(accept.shape), num_accepted=num_accepted, stops=num_accepted)
    here = torch.zeros_like(verification.num_drafts)
    num_accepted = torch.zeros_like(here)
    goes_on = torch.ones_like(here, dtype=torch.bool)
    nodes = []
    for _ in range(accept.shape[1] if max_depth is None else max_depth):
        behind = (verification.parents == here[:, None]) & is_real
        shares = torch.where(behind, accept.double(), 0.0).cumsum(1)
        hits = behind & (uniforms.gather(1, here[:, None]) < shares)
        goes_on = goes_on & hits.any(1)
        # Shares only grow: the first hit is the draft in whose share the number lies.
        here = torch.where(goes_on, hits.long().argmax(1) + 1, here)
        num_accepted = num_accepted + goes_on
        nodes.append(here)
    return Walked(nodes=torch.stack(nodes, 1), num_accepted=num_accepted, stops=here)
