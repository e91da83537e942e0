"""Which processors there are, and in which order."""

from __future__ import annotations

from trencadis.interfaces import LogitsProcessor
from trencadis_plugins.sampling.logit_bias import LogitBias
from trencadis_plugins.sampling.min_p import MinP
from trencadis_plugins.sampling.min_tokens import MinTokens
from trencadis_plugins.sampling.penalties import Penalties
from trencadis_plugins.sampling.temperature import Temperature
from trencadis_plugins.sampling.token_masks import AllowedTokens, BadTokens
from trencadis_plugins.sampling.top_k import TopK
from trencadis_plugins.sampling.top_p import TopP

__all__ = ["standard_chain"]


def standard_chain(order: str) -> tuple[LogitsProcessor, ...]:
    """Return fresh processors: masks, bias and penalties, then temperature and truncation in the order asked for.

    Each truncation works on what the one before it left, renormalised: top-p after top-k keeps mass p of the k tokens.

    Args:
        order: ``vllm``, ``hf`` or ``llamacpp``.

    Raises:
        KeyError: ``order`` is none of them.

    Source: vLLM ``v1/sample/sampler.py``; transformers ``GenerationMixin._get_logits_processor``; llama.cpp
    ``common_params_sampling.samplers``.
    """
    tails: dict[str, tuple[type[LogitsProcessor], ...]] = {
        "vllm": (Temperature, MinP, TopK, TopP),
        "hf": (Temperature, TopK, TopP, MinP),
        "llamacpp": (TopK, TopP, MinP, Temperature),
    }
    head = (AllowedTokens(), BadTokens(), MinTokens(), LogitBias(), Penalties())
    return (*head, *(processor() for processor in tails[order]))
