"""MTP: the layer behind the last one that some checkpoints bring, trained to predict the token after the next.

    hidden state of token i, after the model's last norm ▶ hnorm ─┐
    embedding of token i + 1 ▶ enorm ─────────────────────────────┴▶ side by side ▶ eh_proj ▶ decoder layer ▶ norm ▶ logits
                                                                                                              └▶ the next token's hidden state

transformers builds the layer (``MtpModel``) and knows the names that its weights are published under. The one layer drafts token after token.

Shapes: T tokens, H hidden size, N heads, KV key-value heads, D head dimension, Dv that of values.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

import re
from typing import Any, Final, NoReturn

import torch
from torch import nn

from trencadis.errors import ModelLoadError
from trencadis_torch.attention import adapter
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.cache.kv_cache import AttentionLayer
from trencadis_torch.heads.contract import Attend
from trencadis_torch.linear.formats.choose import open_source
from trencadis_torch.linear.formats.source import WeightSource
from trencadis_torch.loading.layerwise import are_equal
from trencadis_torch.loading.loader import ModelFiles
from trencadis_torch.loading.named_weights import NamedWeights
from trencadis_torch.loading.positions import fix_dynamic_frequencies
from trencadis_torch.loading.skeleton import skeleton, without_memory

__all__ = ["MTP", "MtpHead", "load_mtp"]

MTP: Final = "mtp"
"""The head that comes with the model, as ``model.head`` names it."""

_BESIDE: Final = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.weight": "lm_head.weight"}
"""Weights that the layer shares with the model, and their names there; files repeat them."""


class MtpHead:
    """The head, on the model's device.

    Args:
        mtp: Module of transformers, its weights loaded.
        norm: The model's last one.
        layer_index: Number of its layer in the KV cache.
        cache_dtype: Data type of keys and values in the cache; None: the one that is computed.

    Attributes:
        layer: The layer of the KV cache that holds its keys and values.
    """

    loop = None
    """Drafts are made one by one."""
    target_ids = None
    """Draft tokens are the model's."""

    def __init__(self, mtp: Any, norm: nn.Module, *, layer_index: int, cache_dtype: torch.dtype | None) -> None:
        self._mtp, self._norm = mtp, norm
        weight = mtp.layers[0].eh_proj.weight
        keys, values = self.keys_and_values(
            weight[:1, : len(weight)], *torch.zeros(2, 1, dtype=torch.int64).to(weight.device)
        )
        self.layer = AttentionLayer(
            index=layer_index,
            num_kv_heads=keys.shape[1],
            key_dim=keys.shape[2],
            value_dim=values.shape[2],
            window=0,
            dtype=cache_dtype or keys.dtype,
        )

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Return hidden states after the model's last norm, ``[T, H]``, from those before it."""
        made: torch.Tensor = self._norm(states)
        return made

    @torch.no_grad()
    def keys_and_values(
        self, hidden: torch.Tensor, next_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys ``[T, KV, D]`` and values ``[T, KV, Dv]``; see ``Head``."""
        try:
            self._run(hidden, next_ids, positions, _Stop())
        except _FoundError as found:
            return found.keys, found.values
        raise ModelLoadError(
            f"model.head {MTP}: its layer takes its attention from elsewhere than transformers' AttentionInterface."
        )

    def draft(
        self, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits, ``[T, V]``, and hidden states of the tokens after these, ``[T, H]``; see ``Head``."""
        hidden = self._run(hidden, tokens, positions, _Through(attend))
        return self._mtp._project_to_logits(hidden), hidden  # noqa: SLF001 - as its own forward does

    def _run(
        self, hidden: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor, one: _Stop | _Through
    ) -> torch.Tensor:
        made: torch.Tensor = self._mtp.forward_layer(
            0, hidden[None], positions[None], None, input_ids=ids[None], **{adapter.PASS_ARGUMENT: one}
        )
        return made[0]


class _Through:
    """A pass in which attention is computed elsewhere."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend

    def attend(
        self, _: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, options: AttentionOptions
    ) -> torch.Tensor:
        return self._attend(query, key, value, options)


class _FoundError(Exception):
    """Keys and values of a layer of which nothing else is wanted: the rest of it, its experts for one, is not computed."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values


class _Stop:
    """A pass that ends with the keys and values."""

    def attend(
        self, _: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, options: AttentionOptions
    ) -> NoReturn:
        raise _FoundError(key, value)


def load_mtp(files: ModelFiles, model: Any, *, cache_dtype: torch.dtype | None) -> MtpHead:
    """Return the head that comes with a model.

    Args:
        files: The model.
        model: Model of transformers, loaded; lends embeddings and output projection.
        cache_dtype: Data type of keys and values in the cache; None: the one that is computed.

    Raises:
        ModelLoadError: There is none, it is of another kind, or weights are missing; says what and what to do.
    """
    _check_config(files)
    norm = getattr(model.get_decoder(), "norm", None)
    if not isinstance(norm, nn.Module):
        _refuse(files, "the model's last norm has another place than in the families that are served")
    main = skeleton(files)
    fix_dynamic_frequencies(main)
    from transformers.modeling_layers import MtpModel

    mtp = without_memory(lambda: MtpModel(main, 1)).eval().requires_grad_(False)
    mtp.set_attn_implementation(adapter.PAGED)
    if model.device.type == "cpu":
        mtp.set_experts_implementation("eager")
    _fill(mtp, main, files, model)
    return MtpHead(mtp.to(model.device), norm, layer_index=_number(files), cache_dtype=cache_dtype)


def _refuse(files: ModelFiles, reason: str) -> NoReturn:
    raise ModelLoadError(
        f"model.head {MTP}: {files.source.path} ({files.config.model_type}): {reason}.",
        hint="Leave model.head empty, or name the directory of an EAGLE-3 head that was trained for this model.",
    )


def _check_config(files: ModelFiles) -> None:
    """Refuse a model without MTP, or with another one.

    Raises:
        ModelLoadError: It has none, or several layers, or one that sees only a window.
    """
    try:
        from transformers.modeling_layers import MtpModel  # noqa: F401 - whether it is there
    except ImportError:
        _refuse(files, "this transformers builds no MTP layers; version 5.24 does")
    text = files.config.get_text_config(decoder=True)
    count = getattr(text, "num_mtp_layers", None)
    if not count:
        _refuse(
            files,
            f"num_mtp_layers = {count}: config.json names no MTP layer, or transformers builds none for this family",
        )
    if count != 1:
        _refuse(files, f"num_mtp_layers = {count}, and one MTP layer is served")
    try:
        kinds = set(getattr(files.config.get_mtp_config(), "layer_types", None) or ())
    except ValueError as error:
        _refuse(files, f"its MTP layer is not described: {error}")
    if kinds - {"full_attention"}:
        _refuse(files, f"its MTP layer is {min(kinds)}, and full_attention is served")


def _fill(mtp: Any, main: Any, files: ModelFiles, model: Any) -> None:
    """Give a head its weights, and what it shares with the model.

    Raises:
        ModelLoadError: The files lack some.
    """
    source = open_source(files.name, files.options, files.config)
    others = [one for one in main._keys_to_ignore_on_load_unexpected or () if "mtp" in one]  # noqa: SLF001 - as MtpModel does
    is_own = re.compile("|".join([rf"(^|\.)layers\.{_number(files)}\.", *others]))
    names = [name for name in source.names() if is_own.search(name)]
    weights = NamedWeights(mtp, source, names=names, rules=mtp.get_weight_conversions(main))
    wanted = {name: tensor.shape for name, tensor in mtp.state_dict().items() if name not in _BESIDE}
    lacking, wrong = sorted(wanted.keys() - weights.names()), weights.of_another_shape()
    if lacking:
        _refuse(files, f"it lacks {len(lacking)} weights of its MTP layer: {_published(files, lacking[0])} for one")
    precise = tuple(getattr(main, "_keep_in_fp32_modules_strict", None) or ())
    for name, tensor in () if wrong else weights.read(wanted, lambda _: False):
        assert isinstance(tensor, torch.Tensor), "asked for as tensors"
        if tensor.shape != wanted[name]:
            wrong.append(name)
            break
        dtype = torch.float32 if any(part in name for part in precise) else model.dtype
        _set(mtp, name, tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True))
    if wrong:
        shape = list(wanted[wrong[0]])
        _refuse(files, f"{_published(files, wrong[0])} of its MTP layer has another shape than {shape}")
    mtp.embed_tokens, mtp.shared_head = model.get_input_embeddings(), model.get_output_embeddings()
    for own, its in _BESIDE.items():
        _keep_apart(mtp, source, own, its, names, model.dtype)
    source.let_go()


