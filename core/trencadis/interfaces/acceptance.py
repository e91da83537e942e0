"""Contract of the noun ``acceptance``: which drafts are accepted, and the distribution of the token after them.

A rule is arithmetic on probabilities and draws nothing. Draft verification starts at the sequence's newest token: at each token the
rule gives the probability that each draft after it is accepted. After the last accepted draft the rule gives the distribution from
which the step's last token is drawn. The random numbers are the core's, so a rule can be proven by enumeration.

Shapes: B sequences, N most drafts of one of them, V vocabulary. Node 0 is the sequence's newest token, node i + 1 its draft i; the
distribution at a node is that of the token after it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs

from trencadis.errors import ContractError
from trencadis.interfaces.laws import Law, law

if TYPE_CHECKING:
    import torch

__all__ = ["INTERFACE_VERSION", "STABILITY", "AcceptanceRule", "Verification", "model_distribution", "possible_drafts"]

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


_MOST = 1 + 1e-6
"""Largest share of a draft: what rounding leaves of 1."""


def possible_drafts(verification: Verification) -> torch.Tensor:
    """Return which drafts the model could have chosen, bool ``[B, N]``: of a greedy request the one that it chooses. Pure."""
    tokens, target = verification.tokens, verification.target
    if target is None:
        assert verification.sampled is not None, "it is shown distributions or tokens"
        chosen: torch.Tensor = verification.sampled.gather(1, verification.parents) == tokens
        return chosen
    places = verification.parents * target.shape[2] + tokens.clamp(min=0)
    found: torch.Tensor = target.flatten(1).gather(1, places) > 0
    return found


def model_distribution(verification: Verification, stops: torch.Tensor) -> torch.Tensor:
    """Return the model's own distribution after the last accepted node, ``[B, V]``. Pure."""
    target = verification.target
    assert target is not None, "only asked of rules that are shown distributions"
    own: torch.Tensor = target.gather(1, stops[:, None, None].expand(-1, 1, target.shape[2]))[:, 0]
    return own


def _shares(method: str, answer: Any, verification: Verification, is_lossless: bool) -> torch.Tensor:
    """Return shares of drafts; waits for the device once."""
    tokens = verification.tokens
    _check_tensor(method, answer, tokens.shape, tokens.device)
    sound = (answer >= 0) & (answer <= _MOST)
    if is_lossless:
        sound = sound & ((answer <= 0) | possible_drafts(verification))
    if bool(sound.all()):
        return cast("torch.Tensor", answer)
    raise ContractError(
        f"{method}() returned shares outside 0 to 1, or, of a rule that says that it is lossless, lets drafts stand that the model does "
        "not choose"
    )


def _weights(
    method: str, answer: Any, verification: Verification, stops: torch.Tensor, is_lossless: bool
) -> torch.Tensor:
    """Return weights of tokens; waits for the device once."""
    own = model_distribution(verification, stops)
    _check_tensor(method, answer, own.shape, own.device)
    best = answer.argmax(-1, keepdim=True)
    top = answer.gather(1, best)
    sound = (top > 0) & (top < math.inf)
    # Of a lossy rule some possible token must be left, with or without the largest weight.
    left = own.gather(1, best) if is_lossless else (answer * (own > 0)).amax(-1, keepdim=True)
    sound = sound & (left > 0)
    if bool((sound[:, 0] & (answer.amin(-1) >= 0)).all()):
        return cast("torch.Tensor", answer)
    raise ContractError(
        f"{method}() gave weights that are not a distribution: negative, not finite, all 0 where the model gives a token a chance, or, of a "
        "rule that says that it is lossless, most for a token that the model gives none"
    )


def _check_tensor(method: str, tensor: Any, shape: Sequence[int], device: torch.device) -> None:
    if not hasattr(tensor, "is_floating_point"):
        raise ContractError(f"{method}() returned {type(tensor).__name__}, not a tensor")
    if tuple(tensor.shape) != tuple(shape) or not tensor.is_floating_point() or tensor.device != device:
        got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        raise ContractError(f"{method}() returned {got}, not floating-point numbers {tuple(shape)} on {device}")


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
    @law(
        Law(
            "from 0 to 1, and 0 for drafts that the model does not choose if ``lossless``",
            _shares,
            ("verification", "self.lossless"),
        )
    )
    def accept(self, verification: Verification) -> torch.Tensor:
        """Return the probability that each draft is accepted after the node before it was, ``[B, N]``.

        0 .. 1; the drafts after one node sum to at most 1 + 1e-6; with the rest, none of them is accepted. Padding gets 0.
        """

    @law(Law("weights of a distribution", _weights, ("verification", "stops", "self.lossless")))
    def last(self, verification: Verification, stops: torch.Tensor) -> torch.Tensor:
        """Return the distribution of the token after the last accepted node; only called if ``needs_distributions``.

        Args:
            verification: Drafts with what was sampled or may be; see :meth:`accept`.
            stops: Last accepted node, int64 ``[B]``, 0 .. N.

        Returns:
            Weights, ``[B, V]``, at least 0, not all 0; they need not sum to 1.
        """
        raise NotImplementedError(f"{type(self).__name__} needs no distributions, so its last token is the sampled one")
