"""Loading of a model onto the device, with inspection and a check on the way.

Inspection and check run on the CPU, since a graph compiler would take longer for the many shapes than the CPU for the few tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch

from trencadis.errors import ModelLoadError, OutOfMemoryError
from trencadis.records import ModelFacts, ModelSource
from trencadis_gaudi.attention.adapter import FLAT, register
from trencadis_gaudi.experts import use_experts
from trencadis_gaudi.flat_cache import CacheScales
from trencadis_gaudi.fp8.cache import cache_layers
from trencadis_gaudi.fp8.linear import quantise_linears
from trencadis_gaudi.fp8.measurements import read_measurements
from trencadis_gaudi.fp8.scales import Fp8Device
from trencadis_gaudi.fused.norm import fuse_norms
from trencadis_gaudi.fused.rotary import fuse_rotary
from trencadis_gaudi.habana import Habana
from trencadis_gaudi.memory import MemoryMeter
from trencadis_gaudi.parallel.agreement import ONE_RANK, Agreement
from trencadis_gaudi.static_modules import make_static
from trencadis_torch.attention import adapter
from trencadis_torch.cache.kv_cache import AttentionLayer
from trencadis_torch.embedder import DecoderEmbedder
from trencadis_torch.loading.encoder import is_encoder
from trencadis_torch.loading.fingerprint import fingerprint, quantised_fingerprint
from trencadis_torch.loading.inspection import attention_layers, model_facts
from trencadis_torch.loading.loader import ModelFiles, find_model, load_decoder
from trencadis_torch.loading.pooling_config import PoolingConfig, read_pooling_config
from trencadis_torch.loading.positions import fix_dynamic_frequencies
from trencadis_torch.loading.self_check import check_model

if TYPE_CHECKING:
    from trencadis_torch.parallel.share import Share

__all__ = ["LoadedModel", "load_model"]

logger = logging.getLogger("trencadis.gaudi")

_CPU = torch.device("cpu")
_SMALL_MODEL = 20_000_000
"""Parameters below which one CPU thread is fastest; as in the backend ``torch``."""


@attrs.frozen(kw_only=True)
class LoadedModel:
    """Model on its device, with paged attention enabled.

    Attributes:
        model: Model of transformers.
        layers: Attention layers of the model, in the form that the cache stores.
        facts: Facts of the model.
        dtype: Number type of the logits.
        cache_scales: Scales of layers with fp8 keys and values, by layer index.
        pooling_config: Conversion of hidden states to text vectors; its weights are on the device.
    """

    model: Any
    layers: tuple[AttentionLayer, ...]
    facts: ModelFacts
    dtype: torch.dtype
    pooling_config: PoolingConfig
    cache_scales: Mapping[int, CacheScales] = attrs.field(factory=dict)


def load_model(
    source: ModelSource,
    habana: Habana,
    *,
    check: bool,
    share: Share | None = None,
    agreement: Agreement = ONE_RANK,
) -> LoadedModel:
    """Return a model on the device, or this rank's share of it.

    A Gaudi always computes in bfloat16; the emulated device in the type that a CPU would use.

    Args:
        source: Path, type and revision of the model.
        habana: Device to load to.
        check: Compare the paged forward with the model's own.
        share: Share of this rank; None: there is one rank.
        agreement: Decisions of all ranks.

    Raises:
        ModelLoadError: The model is no decoder, or is not supported; the message says why.
        OutOfMemoryError: No room for the weights.
    """
    files, meter = _find(source, habana), MemoryMeter(habana)
    adapter.register()
    pooling_config = read_pooling_config(files, default_pooling="last", device=_CPU)
    model, layers = _checked(files, habana, check=check, share=share)
    adapter.switch(model, adapter.PAGED)
    embedding_size = _embedding_size(model, layers, pooling_config)
    make_static(model, in_graphs=habana.config.mode != "eager")
    register()
    adapter.switch(model, FLAT)
    _use_kernels(model, habana)
    dtype, digest = model.dtype, ""
    cache_scales: Mapping[int, CacheScales] = {}
    if habana.fp8 is not None:
        layers, cache_scales, digest = _in_fp8(model, layers, habana, habana.fp8, is_share=share is not None)
        digest = agreement.common(digest)  # each rank has its own scales
    # Before the move to the device, since shared weights are recognised by their CPU address and counted once.
    facts = attrs.evolve(
        model_facts(model, layers), embedding_size=embedding_size, fingerprint=_fingerprint(files, digest)
    )
    if share is not None:
        facts = attrs.evolve(facts, num_parameters=share.num_parameters)
    model = _moved(model, source, habana)
    habana.declare("weights", facts.weights_bytes)
    logger.info("Pre-loading model weights on %s took %s", habana.device, meter.summary())
    logger.info(
        "%s: %.1f M parameters, %s, on %s.", facts.architecture, facts.num_parameters / 1e6, facts.dtype, habana.device
    )
    return LoadedModel(
        model=model,
        layers=layers,
        facts=facts,
        dtype=dtype,
        pooling_config=pooling_config.to(habana.device),
        cache_scales=cache_scales,
    )


def _find(source: ModelSource, habana: Habana) -> ModelFiles:
    """Return the files of a decoder, with the number type of the device.

    Raises:
        ModelLoadError: There are no files, or they are not those of a decoder.
    """
    if habana.emulated is None:
        if source.dtype not in {"auto", "bfloat16"}:
            logger.warning("[model] dtype = %s: a Gaudi computes in bfloat16, which is used instead.", source.dtype)
        source = attrs.evolve(source, dtype="bfloat16")
    files = find_model(source)
    if is_encoder(files.config):
        raise ModelLoadError(
            f"{source.path} only embeds; the backend gaudi serves models that generate.",
            hint='Set [backend] name = "torch".',
        )
    return files


def _checked(
    files: ModelFiles, habana: Habana, *, check: bool, share: Share | None
) -> tuple[Any, tuple[AttentionLayer, ...]]:
    """Return a checked model on the CPU and its layers; sets the number of CPU threads of an operation."""
    model = load_decoder(files, _CPU) if share is None else share.load(files, _CPU)
    fix_dynamic_frequencies(model)
    layers = attention_layers(model)
    if (model.num_parameters() if share is None else share.num_parameters) < _SMALL_MODEL:
        torch.set_num_threads(1)
    elif share is not None and habana.emulated is not None:
        torch.set_num_threads(share.num_threads())
    if check:
        # On the CPU, ranks exchange tensors between hosts.
        check_model(model, layers, layout="padded", agree=None if share is None else share.accept)
    if share is not None:
        logger.info("%s", share.summary)
    return model, layers


def _fingerprint(files: ModelFiles, digest: str) -> str:
    """Return the model's fingerprint, including its fp8 scales if there are any."""
    plain = fingerprint(files)
    return quantised_fingerprint(plain or files.source.path, digest) if digest else plain


