"""Models that only embed: which they are, how they are loaded, and whether padding leaves their vectors alone."""

from __future__ import annotations

import inspect
from typing import Any

import attrs
import numpy as np
import torch

from trencadis.errors import ModelLoadError
from trencadis.records import ModelFacts
from trencadis_torch.embedder import EncoderEmbedder
from trencadis_torch.loading.inspection import encoder_facts
from trencadis_torch.loading.loader import ModelFiles, load_weights
from trencadis_torch.loading.pooling_config import read_pooling_config

__all__ = ["check_padding", "is_encoder", "load_encoder"]

_GENERATES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")

EXACT, ROUNDED = 1e-4, 5e-2
"""Largest distance of two vectors of one text over their length, in float32 and in 16 bits."""


def is_encoder(config: Any) -> bool:
    """Return whether a model can only embed. Pure.

    Its configuration decides: an architecture with a head that generates is a decoder; the bare model of any kind, and whatever
    else transformers knows a masked-language head for, is an encoder. Encoder-decoders are neither, and refused as decoders.

    Args:
        config: Configuration of transformers.
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    names = list(config.architectures or ())
    if config.is_encoder_decoder or getattr(config, "is_decoder", False) or any(n.endswith(_GENERATES) for n in names):
        return False
    if _sees_both_ways(config):
        return True
    bare = MODEL_MAPPING_NAMES.get(config.model_type)
    return (
        bool(names) and hasattr(config, "vocab_size") and names[0] in ((bare,) if isinstance(bare, str) else bare or ())
    )


def _sees_both_ways(config: Any) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    return config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def load_encoder(files: ModelFiles, device: torch.device, *, check: bool) -> tuple[EncoderEmbedder, ModelFacts]:
    """Load a model that only embeds; returns it with its facts for the engine.

    Args:
        files: The model.
        device: Where it goes.
        check: Refuse a model whose vectors depend on padding.

    Raises:
        ModelLoadError: Files are missing, or ask for something that is not computed here.
        OutOfMemoryError: No room for the weights.
    """
    from transformers import AutoModel

    # What the files ask for is checked before any weight is read.
    default = "mean" if _sees_both_ways(files.config) else "last"
    pooling_config = read_pooling_config(files, default_pooling=default, device=device)
    model = load_weights(files, device, AutoModel, unused="pooler.")
    if "add_pooling_layer" in inspect.signature(type(model).__init__).parameters:
        model.pooler = None  # a head for other tasks
    embedder = EncoderEmbedder(model, pooling_config)
    if check:
        check_padding(embedder, name=type(model).__name__, exact=model.dtype == torch.float32)
    size = embedder.embed([np.ones(2, np.int32)]).shape[1]
    return embedder, attrs.evolve(encoder_facts(model, pooling_config.max_seq_length), embedding_size=size)


def check_padding(embedder: EncoderEmbedder, *, name: str, exact: bool) -> None:
    """Compare the vector of a short text alone and beside a longer one.

    Args:
        embedder: A model and its pooling.
        name: Name of the architecture, for the error.
        exact: It computes in float32.

    Raises:
        ModelLoadError: They differ.
    """
    short, long = np.arange(2, 9, dtype=np.int32), np.arange(3, 15, dtype=np.int32)
    alone, beside = embedder.embed([short])[0], embedder.embed([short, long])[0]
    error = float(np.linalg.norm(alone - beside) / max(1e-12, float(np.linalg.norm(alone))))
    if not error <= (EXACT if exact else ROUNDED):
        raise ModelLoadError(
            f"{name}: a text's vector depends on what it is padded with: it changes by {error:.2g} of its length.",
            hint="This architecture cannot embed here; [backend.torch] check_model = false serves it unchecked.",
        )
