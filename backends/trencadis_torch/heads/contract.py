"""The interface of a head: what one computes for the drafter, whatever checkpoint it comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.cache.kv_cache import AttentionLayer
from trencadis_torch.heads.loop import DraftLoop

__all__ = ["Attend", "Head"]

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionOptions], torch.Tensor]
"""Attention's output ``[T, N, D]`` of queries, keys and values of one token each."""


class Head(Protocol):
    """What a head computes; keys and values at position i are those of hidden state i and token i + 1."""

    @property
    def layer(self) -> AttentionLayer:
        """Layer of the head in the KV cache."""
        ...

    @property
    def target_ids(self) -> torch.Tensor | None:
        """Token of the model for each draft token, int64 ``[V]``; None: the same number."""
        ...

    @property
    def loop(self) -> DraftLoop | None:
        """Makes several drafts in one call; None: they are made one by one."""
        ...

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Return what the head reads, ``[T, H]``, from the model's hidden states ``[T, S]``."""
        ...

    def keys_and_values(
        self, hidden: torch.Tensor, next_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, ``[T, KV, D]`` each, of ``hidden`` ``[T, H]``, the tokens after them and their int64 positions, ``[T]``."""
        ...

    def draft(
        self, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of draft tokens after ``tokens``, ``[T, V]``, and what the head reads of these next, ``[T, H]``."""
        ...