def _number(files: ModelFiles) -> int:
    """Return the number under which the layer is published. Pure."""
    return int(files.config.get_text_config(decoder=True).num_hidden_layers)


def _published(files: ModelFiles, name: str) -> str:
    """Return the usual published name of one of transformers'. Pure."""
    own = name.removeprefix("layers.0.").removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
    return f"model.layers.{_number(files)}.{own}"


def _set(mtp: Any, name: str, tensor: torch.Tensor) -> None:
    prefix, _, own = name.rpartition(".")
    module = mtp.get_submodule(prefix)
    if own in module._parameters:  # noqa: SLF001 - not a buffer
        module.register_parameter(own, nn.Parameter(tensor, requires_grad=False))
    else:
        module.register_buffer(own, tensor)


def _keep_apart(mtp: Any, source: WeightSource, own: str, its: str, names: list[str], dtype: torch.dtype) -> None:
    """Give a head embeddings or an output projection of its own, where its file has others than the model's."""
    published = own.replace("shared_head.", "shared_head.head.")
    name = next((name for name in names if name.endswith(f".{published}")), None)
    if name is None or (its in source.names() and are_equal(source.weight(name), source.weight(its), source.let_go)):
        return
    weight = source.tensor(name).to(dtype, copy=True)
    made: nn.Embedding | nn.Linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    if own.startswith("embed"):
        made = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    setattr(mtp, own.removesuffix(".weight"), made)
