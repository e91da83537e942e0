"""Attention layers of a loaded model, found by one small forward instead of its config.

A probe stands in for attention. The mask functions that the model builds are asked what they allow, far beyond the probe's few
tokens: so a sliding window, a chunk or a two-way mask is known exactly. Whatever the paged forward would not compute is refused.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from trencadis.errors import ModelLoadError
from trencadis.records import ModelFacts
from trencadis_torch.attention.adapter import switch
from trencadis_torch.cache.kv_cache import AttentionLayer
from trencadis_torch.loading.loader import attends_in_every_layer
from trencadis_torch.loading.positions import max_positions

__all__ = [
    "attention_layers",
    "check_takes_positions",
    "encoder_facts",
    "in_order",
    "model_facts",
    "note_layer",
    "vocab_size",
    "window_of",
]

PROBE = "trencadis_probe"
FULL, REFUSED = 0, -1
FAR = 1 << 20


def attention_layers(model: Any, *, own: range | None = None) -> tuple[AttentionLayer, ...]:
    """Return the attention layers of a model in layer order; runs one forward of four tokens.

    Args:
        model: Model of transformers.
        own: Layers that are computed here, where others are another rank's; None: all.

    Raises:
        ModelLoadError: The model cannot be computed with a paged KV cache; the message says why.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    check_takes_positions(model)
    name = type(model).__name__
    AttentionInterface.register(PROBE, _probe_attention)
    AttentionMaskInterface.register(PROBE, _probe_mask)
    if not switch(model, PROBE):
        raise ModelLoadError(f"{name} does not take its attention from transformers' AttentionInterface.")
    found: dict[int, AttentionLayer] = {}
    tokens = torch.arange(4, device=model.device)[None]
    try:
        with torch.inference_mode():
            model(input_ids=tokens, use_cache=False, trencadis_probe=found)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{name}: a forward of four tokens failed: {type(error).__name__}: {error}") from error
    return in_order(model, found, own)


def check_takes_positions(model: Any) -> None:
    """Refuse a model whose state or positions no paged cache can keep. Pure.

    Args:
        model: Model of transformers.

    Raises:
        ModelLoadError: With the reason.
    """
    name = type(model).__name__
    if getattr(model, "_is_stateful", False) and not attends_in_every_layer(model.config):
        raise ModelLoadError(f"{name} keeps recurrent state, which cannot be paged.")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ModelLoadError(f"{name} takes no positions (position_ids); its position encoding cannot be paged.")


def in_order(model: Any, found: dict[int, AttentionLayer], own: range | None = None) -> tuple[AttentionLayer, ...]:
    """Return attention layers in layer order. Pure.

    Args:
        model: Model of transformers.
        found: Layers that a forward found, by ``layer_idx``.
        own: Layers of this rank; see :func:`attention_layers`.

    Raises:
        ModelLoadError: Layers are missing that would have to be there.
    """
    _check_complete(model, found, own)
    return tuple(found[index] for index in sorted(found))


def _check_complete(model: Any, found: dict[int, AttentionLayer], own: range | None) -> None:
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if not found:
        raise ModelLoadError(f"{name} does not take its attention from transformers' AttentionInterface.")
    silent = sorted(set(range(config.num_hidden_layers) if own is None else own) - set(found))
    if silent:
        raise ModelLoadError(
            f"{name}: layers {silent} compute no attention that can be paged; recurrent layers are not served."
        )


