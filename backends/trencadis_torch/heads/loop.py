"""A head on a CPU: all its drafts, or what it reads of a pass, in one call of ``decoder.cpp``. Its layer is laid out as those of a decoder.

Drafts attend to their texts where these are cached, and to the drafts before, which stay beside the cache.

Shapes: B sequences, G most drafts of one, H hidden size, KV key-value heads, D head dimension, V draft vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Final

import attrs
import numpy as np
import torch
from torch import nn

from trencadis.records import Int32Array
from trencadis_torch.linear.heads import Heads
from trencadis_torch.linear.native import ACTIVATIONS, product, threads_for
from trencadis_torch.linear.native_decoder import (
    AngleTable,
    Decoder,
    DraftSteps,
    Followed,
    Joined,
    Layer,
    NativeDecoder,
    Norm,
    Pass,
    layer_array,
)
from trencadis_torch.linear.packed import PackedLinear, RowsEmbedding

__all__ = ["DraftLoop", "HeadParts", "draft_loop"]

_BUFFERS: Final = ("hidden", "normed", "joined", "qkv", "attended", "gated", "wide", "logits")


@attrs.frozen(kw_only=True, eq=False)
class HeadParts:
    """What a head is made of.

    Attributes:
        states: Makes the head's hidden state from the model's.
        linear: Queries, keys and values; attention's output; gates and values; down; logits.
        norms: Weights of four: embeddings, hidden states, before the MLP, before the logits.
        eps: Epsilon of these norms.
        embeddings: Module that embeds tokens.
        heads: Sizes of attention.
        keeps_normed: Attention's output is added to the normed hidden state.
        angles: Cosines and sines of all positions.
        target_ids: Token of each draft token; None: the same number.
    """

    states: Any
    linear: tuple[Any, Any, Any, Any, Any]
    norms: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    eps: float
    embeddings: Any
    heads: Heads
    keeps_normed: bool
    angles: tuple[torch.Tensor, torch.Tensor]
    target_ids: torch.Tensor | None


def draft_loop(parts: HeadParts, library: NativeDecoder | None) -> DraftLoop | None:
    """Return the loop of a head; None where there is no library, or the head's parts are not as it reads them.

    Args:
        parts: On a CPU.
        library: Compiled.
    """
    rows = parts.embeddings
    packed = [parts.states, *parts.linear, *([rows.head] if isinstance(rows, RowsEmbedding) else [])]
    is_table = type(rows) is nn.Embedding and rows.weight.dtype is torch.float32 and rows.weight.is_contiguous()
    if library is None or not all(isinstance(one, PackedLinear) for one in packed):
        return None
    return DraftLoop(parts, library) if is_table or isinstance(rows, RowsEmbedding) else None


class DraftLoop:
    """A head's layer as the library reads it.

    Args:
        parts: Whose weights are packed.
        library: Computes.
    """

    def __init__(self, parts: HeadParts, library: NativeDecoder) -> None:
        self._parts, self._library = parts, library
        heads, (qkv, out, gate_up, down, head) = parts.heads, parts.linear
        norms = [Norm(weight=one.data_ptr(), eps=parts.eps) for one in parts.norms]
        states = product(parts.states.packed)
        # What a pass leaves of its tokens is the hidden state before the norm.
        self._joined = [
            Joined(states=states, embedding_norm=norms[0], hidden_norm=norms[1], keeps_normed=keeps)
            for keeps in (parts.keeps_normed, False)
        ]
        layer = Layer(
            qkv=product(qkv.packed),
            out=product(out.packed),
            gate_up=product(gate_up.packed),
            down=product(down.packed),
            mlp_norm=norms[2],
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
            activation=ACTIVATIONS["silu"],
            gated=1,
            attended_scale=1.0,
            projected_scale=1.0,
        )
        common: dict[str, Any] = dict(
            layers=layer_array([layer]),
            head=product(head.packed),
            final_norm=norms[3],
            num_layers=1,
            hidden_size=out.out_features,
            **self._embedding(parts.embeddings),
        )
        self._decoder, self._following = (Decoder(joined=ctypes.pointer(one), **common) for one in self._joined)
        self._num_products = sum(one.out_features * one.in_features for one in parts.linear) // len(parts.linear)
        cosines, sines = parts.angles
        table = AngleTable(cosines=cosines.data_ptr(), sines=sines.data_ptr(), num_turned=cosines.shape[1])
        self._angles = (AngleTable * 1)(table)
        targets = parts.target_ids
        self._steps = DraftSteps(
            target_ids=None if targets is None else targets.data_ptr(),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
        )
        self._kv_size = heads.num_kv_heads * heads.head_dim
        hidden, inside = out.out_features, gate_up.out_features // 2
        widths = (hidden, hidden, 2 * hidden, qkv.out_features, out.in_features, inside, 2 * inside, head.out_features)
        self._widths = dict(zip(_BUFFERS, widths, strict=True))
        self._widest, self._scratch_floats = library.sizes(self._decoder)
        self._pass = Pass(angles=ctypes.addressof(self._angles), scratch_floats=self._scratch_floats)
        self._capacity, self._drafted, self._scratch = 0, torch.empty(0), torch.empty(0)
        self._buffers: dict[str, torch.Tensor] = {}

    def _embedding(self, embeddings: Any) -> dict[str, Any]:
        if isinstance(embeddings, RowsEmbedding):
            size, table = embeddings.head.out_features, ctypes.pointer(product(embeddings.head.packed))
            return {"table": table, "embedding_scale": embeddings.scale, "num_embeddings": size}
        weight = embeddings.weight
        return {"embeddings": weight.data_ptr(), "embedding_scale": 1.0, "num_embeddings": len(weight)}

    def follow(
        self,
        states: torch.Tensor,
        tokens: np.ndarray,
        positions: torch.Tensor,
        slots: torch.Tensor,
        *,
        cached: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Write keys and values of a pass's tokens; return what the head reads of them, ``[T, H]``.

        Args:
            states: Hidden states of the model, float32 ``[T, S]``.
            tokens: The token after each, ``[T]``.
            positions: int64 ``[T]``.
            slots: Where keys and values go, int64 ``[T]``.
            cached: Keys and values, float32 ``[blocks, block size, KV, D]`` each; written.

        Raises:
            IndexError: A token has no embedding.
        """
        one, size, ids = self._pass, len(states), tokens.astype(np.int64)
        self._reserve(size, 0)
        hidden = torch.empty(size, self._widths["hidden"])
        held = [states.contiguous(), positions.contiguous(), slots.contiguous()]
        one.hidden, one.num_tokens = hidden.data_ptr(), size
        one.token_ids, one.positions = ids.ctypes.data, held[1].data_ptr()
        keys, values = (part.data_ptr() for part in cached)
        read = Followed(states=held[0].data_ptr(), slots=held[2].data_ptr(), keys=keys, values=values)
        _check(self._library.follow(*(ctypes.addressof(part) for part in (self._following, one, read))))
        return hidden

    def draft(
        self,
        hidden: torch.Tensor,
        tokens: np.ndarray,
        newest: Int32Array,
        counts: Int32Array,
        *,
        cached: Sequence[torch.Tensor],
        tables: torch.Tensor,
        rows: Int32Array,
        min_probability: float,
    ) -> Int32Array:
        """Return the most likely tokens, one after the other, int32 ``[B, G]``; -1 after a sequence's last.

        Args:
            hidden: Input of the head at the newest positions, ``[B, H]``.
            tokens: The tokens after these, ``[B]``.
            newest: The positions, ``[B]``.
            counts: Drafts of each sequence, at least 1, ``[B]``.
            cached: Keys and values of the texts, float32 ``[blocks, block size, KV, D]`` each.
            tables: Blocks of each row, int32 ``[rows, most blocks]``.
            rows: Row of each sequence, ``[B]``.
            min_probability: A sequence's drafts end before the first that is less probable.

        Raises:
            IndexError: A token has no embedding.
        """
        size, most = len(counts), int(counts.max())
        self._reserve(size, most)
        self._buffers["hidden"].numpy()[:size] = hidden.numpy()
        ids, positions, columns = np.array([tokens, newest, np.arange(size)], np.int64)
        lengths, own_rows, own_counts = np.array([newest + 1, rows, counts], np.int32)
        found = np.full((most, size), -1, np.int32)
        one, steps = self._pass, self._steps
        one.hidden = self._buffers["hidden"].data_ptr()
        one.token_ids, one.positions, one.kept = ids.ctypes.data, positions.ctypes.data, self._kept.ctypes.data
        steps.keys, steps.values = cached[0].data_ptr(), cached[1].data_ptr()
        steps.tables, steps.table_stride, steps.block_size = tables.data_ptr(), tables.stride(0), cached[0].shape[1]
        steps.rows, steps.lengths, steps.counts = (part.ctypes.data for part in (own_rows, lengths, own_counts))
        steps.draft_keys = self._drafted.data_ptr()
        steps.draft_values = steps.draft_keys + 4 * most * size * self._kv_size
        steps.columns, steps.min_probability = columns.ctypes.data, min_probability
        steps.token_ids, steps.positions, steps.tokens = one.token_ids, one.positions, found.ctypes.data
        steps.qkv, steps.attended, steps.num_sequences = one.qkv, one.attended, size
        _check(self._library.draft(*(ctypes.addressof(part) for part in (self._decoder, one, steps))))
        return found.T

    def _reserve(self, size: int, most: int) -> None:
        """Have buffers for so many sequences and drafts of each."""
        one = self._pass
        one.num_threads = threads_for(size * self._num_products)
        if size > self._capacity:
            # Memory that was never written costs nothing.
            self._capacity = size = 1 << (size - 1).bit_length()
            self._kept = np.arange(size, dtype=np.int64)
            self._buffers = {name: torch.empty(size, width) for name, width in self._widths.items()}
            for name, buffer in self._buffers.items():
                setattr(one, name, buffer.data_ptr())
            self._bytes = torch.empty(size * self._widest, dtype=torch.uint8)
            one.bytes = self._bytes.data_ptr()
        if self._scratch.numel() < one.num_threads * self._scratch_floats:
            self._scratch = torch.empty(one.num_threads * self._scratch_floats)
            one.scratch = self._scratch.data_ptr()
        if self._drafted.numel() < 2 * most * size * self._kv_size:
            self._drafted = torch.empty(2 * most * size * self._kv_size)


def _check(failed: int) -> None:
    if failed:
        raise IndexError("index out of range: a token id has no embedding")
