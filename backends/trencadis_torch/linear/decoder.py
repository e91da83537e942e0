"""A plain decoder read off its modules, and laid out for ``decoder.cpp``: all of it runs in one call then.

Its modules have been packed and fused before (see :mod:`trencadis_torch.linear.replacement`), and stay where they are for code that walks through
them layer by layer; weights are shared with them, and held once. What is not exactly a stack of such layers is not read.

    embeddings ▶ [norm ▶ attention ▶ + ▶ norm ▶ gated MLP ▶ +] × layers ▶ norm ▶ output projection
"""

from __future__ import annotations

import ctypes
import logging
import re
from typing import Any, Final

import attrs
import torch
from torch import nn

from trencadis_torch.attention.options import ARGUMENTS, AttentionOptions
from trencadis_torch.linear.fused import FusedNorm, GatedMLP, RotaryAttention
from trencadis_torch.linear.native import product
from trencadis_torch.linear.native_decoder import Decoder, Layer, NativeDecoder, layer_array
from trencadis_torch.linear.packed import PackedLinear, RowsEmbedding

__all__ = ["Angles", "LayerAttention", "FusedDecoder", "attach", "decoder_of", "read_decoder"]

logger = logging.getLogger("trencadis.torch")

_FAMILIES: Final = r"(Llama|Mistral|Ministral|Qwen2|Qwen3|Gemma|Gemma2)"
_MODEL: Final = re.compile(_FAMILIES + "ForCausalLM")
_LAYER: Final = re.compile(_FAMILIES + "DecoderLayer")
_NORMS: Final = ("input_layernorm", "post_attention_layernorm")
_FOUR_NORMS: Final = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_PLACES: Final = {
    2: ("attention_norm", "mlp_norm"),
    4: ("attention_norm", "attended_norm", "mlp_norm", "projected_norm"),
}
"""Where the library looks for the weights of two norms, or of four."""

_KNOWN_ARGUMENTS: Final = {"dropout", "sliding_window", *ARGUMENTS}
_MOVING_ANGLES: Final = ("dynamic", "longrope")
"""Positions are turned by other angles once a text is long."""


class Angles:
    """Cosines and sines by position: computed once by the model's own module, for as many positions as were needed so far.

    Args:
        rotary: The module.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary = rotary
        self.cosines = self.sines = torch.empty(0, 0)

    @torch.no_grad()
    def reach(self, num_positions: int) -> None:
        """Have the angles of positions below a number in ``cosines`` and ``sines``, float32 ``[num_positions or more, R]``."""
        if num_positions <= len(self.cosines):
            return
        positions = torch.arange(max(256, 1 << (num_positions - 1).bit_length()))[None]
        cosines, sines = self._rotary(torch.empty(1, 1, 1), positions)
        self.cosines, self.sines = (one[0].float().contiguous() for one in (cosines, sines))


@attrs.frozen(kw_only=True)
class LayerAttention:
    """Heads and options of one layer's attention.

    Attributes:
        index: The layer's ``layer_idx``.
        num_heads: H.
        num_kv_heads: KV.
        head_dim: D.
        options: Without sinks.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    options: AttentionOptions


@attrs.frozen(kw_only=True, eq=False)
class FusedDecoder:
    """A decoder that runs in one call.

    Attributes:
        native: The library.
        structure: What it reads; refers to the memory of ``held``.
        attention: Of each layer.
        angles: Of positions.
        vocab_size: V.
        intermediate_size: I, of the widest layer.
        wide: Floats of a row between two operations of an MLP that are not one; 0: they are.
        num_products: Of a token, how many numbers are multiplied by a weight in one of its operations, on average.
        softcap: Of the logits; None: they are as they come.
        held: Whose memory that is.
    """

    native: NativeDecoder
    structure: Decoder
    attention: tuple[LayerAttention, ...]
    angles: Angles
    vocab_size: int
    intermediate_size: int
    wide: int
    num_products: int
    softcap: float | None
    held: tuple[Any, ...]


def attach(model: Any, decoder: FusedDecoder | None) -> None:
    """Let a model's passes run in one call from now on; None: layer by layer again."""
    model.trencadis_decoder = decoder


def decoder_of(model: Any) -> FusedDecoder | None:
    """Return the decoder attached to a model, or None."""
    decoder: FusedDecoder | None = getattr(model, "trencadis_decoder", None)
    return decoder


def read_decoder(model: Any, native: NativeDecoder, *, panel: int) -> FusedDecoder | None:
    """Return a model's decoder; None: it is not a plain one. Pure.

    Args:
        model: Of transformers, its modules packed and fused.
        native: The library.
        panel: Outputs that packed layers store together.
    """
    try:
        return _Reader(model, native, panel).read()
    except _OtherwiseError as reason:
        logger.info("%s runs layer by layer: %s.", type(model).__name__, reason)
        return None


class _OtherwiseError(Exception):
    """A model is not a plain decoder; says where."""


def _need(holds: Any, what: str) -> None:
    if not holds:
        raise _OtherwiseError(what)


