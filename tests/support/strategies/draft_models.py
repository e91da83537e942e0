"""Speculators with tiny draft models, and what transformers itself says would be drafted.

Weights are drawn wide, so that two tokens are never nearly equally likely; ``greedy`` checks that.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import torch

from support.devices import DEVICE
from trencadis.clock import SystemClock
from trencadis.interfaces import ComponentContext, NamedModel, Vocabulary
from trencadis.records import BucketLimits, Drafts, ModelFacts, ModelSource
from trencadis_plugins.speculation.draft_config import DraftModelConfig, ParallelDraftConfig
from trencadis_plugins.speculation.draft_model import DraftModel
from trencadis_plugins.speculation.parallel_draft import ParallelDraft
from trencadis_torch.backend import TorchBackend
from trencadis_torch.config import TorchConfig

VOCAB_SIZE = 97
MASK = 96

LIMITS = BucketLimits(
    block_size=4,
    max_model_len=240,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_prefill_batch_size=8,
    num_blocks=256,
    contiguous=False,
    prefix_caching=True,
    max_draft_tokens=4,
)

FACTS = ModelFacts(
    architecture="Target",
    dtype="float32",
    vocab_size=VOCAB_SIZE,
    max_model_len=256,
    eos_token_ids=(2,),
    num_parameters=1,
    weights_bytes=4,
    kv_bytes_per_token=8,
)


def save_llama(
    path: Path, *, vocab_size: int = VOCAB_SIZE, seed: int = 7, spread: float = 0.4, **settings: Any
) -> Path:
    """Write a random Llama of two layers; returns the path."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=spread,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        **settings,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    model.save_pretrained(path)
    return path


@cache
def _loaded(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path).float().eval()


@torch.inference_mode()
def logits_behind(path: Path, tokens: Sequence[int], count: int = 1) -> torch.Tensor:
    """Return transformers' own logits behind the last tokens, float32 ``[count, V]``."""
    logits: torch.Tensor = _loaded(path)(torch.tensor([list(tokens)]), use_cache=False).logits[0, -count:]
    return logits


def greedy(path: Path, tokens: Sequence[int], count: int, *, below: int = VOCAB_SIZE) -> list[int]:
    """Return the most likely continuation; only tokens ``below`` count."""
    text = list(tokens)
    for _ in range(count):
        best = logits_behind(path, text)[0, :below].topk(2)
        assert float(best.values[0] - best.values[1]) > 1e-4, "two tokens are nearly alike: take another seed"
        text.append(int(best.indices[0]))
    return text[len(tokens) :]


def context_of(
    *, facts: ModelFacts = FACTS, vocabularies: dict[str, Vocabulary] | None = None, **options: Any
) -> ComponentContext:
    """Return what a speculator is built with; ``options`` are of the backend's table."""

    def named(path: str) -> NamedModel:
        source = ModelSource(path=path, dtype="float32")
        return NamedModel(source=source, vocabulary=lambda: (vocabularies or {})["draft"])

    def make(noun: str, name: str) -> Any:
        assert (noun, name) == ("backend", "")
        return TorchBackend(TorchConfig(device=DEVICE, check_model=False, **options), clock=SystemClock())

    return ComponentContext(
        clock=SystemClock(),
        seed=0,
        model=facts,
        make=make,
        named_model=named,
        vocabulary=lambda: (vocabularies or {})["target"],
    )


def draft_model(path: Path, *, limits: BucketLimits | None = LIMITS, context: Any = None, **options: Any) -> DraftModel:
    """Return a ``draft_model`` that makes all drafts that are asked for; with limits it is allocated."""
    config = DraftModelConfig(**{"model": str(path), "tokenizer": "same", "min_probability": 0.0, **options})
    made = DraftModel(config, context or context_of())
    if limits is not None:
        made.allocate(attrs.evolve(limits, max_draft_tokens=config.max_draft_tokens))
    return made


def parallel_draft(
    path: Path, *, limits: BucketLimits | None = LIMITS, context: Any = None, **options: Any
) -> ParallelDraft:
    """Return a ``parallel_draft``; with limits it is allocated."""
    config = ParallelDraftConfig(**{"model": str(path), "tokenizer": "same", "mask_token_id": MASK, **options})
    made = ParallelDraft(config, context or context_of())
    if limits is not None:
        made.allocate(attrs.evolve(limits, max_draft_tokens=config.max_draft_tokens))
    return made


def runs(drafts: Drafts) -> list[list[int]]:
    """Return the drafts of each sequence."""
    ends = drafts.num_drafts.cumsum().tolist()
    counts = drafts.num_drafts.tolist()
    return [drafts.token_ids[end - count : end].tolist() for end, count in zip(ends, counts, strict=True)]


def late(kind: type[Any]) -> type[Any]:
    """Return a speculator's class that is allocated by the first call, where nobody else does: suites call some without an engine."""

    class Late(kind):  # type: ignore[misc]
        is_allocated = False

        def allocate(self, limits: BucketLimits) -> None:
            self.is_allocated = True
            super().allocate(limits)

        def propose(self, view: Any) -> Drafts:
            if not self.is_allocated:
                self.allocate(LIMITS)
            return super().propose(view)

    return Late