def _embedding_size(model: Any, layers: tuple[AttentionLayer, ...], pooling_config: PoolingConfig) -> int:
    """Return the length of a text vector; 0 if the model cannot embed because it has no base model without output projection."""
    if model.base_model is model:
        return 0
    return int(DecoderEmbedder(model.base_model, pooling_config, layers).embed([np.zeros(1, np.int32)]).shape[1])


def _in_fp8(
    model: Any, layers: tuple[AttentionLayer, ...], habana: Habana, device: Fp8Device, *, is_share: bool
) -> tuple[tuple[AttentionLayer, ...], Mapping[int, CacheScales], str]:
    """Replace linear layers as configured; return the layers and scales of the cache, and a digest of all scales.

    Raises:
        ModelLoadError: A measurement is missing or does not fit.
    """
    config, digest = habana.config, ""
    measurements = read_measurements(config.fp8_measurements) if config.fp8_measurements else None
    scales: Mapping[int, CacheScales] = {}
    if config.kv_cache_dtype == "fp8":
        layers, scales, digest = cache_layers(model, layers, device, config.cache_scale_method, measurements)
    if config.fp8 != "off":
        digest += quantise_linears(
            model,
            device,
            config.scale_method,
            measurements=measurements if config.fp8 == "static" else None,
            exclude=config.fp8_exclude,
            is_share=is_share,
        )
    return layers, scales, digest


def _use_kernels(model: Any, habana: Habana) -> None:
    """Replace parts of a model by fused kernels that compute the same, and log them."""
    kernels, device = habana.kernels, habana.device
    lines = ["FusedSDPA for plain attention of prefills"] if kernels.attention is not None else []
    experts = use_experts(model, lambda: kernels.experts, device)
    norms = fuse_norms(model, kernels.norm, device) if kernels.norm is not None else {}
    rotary = fuse_rotary(model, kernels.rotary, device) if kernels.rotary is not None else {}
    lines += [f"FusedRMSNorm for {number} {name}" for name, number in norms.items()]
    lines += [f"apply_rotary_pos_emb ({mode}) for {number} {name}" for (name, mode), number in rotary.items()]
    lines += [f"mixture_of_experts for {number} {name}" for name, number in experts.items()]
    logger.info("HPU kernels: %s.", ", ".join(lines) or "none")


def _moved(model: Any, source: ModelSource, habana: Habana) -> Any:
    try:
        return model.to(habana.device)
    except RuntimeError as error:
        raise OutOfMemoryError(f"{habana.device} has no room for the weights of {source.path}: {error}") from error
