"""The processors of the standard chain, and their order.

    masks, bias, penalties ─▶ temperature and truncation, in the order asked for ─▶ processors from elsewhere

Each truncation works on what the one before it left, renormalised: top-p after top-k keeps mass p of the k tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trencadis.errors import ConfigValueError, ContractError, did_you_mean
from trencadis.interfaces import LogitsProcessor, Vocabulary
from trencadis_plugins.sampling.cutoffs import EpsilonCutoff, EtaCutoff
from trencadis_plugins.sampling.dry import Dry
from trencadis_plugins.sampling.elsewhere import IsolatedProcessor, installed_processors, processor_from
from trencadis_plugins.sampling.logit_bias import LogitBias
from trencadis_plugins.sampling.min_p import MinP
from trencadis_plugins.sampling.min_tokens import MinTokens
from trencadis_plugins.sampling.mirostat import Mirostat
from trencadis_plugins.sampling.penalties import Penalties
from trencadis_plugins.sampling.structured import Structured
from trencadis_plugins.sampling.temperature import Temperature
from trencadis_plugins.sampling.token_masks import AllowedTokens, BadTokens
from trencadis_plugins.sampling.token_runs import BadWords, NoRepeatNgram
from trencadis_plugins.sampling.top_k import TopK
from trencadis_plugins.sampling.top_n_sigma import TopNSigma
from trencadis_plugins.sampling.top_p import TopP
from trencadis_plugins.sampling.typical_p import TypicalP
from trencadis_plugins.sampling.xtc import Xtc

__all__ = ["PRESETS", "build_chain", "standard_chain"]

_BUILT_IN: dict[str, type[LogitsProcessor]] = {
    "structured": Structured,
    "allowed_tokens": AllowedTokens,
    "bad_tokens": BadTokens,
    "bad_words": BadWords,
    "no_repeat_ngram": NoRepeatNgram,
    "min_tokens": MinTokens,
    "logit_bias": LogitBias,
    "penalties": Penalties,
    "dry": Dry,
    "temperature": Temperature,
    "top_n_sigma": TopNSigma,
    "min_p": MinP,
    "top_k": TopK,
    "top_p": TopP,
    "typical_p": TypicalP,
    "epsilon_cutoff": EpsilonCutoff,
    "eta_cutoff": EtaCutoff,
    "xtc": Xtc,
    "mirostat": Mirostat,
}
"""Built-in processors, in vLLM's order."""


def _reordered(*names: str) -> tuple[str, ...]:
    """Return the built-in processors, those named in the given order in the places that they have together. Pure."""
    order = iter(names)
    return tuple(next(order) if name in names else name for name in _BUILT_IN)


PRESETS: dict[str, tuple[str, ...]] = {
    "vllm": tuple(_BUILT_IN),
    "hf": _reordered("top_k", "top_p", "min_p"),
    "llamacpp": _reordered(
        *("top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "epsilon_cutoff", "eta_cutoff", "xtc", "temperature")
    ),
}
"""Processors in order, by preset; presets are named after the programs whose order of temperature and truncation they have."""


def _no_vocabulary() -> Vocabulary:
    raise ContractError("this chain of logits processors was made without a tokenizer.")


def standard_chain(order: str, *, vocabulary: Callable[[], Vocabulary] = _no_vocabulary) -> tuple[LogitsProcessor, ...]:
    """Return fresh processors in the order of a preset.

    Args:
        order: ``vllm``, ``hf`` or ``llamacpp``.
        vocabulary: Reads the tokenizer, for structured output.

    Raises:
        KeyError: ``order`` is none of them.

    Source: vLLM ``v1/sample/sampler.py``; transformers ``GenerationMixin._get_logits_processor``; llama.cpp
    ``common_params_sampling.samplers``. What a program does not have stands where it disturbs the others least.
    """
    return tuple(_processor(name, vocabulary) for name in PRESETS[order])


def build_chain(
    order: str,
    *,
    chain: Sequence[str] = (),
    processors: Sequence[str] = (),
    vocabulary: Callable[[], Vocabulary] = _no_vocabulary,
) -> tuple[LogitsProcessor, ...]:
    """Return fresh processors as the config names them.

    Args:
        order: A preset.
        chain: Instead of the preset: names of built-in processors, and processors from elsewhere.
        processors: After all of them: from elsewhere, by import path or by the name of an entry point.
        vocabulary: Reads the tokenizer, for structured output.

    Raises:
        ConfigValueError: A name is unknown or given twice, an import path leads nowhere, or ``mirostat`` does not end the
            built-in ones: it has to see the distribution that is drawn from.
        PluginLoadError: An import fails.
        ContractError: It is no logits processor.
    """
    names = [*(chain or PRESETS[order]), *processors]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigValueError(
            f"[sampling.standard] names {', '.join(twice)} twice: a processor has one place in the chain."
        )
    if "mirostat" in names and names[-1] != "mirostat":
        later = names[names.index("mirostat") + 1 :]
        if chain or not processors:
            raise ConfigValueError(
                f"[sampling.standard] chain has {', '.join(later)} after mirostat, which must see the distribution that is drawn from.",
                hint="Put mirostat last.",
            )
        names = [*(name for name in names if name != "mirostat"), "mirostat"]
    return _with_names_of_their_own(tuple(_processor(name, vocabulary) for name in names))


def _processor(name: str, vocabulary: Callable[[], Vocabulary]) -> LogitsProcessor:
    if name == "structured":
        return Structured(vocabulary)
    if name in _BUILT_IN:
        return _BUILT_IN[name]()
    processor = processor_from(name)
    if processor is None:
        known = [*_BUILT_IN, *installed_processors()]
        raise ConfigValueError(
            f"[sampling.standard] chain or processors names {name!r}: there is no such processor."
            f"{did_you_mean(name, known)} Choose among {', '.join(known)}.",
            hint="Or give an import path, package.module:Class, or install the package whose entry point has this name.",
        )
    return IsolatedProcessor(processor, name)


def _with_names_of_their_own(chain: tuple[LogitsProcessor, ...]) -> tuple[LogitsProcessor, ...]:
    seen: dict[str, LogitsProcessor] = {}
    for processor in chain:
        other = seen.setdefault(processor.name, processor) if processor.name else processor
        if other is not processor:
            raise ConfigValueError(
                f"[sampling.standard] processors: {_kind(other)} and {_kind(processor)} have the same name, "
                f"{processor.name!r}, so that a request could not say which it means."
            )
    return chain


def _kind(processor: LogitsProcessor) -> str:
    return type(getattr(processor, "inner", processor)).__name__