class _Reader:
    """Reads one model, and gives up where it is not as expected."""

    def __init__(self, model: Any, native: NativeDecoder, panel: int) -> None:
        self._model = model
        self._native = native
        self._panel = panel
        self._held: list[Any] = []

    def read(self) -> FusedDecoder:
        model = self._model
        _need(_MODEL.fullmatch(type(model).__name__), "its family is not known")
        base, head = model.base_model, model.get_output_embeddings()
        names = {name for name, _ in base.named_children()}
        _need(names == {"embed_tokens", "layers", "norm", "rotary_emb"}, f"it is made of {sorted(names)}")
        _need(isinstance(head, PackedLinear), "its output projection is not packed")
        _need(isinstance(base.norm, FusedNorm), "its last norm is its own")
        rope = getattr(base.rotary_emb, "rope_type", "default")
        _need(rope not in _MOVING_ANGLES, f"its angles are {rope}")
        layers = [self._layer(layer) for layer in base.layers]
        structure = Decoder(
            layers=layer_array(layers),
            head=self._product(head),
            final_norm=self._at(base.norm.weight),
            num_layers=len(layers),
            hidden_size=head.in_features,
            eps=base.norm.eps,
        )
        self._embeddings(base.embed_tokens, head, structure)
        gates = [layer.gate_up.num_outputs for layer in layers]
        norms = [head.in_features for layer in layers if layer.attended_norm]
        weights = sum(part.out_features * part.in_features for part in self._packed())
        return FusedDecoder(
            native=self._native,
            structure=structure,
            attention=tuple(self._attention(layer.self_attn) for layer in base.layers),
            angles=Angles(base.rotary_emb),
            vocab_size=head.out_features,
            intermediate_size=max(gates) // 2,
            wide=max([0, *norms, *(size for size in gates if size // 2 % self._panel)]),
            num_products=weights // len(self._packed()),
            softcap=getattr(model.config, "final_logit_softcapping", None),
            held=(layers, *self._held),
        )

    def _layer(self, layer: Any) -> Layer:
        kind = type(layer).__name__
        _need(_LAYER.fullmatch(kind), f"its layers are of {kind}")
        parts: dict[str, Any] = dict(layer.named_children())
        norms: list[Any] = [parts[name] for name in _FOUR_NORMS if name in parts]
        attention: Any = parts.get("self_attn")
        mlp: Any = parts.get("mlp")
        _need(
            isinstance(attention, RotaryAttention) and isinstance(mlp, GatedMLP), "its attention or its MLP is its own"
        )
        _need(all(isinstance(norm, FusedNorm) for norm in norms), "its norms are their own")
        names = set(parts) - {"self_attn", "mlp"}
        _need(names in (set(_NORMS), set(_FOUR_NORMS)), f"its layers have {sorted(names)}")
        _need(len({norm.eps for norm in norms}) == 1, "its norms differ in eps")
        found = Layer(
            qkv=self._product(attention.qkv),
            out=self._product(attention.o_proj),
            gate_up=self._product(mlp.gate_up),
            down=self._product(mlp.down_proj),
            query_norm=self._at(attention.query_norm),
            key_norm=self._at(attention.key_norm),
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            activation=mlp.activation,
            eps=norms[0].eps,
            head_eps=attention.eps,
        )
        for name, norm in zip(_PLACES[len(norms)], norms, strict=True):
            setattr(found, name, self._at(norm.weight))
        return found

    def _attention(self, attention: Any) -> LayerAttention:
        arguments, options = attention.options, AttentionOptions.of(attention.options)
        is_known = arguments.keys() <= _KNOWN_ARGUMENTS and not arguments.get("dropout") and options.sinks is None
        _need(is_known, f"its attention takes {sorted(arguments)}")
        return LayerAttention(
            index=attention.layer_idx,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            options=options,
        )

    def _embeddings(self, embedding: Any, head: PackedLinear, structure: Decoder) -> None:
        structure.num_embeddings, structure.embedding_scale = head.out_features, 1.0
        if isinstance(embedding, RowsEmbedding):
            structure.embedding_scale = embedding.scale
            if embedding.head is not head:
                table = self._product(embedding.head)
                self._held.append(table)
                structure.table, structure.num_embeddings = ctypes.addressof(table), embedding.head.out_features
            return
        weight: Any = getattr(embedding, "weight", None)
        _need(isinstance(weight, torch.Tensor) and weight.dtype is torch.float32, "its embeddings are not float32")
        _need(weight.is_contiguous() and weight.shape[1] == head.in_features, "its embeddings have another size")
        structure.embeddings, structure.num_embeddings = self._at(weight), len(weight)
        structure.embedding_scale = float(getattr(embedding, "scalar_embed_scale", 1.0))

    def _product(self, layer: Any) -> Any:
        _need(isinstance(layer, PackedLinear), "a linear layer is not packed")
        self._held.append(layer)
        return product(layer.packed)

    def _packed(self) -> list[Any]:
        return [part for part in self._held if isinstance(part, PackedLinear)]

    def _at(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._held.append(tensor)
        return tensor.data_ptr()