def _probe_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    trencadis_probe: dict[int, AttentionLayer] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Note the shape and the window of an attention module; returns outputs of the right shape."""
    window = None if attention_mask is None else int(attention_mask.flatten()[0])
    note_layer(trencadis_probe, module, key, value, window=window, options=options)
    batch_size, num_heads, query_len, _ = query.shape
    return query.new_zeros(batch_size, query_len, num_heads, value.shape[-1]), None


def note_layer(
    found: dict[int, AttentionLayer] | None,
    module: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int | None,
    options: dict[str, Any],
) -> None:
    """Note the shape and the window of an attention module that hands over its tensors.

    Args:
        found: Takes the layer, by its ``layer_idx``; None: it was not passed on.
        module: The module.
        key: ``[B, KV, T, D]``.
        value: ``[B, KV, T, Dv]``.
        window: Window that :func:`window_of` returns; None: there is no mask.
        options: Further arguments of the module's call.

    Raises:
        ModelLoadError: The layer cannot be paged.
    """
    name, index = type(module).__name__, getattr(module, "layer_idx", None)
    if found is None or index is None:
        raise ModelLoadError(f"{name} passes no arguments of forward on to attention, or has no layer_idx.")
    if index in found:
        raise ModelLoadError(f"{name}: layer {index} computes attention twice; that cannot be paged.")
    if options.get("position_bias") is not None or getattr(module, "is_causal", True) is False:
        raise ModelLoadError(f"{name}: layer {index} has relative position biases or sees the future.")
    if window is None:
        raise ModelLoadError(f"{name}: layer {index} got no mask from the model; what it may see is unknown.")
    if window == REFUSED:
        raise ModelLoadError(f"{name}: the mask of layer {index} is neither causal nor a sliding window.")
    found[index] = AttentionLayer(
        index=index,
        num_kv_heads=key.shape[1],
        key_dim=key.shape[-1],
        value_dim=value.shape[-1],
        window=window,
        dtype=key.dtype,
    )


def _probe_mask(*, mask_function: Any, device: torch.device, local_size: int | None = None, **_: Any) -> torch.Tensor:
    """Return a "mask" that carries the window a mask function amounts to."""
    return torch.full((1, 1, 1, 1), float(window_of(mask_function, local_size or 0)), device=device)


def window_of(mask_function: Any, hint: int) -> int:
    """Return the window of a mask function of transformers, 0 for a causal one, -1 for anything else. Pure.

    Args:
        mask_function: ``(batch, head, query, key) -> bool``, on tensors of indices.
        hint: The window it claims to have; 0 for none.
    """
    size = hint or FAR
    steps = torch.tensor([0, 1, 2, size // 2, size - 1, size, size + 1, 2 * size, 3 * size])
    distances = torch.cat([-steps, steps])
    # Queries next to each other and far apart: a chunked mask betrays itself at some of them.
    queries = 4 * size + torch.arange(0, 4 * size, max(1, size // 3))[:, None]
    keys = queries - distances
    zero = torch.zeros((), dtype=torch.long)
    allowed = mask_function(zero, zero, queries, keys).expand(keys.shape)
    expected = distances >= 0
    if hint:
        expected = expected & (distances < hint)
    return hint if bool((allowed == expected).all()) else REFUSED


def model_facts(model: Any, layers: tuple[AttentionLayer, ...]) -> ModelFacts:
    """Return the facts the engine needs about a model. Pure."""
    config = model.config.get_text_config(decoder=True)
    return ModelFacts(
        **_common_facts(model),
        vocab_size=vocab_size(model),
        max_model_len=max_positions(config),
        eos_token_ids=_ends(getattr(model, "generation_config", None), config),
        kv_bytes_per_token=sum(layer.bytes_per_token for layer in layers),
    )


def _ends(generation: Any, config: Any) -> tuple[int, ...]:
    """Return the tokens that end a text by either of a checkpoint's files. Pure.

    An end that is only the default of the config's class counts where there is no other: the checkpoint does not name it.
    """
    ends = _ids(getattr(generation, "eos_token_id", None))
    own = _ids(getattr(config, "eos_token_id", None))
    is_named = not ends or own != _ids(_default_of(config, "eos_token_id"))
    return tuple(dict.fromkeys(ends + own if is_named else ends))


def _default_of(config: Any, name: str) -> Any:
    """Return what a config's class says where a checkpoint says nothing; None if the class cannot be made of nothing."""
    try:
        return getattr(type(config)(), name, None)
    except Exception:  # some classes demand values
        return None


def _ids(eos: Any) -> tuple[int, ...]:
    return tuple(map(int, eos)) if isinstance(eos, list | tuple) else () if eos is None else (int(eos),)


def vocab_size(model: Any) -> int:
    """Return how many tokens a decoder has logits of; of all ranks, where they divide them. Pure."""
    head = model.get_output_embeddings()
    return int(getattr(head, "out_features", 0) or head.weight.shape[0])


def encoder_facts(model: Any, max_seq_length: int) -> ModelFacts:
    """Return the facts the engine needs about a model that only embeds. Pure.

    Args:
        model: Model of transformers.
        max_seq_length: Longest text its files allow, tokens; 0: they name none.
    """
    longest = min(max_positions(model.config.get_text_config()), _num_positions(model))
    return ModelFacts(
        **_common_facts(model),
        vocab_size=model.get_input_embeddings().weight.shape[0],
        max_model_len=min(longest, max_seq_length or longest),
        eos_token_ids=(),
        kv_bytes_per_token=0,
        generates=False,
    )


def _common_facts(model: Any) -> dict[str, Any]:
    weights = {p.data_ptr(): p for p in model.parameters()}.values()
    return {
        "architecture": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_parameters": sum(p.numel() for p in weights),
        "weights_bytes": sum(p.numel() * p.element_size() for p in weights),
    }


def _num_positions(model: Any) -> int:
    """Return how many positions a table of position embeddings has; RoBERTa's kin count from after the padding's row."""
    for name, part in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, torch.nn.Embedding):
            return part.num_embeddings - (0 if part.padding_idx is None else part.padding_idx + 1)
    return FAR
