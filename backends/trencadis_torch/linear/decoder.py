"""A plain decoder read off its modules, and laid out for ``decoder.cpp``: all of it runs in one call then.

Its modules have been packed and fused before (see :mod:`trencadis_torch.linear.replacement`), and stay where they are for code that walks through
them layer by layer; weights are shared with them, and held once. How they are put together is seen in one forward (see
:mod:`trencadis_torch.linear.structure`). What is not exactly a stack of such layers is not read.

    embeddings ▶ [norm ▶ attention ▶ + ▶ norm ▶ MLP ▶ +] × layers ▶ norm ▶ output projection
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
from collections.abc import Iterator
from typing import Any, Final

import attrs
import torch
from torch import nn

from trencadis_torch.attention.options import ARGUMENTS, AttentionOptions
from trencadis_torch.linear.angles import Angles, ModuleAngles, simplified
from trencadis_torch.linear.experts import FusedMixture
from trencadis_torch.linear.fused import FusedMLP, FusedNorm, RotaryAttention
from trencadis_torch.linear.heads import Heads, in_order
from trencadis_torch.linear.native import Mixture, Product, product
from trencadis_torch.linear.native_decoder import Decoder, Layer, NativeDecoder, Norm, layer_array
from trencadis_torch.linear.packed import PackedLinear, RowsEmbedding
from trencadis_torch.linear.scaling import alike
from trencadis_torch.linear.structure import (
    Ending,
    LayerParts,
    OtherwiseError,
    Seen,
    need,
    read_ending,
    read_layer,
    same,
    scale_between,
)
from trencadis_torch.linear.watch import POSITIONS

__all__ = ["FusedDecoder", "LayerAttention", "attach", "decoder_of", "how_it_runs", "original_of", "read_decoder"]

logger = logging.getLogger("trencadis.torch")

_NORMS: Final = ("attention_norm", "attended_norm", "mlp_norm", "projected_norm")
_KNOWN_ARGUMENTS: Final = {"dropout", "sliding_window", *ARGUMENTS}
_MOVING_ANGLES: Final = ("dynamic", "longrope")
"""Positions are turned by other angles once a text is long."""


@attrs.frozen(kw_only=True)
class LayerAttention:
    """Heads and options of one layer's attention.

    Attributes:
        index: The layer's ``layer_idx``.
        num_heads: H.
        num_kv_heads: KV.
        head_dim: D.
        options: Scale, soft cap and float32 sinks.
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
        structure: Structure that the library reads; refers to the memory of ``held``.
        attention: Attention of each layer.
        angles: Angles of positions; layers name theirs by its place here.
        vocab_size: V.
        intermediate_size: I, of the widest layer.
        wide: Floats of a row between two operations that are not one; 0: all are.
        num_products: Number of numbers of a token that are multiplied by a weight in one of its operations, on average.
        ending: Scale and soft cap that turn the output projection's values into logits.
        held: Whose memory that is.
    """

    native: NativeDecoder
    structure: Decoder
    attention: tuple[LayerAttention, ...]
    angles: tuple[Angles, ...]
    vocab_size: int
    intermediate_size: int
    wide: int
    num_products: int
    ending: Ending
    held: tuple[Any, ...]


def attach(model: Any, decoder: FusedDecoder | None, why: str = "") -> None:
    """Let a model's passes run in one call from now on; None: layer by layer again.

    Args:
        model: Model of transformers.
        decoder: Read off it.
        why: It runs layer by layer, in words.
    """
    model.trencadis_decoder = decoder
    model.trencadis_layer_by_layer = why


def decoder_of(model: Any) -> FusedDecoder | None:
    """Return the decoder attached to a model, or None."""
    decoder: FusedDecoder | None = getattr(model, "trencadis_decoder", None)
    return decoder


def original_of(model: Any) -> Any:
    """Return the model of transformers: the one given, or that which it stands for, made now if it was not needed yet."""
    return getattr(model, "original", lambda: model)()


def how_it_runs(model: Any) -> str:
    """Return ``in one call``, or ``layer by layer`` with the reason if there is one."""
    if decoder_of(model) is not None:
        return "in one call"
    why = getattr(model, "trencadis_layer_by_layer", "")
    return f"layer by layer: {why}" if why else "layer by layer"


def read_decoder(model: Any, native: NativeDecoder, *, panel: int) -> FusedDecoder:
    """Return a model's decoder. Its attention is switched to one that attends to nothing.

    Args:
        model: Model of transformers, its modules packed and fused.
        native: The library.
        panel: Outputs that packed layers store together.

    Raises:
        OtherwiseError: It is not a plain one; says where.
    """
    return _Reader(model, native, panel).read()


class _Reader:
    """Reads one model, and gives up where it is not as expected."""

    def __init__(self, model: Any, native: NativeDecoder, panel: int) -> None:
        self._model = model
        self._native = native
        self._panel = panel
        self._held: list[Any] = []
        self._angles: list[Angles] = []

    @torch.no_grad()
    def read(self) -> FusedDecoder:
        model = self._model
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        need(isinstance(head, PackedLinear), "its output projection is not packed")
        layers = self._find_layers()
        self._seen = Seen(model)
        final = self._between(layers, head)
        parts = [read_layer(layer, self._seen) for layer in layers]
        made = [self._layer(one) for one in parts]
        structure = Decoder(
            layers=layer_array(made),
            head=self._product(head),
            final_norm=self._norm(final),
            num_layers=len(made),
            hidden_size=head.in_features,
        )
        self._embeddings(embedding, layers[0], head, structure)
        _, projected = self._seen.io(head, "its output projection")
        weights = sum(part.out_features * part.in_features for part in self._packed())
        return FusedDecoder(
            native=self._native,
            structure=structure,
            attention=tuple(self._attention(one.attention) for one in parts),
            angles=tuple(self._angles),
            vocab_size=head.out_features,
            intermediate_size=max(one.down.num_inputs for one in made),
            wide=max(map(self._wide, made)),
            num_products=weights // len(self._packed()),
            ending=read_ending(projected, self._seen.logits, self._seen.numbers),
            held=(made, *self._held),
        )

    def _wide(self, layer: Layer) -> int:
        """Return the floats of a row that one layer puts between two of its operations."""
        by_way = any(getattr(layer, name).weight for name in ("attended_norm", "projected_norm"))
        by_way = by_way or (layer.attended_scale, layer.projected_scale) != (1.0, 1.0)
        gates = layer.gate_up.num_outputs if layer.gated and layer.gate_up.num_outputs // 2 % self._panel else 0
        by_way = by_way or bool(layer.mixture.num_experts)
        return max(gates, layer.out.num_outputs if by_way else 0)

    def _find_layers(self) -> list[nn.Module]:
        """Return modules that have an attention as a child, in their order."""
        modules = self._model.modules()
        found = [part for part in modules if any(isinstance(child, RotaryAttention) for child in part.children())]
        count = self._model.config.get_text_config().num_hidden_layers
        need(len(found) == count, f"its attention is its own in {count - len(found)} of {count} layers")
        return found

    def _between(self, layers: list[nn.Module], head: nn.Module) -> FusedNorm:
        """Return the last norm; layers follow each other, and it stands between them and the output projection."""
        calls = [self._seen.io(layer, "a layer") for layer in layers]
        for (_, made), (given, _) in itertools.pairwise(calls):
            need(torch.equal(made, given), "something happens between its layers")
        last, given = calls[-1][1], self._seen.io(head, "its output projection")[0]
        for norm in self._norms():
            x, y = self._seen.io(norm, "its last norm")
            if torch.equal(y, given):
                need(torch.equal(x, last), "something happens behind its last layer")
                return norm
        raise OtherwiseError("its last norm is its own")

    def _norms(self) -> list[FusedNorm]:
        return [part for part in self._model.modules() if isinstance(part, FusedNorm) and self._seen.has(part)]

    def _layer(self, parts: LayerParts) -> Layer:
        attention, heads = parts.attention, parts.attention.heads
        mixture, mlp = self._mixture(parts.mlp)
        found = Layer(
            qkv=self._product(attention.qkv),
            out=self._product(attention.o_proj),
            gate_up=Product() if mlp is None else self._product(mlp.gate_up),
            down=Product() if mlp is None else self._product(mlp.down_proj),
            mixture=mixture,
            query_norm=self._at(attention.query_norm),
            key_norm=self._at(attention.key_norm),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            how=heads.how,
            angles=self._place(parts, heads),
            activation=0 if mlp is None else mlp.activation,
            gated=mlp is not None and mlp.gated,
            order=parts.order,
            head_eps=heads.eps,
            attended_scale=parts.attended_scale,
            projected_scale=parts.projected_scale,
        )
        for name in _NORMS:
            setattr(found, name, self._norm(getattr(parts, name)))
        return found

    def _mixture(self, mlp: FusedMLP | FusedMixture) -> tuple[Mixture, FusedMLP | None]:
        """Return a layer's mixture of experts, without experts if there is none, and the MLP that is alone or beside them."""
        if isinstance(mlp, FusedMLP):
            return Mixture(), mlp
        self._held.append(mlp)
        return mlp.structure(), mlp.beside

    def _place(self, parts: LayerParts, heads: Heads) -> int:
        """Return the place of a layer's angles among all; below 0: it has none."""
        if parts.angles is None:
            need(heads.scales is None, "its queries are scaled by their positions, and not turned")
            return -1
        positions, given = torch.tensor(POSITIONS), in_order(*parts.angles, spread=heads.spread, once=heads.once)
        for place, angles in enumerate(self._angles):
            if alike(angles.scales, heads.scales) and all(map(torch.equal, angles.source(positions), given)):
                return place
        for source in self._possible_angles(heads):
            if all(map(torch.equal, source(positions), given)):
                self._angles.append(Angles(simplified(source, self._num_positions()), heads.scales))
                return len(self._angles) - 1
        raise OtherwiseError("its angles are those of no module that is known")

    def _num_positions(self) -> int:
        config = self._model.config.get_text_config(decoder=True)
        return int(getattr(config, "max_position_embeddings", 0) or 1 << 15)

    def _possible_angles(self, heads: Heads) -> Iterator[ModuleAngles]:
        """Yield angles of modules that give two tensors of one shape, by the arguments that they may take."""
        kinds = dict.fromkeys(getattr(self._model.config.get_text_config(), "layer_types", None) or ())
        for part in self._model.modules():
            if not self._seen.gives_pair(part):
                continue
            ropes = getattr(part, "rope_type", "default")
            moving = {str(one) for one in (ropes.values() if isinstance(ropes, dict) else [ropes])} & {*_MOVING_ANGLES}
            need(not moving, f"its angles are {', '.join(moving)}: other ones once a text is long")
            for arguments in ((), *((kind,) for kind in kinds)):
                angles = ModuleAngles(part, arguments, heads.spread, heads.once)
                with contextlib.suppress(TypeError, KeyError, AttributeError):
                    angles(torch.tensor(POSITIONS))
                    yield angles

    def _attention(self, attention: RotaryAttention) -> LayerAttention:
        arguments, options = attention.options, AttentionOptions.of(attention.options)
        is_known = arguments.keys() <= _KNOWN_ARGUMENTS and not arguments.get("dropout")
        need(is_known, f"its attention takes {sorted(arguments)}")
        heads = attention.heads
        if options.sinks is not None:
            need(options.sinks.shape == (heads.num_heads,), "its attention has not one sink for each head")
            options = options._replace(sinks=options.sinks.detach().float().contiguous())
        return LayerAttention(
            index=attention.layer_idx,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            options=options,
        )

    def _embeddings(self, embedding: Any, first: nn.Module, head: PackedLinear, structure: Decoder) -> None:
        structure.num_embeddings, scale = head.out_features, 1.0
        if isinstance(embedding, RowsEmbedding):
            scale = embedding.scale
            if embedding.head is not head:
                table = self._product(embedding.head)
                self._held.append(table)
                structure.table, structure.num_embeddings = ctypes.pointer(table), embedding.head.out_features
        else:
            weight: Any = getattr(embedding, "weight", None)
            need(isinstance(weight, torch.Tensor) and weight.dtype is torch.float32, "its embeddings are not float32")
            need(weight.is_contiguous() and weight.shape[1] == head.in_features, "its embeddings have another size")
            structure.embeddings, structure.num_embeddings = self._at(weight), len(weight)
            scale = float(getattr(embedding, "scalar_embed_scale", 1.0))
            rows = weight[self._seen.given(embedding)] * scale
            need(same(self._seen.output(embedding, "its embeddings"), rows), "its embeddings are not rows of a weight")
        made, (hidden, _) = self._seen.output(embedding, "its embeddings"), self._seen.io(first, "its first layer")
        factor, norm = scale_between(made, hidden, self._seen.numbers), None
        if factor is None:
            factor = 1.0
            norm = next((one for one in self._norms() if torch.equal(one(made), hidden)), None)
            need(norm is not None, "something happens between its embeddings and its first layer")
        structure.embedding_scale, structure.embedding_norm = scale * factor, self._norm(norm)

    def _norm(self, norm: FusedNorm | None) -> Norm:
        if norm is None:
            return Norm()
        return Norm(weight=self._at(norm.weight), bias=self._at(norm.bias), eps=norm.eps, centred=norm.centred)

    def _product(self, layer: Any) -> Any:
        need(isinstance(layer, PackedLinear), "a linear layer is not packed")
        self._held.append(layer)
        return product(layer.packed)

    def _packed(self) -> list[Any]:
        return [part for part in self._held if isinstance(part, PackedLinear)]

    def _at(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._held.append(tensor)
        return tensor.data_ptr()
