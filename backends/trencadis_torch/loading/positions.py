"""How long texts may be, and rotary frequencies that do not depend on what shares a batch.

Rotary embeddings of type ``dynamic`` are stretched to the longest text that a forward sees. In a cache of keys, and in a batch of several
texts, a key would then depend on when it was computed and beside what. So they are stretched once, to the longest text that is served.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["fix_dynamic_frequencies", "max_positions"]

logger = logging.getLogger("trencadis.torch")

DEFAULT_MAX_MODEL_LEN = 2048


def max_positions(config: Any) -> int:
    """Return the longest text of a model, tokens, by its configuration. Pure.

    ========  ==========================================================================================
    longrope  the original length: beyond it every position is encoded differently, those in the cache too
    dynamic   the original length times ``factor``, as in vLLM
    else      ``max_position_embeddings``
    ========  ==========================================================================================

    Args:
        config: A configuration of transformers, of the part for text.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or DEFAULT_MAX_MODEL_LEN)
    limits = []
    for rope in _entries(config):
        if rope.get("rope_type") == "longrope":
            name = "original_max_position_embeddings"
            limits.append(int(rope.get(name) or getattr(config, name, None) or longest))
        elif rope.get("rope_type") == "dynamic":
            limits.append(int(longest * max(1.0, float(rope.get("factor") or 1.0))))
    return min(limits, default=longest)


def fix_dynamic_frequencies(model: Any) -> None:
    """Set rotary frequencies of type ``dynamic`` to those of the longest text, for texts of all lengths.

    Args:
        model: A decoder of transformers; its rotary modules are changed in place.

    Source: NTK-aware scaling; ``base' = base ((factor L / original) - (factor - 1)) ^ (D / (D - 2))`` for L tokens, as
    ``_compute_dynamic_ntk_parameters`` of transformers and ``DynamicNTKScalingRotaryEmbedding`` of vLLM have it.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        if getattr(module, "rope_type", None) != "dynamic":
            continue
        config = module.config
        longest = max_positions(config)
        frequencies, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, module.inv_freq.device, seq_len=longest)
        module.register_buffer("inv_freq", frequencies.to(module.inv_freq.dtype), persistent=False)
        module.original_inv_freq = module.inv_freq
        module.rope_type = "default"
        logger.info("Rotary embeddings of type dynamic are those of %d tokens for every text.", longest)


def _entries(config: Any) -> Iterator[Mapping[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    yield rope
    yield from (value for value in rope.values() if isinstance(value, dict))
