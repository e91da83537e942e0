"""One sequence with given distributions, as a rule is shown it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from trencadis.interfaces import Verification

P = (0.5, 0.3, 0.15, 0.05)
Q = (0.25, 0.25, 0.4, 0.1)


def asked_about(
    tokens: Sequence[int],
    *,
    target: Sequence[Sequence[float]] = (P,),
    proposal: Sequence[Sequence[float]] | None = (Q,),
    parents: Sequence[int] = (),
) -> Verification:
    """One sequence; a single distribution stands for all nodes, or all drafts."""
    count = len(tokens)
    targets = list(target) * (count + 1) if len(target) == 1 else list(target)
    distributions = None if proposal is None else list(proposal) * count if len(proposal) == 1 else list(proposal)
    return Verification(
        tokens=torch.tensor([list(tokens)]),
        parents=torch.tensor([list(parents or range(count))]),
        num_drafts=torch.tensor([count]),
        is_linear=not parents,
        target=torch.tensor([targets], dtype=torch.float64),
        proposal=None if distributions is None else torch.tensor([distributions], dtype=torch.float64),
    )


@pytest.fixture
def asked() -> Callable[..., Verification]:
    """``asked(tokens, target=..., proposal=..., parents=...)``: by default the distributions P and Q at every node."""
    return asked_about
