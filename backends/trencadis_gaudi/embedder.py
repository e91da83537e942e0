"""Text embeddings with a decoder: batches of whole texts in few sizes, one forward each, then pooling.

    texts by length ─▶ rectangles [B, Q] ──┤ border of the graph ├──▶ decoder ─▶ last hidden states ─▶ vectors [B, embedding_size]

Q is the block size times a power of two, at most the longest text; B is a power of two. Rows and tokens are padded up to them, so
only these sizes are compiled. The KV cache is not used.

Shapes: B texts, Q tokens of each, T = B × Q, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt
import torch

from trencadis.interfaces import AllocationPlan
from trencadis.records import Float32Array, Int32Array
from trencadis_gaudi.attention.adapter import attach
from trencadis_gaudi.attention.fused_sdpa import FusedSDPA
from trencadis_gaudi.attention.prefill import attend_prefill, batch_mask
from trencadis_gaudi.config import DEFAULT_BLOCK_SIZE, GaudiConfig
from trencadis_gaudi.flat_cache import FlatKVCache, FlatLayer
from trencadis_gaudi.graphs.model import Forward, make_forward
from trencadis_gaudi.habana import Habana
from trencadis_gaudi.model import LoadedModel
from trencadis_torch.attention.adapter import PASS_ARGUMENT
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.device import to_device

__all__ = ["GaudiEmbedder", "TextSizes", "make_embedder", "unallocated_embedder"]


@attrs.frozen(kw_only=True)
class TextSizes:
    """Sizes of batches of texts.

    Attributes:
        block_size: Tokens of the shortest row.
        max_model_len: Tokens of the longest row.
        max_tokens: Maximum tokens of a batch of several rows.
    """

    block_size: int
    max_model_len: int
    max_tokens: int

    def query_len(self, num_tokens: int) -> int:
        """Return the length of the row for a text. Pure."""
        return min(self.block_size * _power(-(-num_tokens // self.block_size)), self.max_model_len)

    def max_texts(self, query_len: int) -> int:
        """Return the largest number of rows of a length. Pure."""
        return _power(max(1, self.max_tokens // query_len) + 1) // 2

    def table(self) -> list[tuple[int, int]]:
        """Return all sizes as (number of rows, row length), the largest first. Pure."""
        lengths = {self.query_len(self.block_size << power) for power in range(self.max_model_len.bit_length())}
        sizes = [(1 << power, length) for length in lengths for power in range(self.max_texts(length).bit_length())]
        return sorted(sizes, key=lambda size: (size[0] * size[1], size), reverse=True)


def _power(number: int) -> int:
    """Return the smallest power of two not below a number. Pure."""
    return 1 << (number - 1).bit_length()


class EmbeddingAdapter(torch.nn.Module):
    """Forward from tensors to vectors; graphs are distinguished by shapes only.

    Args:
        loaded: Decoder model with its pooling configuration.
        kernel: Fused attention kernel; None: plain operations.
    """

    def __init__(self, loaded: LoadedModel, *, kernel: FusedSDPA | None) -> None:
        super().__init__()
        self.model = loaded.model.base_model
        self._config = loaded.pooling_config
        self._windows = sorted({layer.window for layer in loaded.layers})
        self._kernel = kernel

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return vectors, float32 ``[B, embedding_size]``; those of rows without a text are meaningless.

        Args:
            token_ids: Token ids of all rows, int64 ``[1, T]``.
            positions: Positions, int64 ``[1, T]``.
            lengths: Tokens of each text, int64 ``[B]``; 0 in padding.
        """
        attention = _TextAttention(lengths, token_ids.shape[1] // len(lengths), self._windows, kernel=self._kernel)
        options = {PASS_ARGUMENT: attention}
        output = self.model(input_ids=token_ids, position_ids=positions, use_cache=False, **options)
        hidden = torch.unflatten(output.last_hidden_state[0], 0, (len(lengths), -1))
        return self._config.finished(_pooled(hidden, lengths, self._config.pooling))


def _pooled(hidden: torch.Tensor, lengths: torch.Tensor, pooling: str) -> torch.Tensor:
    """Return float32 ``[B, H]`` from hidden states ``[B, Q, H]``. Pure."""
    if pooling == "cls":
        return hidden[:, 0].float()
    steps = torch.arange(hidden.shape[1], device=hidden.device)
    chosen = steps == lengths[:, None] - 1 if pooling == "last" else steps < lengths[:, None]
    total = torch.where(chosen[:, :, None], hidden.float(), 0.0).sum(1)
    return total if pooling == "last" else total / lengths.clamp(min=1)[:, None]


class _TextAttention:
    """Attention of whole texts, one per row, without a KV cache."""

    def __init__(
        self, lengths: torch.Tensor, query_len: int, windows: Sequence[int], *, kernel: FusedSDPA | None
    ) -> None:
        self._lengths = lengths
        self._query_len = query_len
        self._kernel = kernel
        # Made before the first layer, for the reason in GaudiPrefill.
        starts = torch.zeros_like(lengths)
        self._masks = {
            window: batch_mask(starts, lengths, num_context=0, query_len=query_len, window=window) if window else None
            for window in windows
        }

    def attend(
        self,
        layer: FlatLayer,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Return attention outputs ``[T, num_heads, Dv]``, as defined in ``attention/adapter.py``."""
        shape = (len(self._lengths), self._query_len)
        output = attend_prefill(
            *(torch.unflatten(part, 0, shape) for part in (query, keys, values)),
            mask=self._masks[layer.window],
            query_lens=self._lengths,
            options=options,
            kernel=self._kernel,
        )
        return output.flatten(0, 1)


class GaudiEmbedder:
    """Embeds texts of any length.

    Args:
        forward: Forward of an :class:`EmbeddingAdapter`, plain, captured or compiled.
        sizes: Sizes of batches.
        habana: Device of the model.
        graph: Whether to capture a graph for each size.
    """

    def __init__(self, forward: Forward, sizes: TextSizes, habana: Habana, *, graph: bool) -> None:
        self._forward = forward
        self._sizes = sizes
        self._habana = habana
        self._graph = graph

    @property
    def num_sizes(self) -> int:
        """Number of sizes in which texts are embedded."""
        return len(self._sizes.table())

    def warm_up(self) -> None:
        """Compile every size on padding."""
        for num_rows, query_len in self._sizes.table():
            self._run([], num_rows, query_len)

    def embed(self, token_ids: Sequence[Int32Array]) -> Float32Array:
        """Return float32 ``[num_texts, embedding_size]``, in the order of the texts.

        Args:
            token_ids: Token ids of each text, int32 ``[num_tokens]``, at least one token.
        """
        parts = list(self._parts(np.array([len(text) for text in token_ids])))
        # All batches are launched before the first result is awaited.
        vectors = [
            self._run([token_ids[index] for index in part], _power(len(part)), query_len) for part, query_len in parts
        ]
        # Cut on the host, since each number of texts would be a separate program on the device.
        found = np.concatenate(
            [rows.cpu().numpy()[: len(part)] for rows, (part, _) in zip(vectors, parts, strict=True)]
        )
        result = np.empty_like(found)
        result[np.concatenate([part for part, _ in parts])] = found
        return result

    def _parts(self, lengths: npt.NDArray[np.int64]) -> Iterator[tuple[npt.NDArray[np.int64], int]]:
        """Yield the indices of texts that share a batch, and the row length."""
        rows = np.array([self._sizes.query_len(length) for length in lengths.tolist()])
        for query_len in np.unique(rows).tolist():
            same = np.flatnonzero(rows == query_len)
            step = self._sizes.max_texts(query_len)
            for first in range(0, len(same), step):
                yield same[first : first + step], query_len

    def _run(self, texts: Sequence[Int32Array], num_rows: int, query_len: int) -> torch.Tensor:
        lengths = np.zeros(num_rows, np.int64)
        lengths[: len(texts)] = [len(text) for text in texts]
        real = np.arange(query_len) < lengths[:, None]
        host = np.zeros((2, num_rows, query_len), np.int64)
        host[1] = np.where(real, np.arange(query_len), 0)
        if texts:
            host[0][real] = np.concatenate(texts)
        device = self._habana.device
        tokens, positions = to_device(host.reshape(2, 1, -1), device)
        vectors = self._forward(tokens, positions, to_device(lengths, device), graph=self._graph)
        self._habana.mark_step()
        return vectors


def make_embedder(
    loaded: LoadedModel, plan: AllocationPlan, config: GaudiConfig, habana: Habana
) -> GaudiEmbedder | None:
    """Return an embedder in the config's mode; None if the model cannot embed. The decoder layers are prepared."""
    if not loaded.facts.embedding_size:
        return None
    sizes = TextSizes(
        block_size=plan.block_size, max_model_len=plan.max_model_len, max_tokens=plan.max_num_batched_tokens
    )
    adapter = EmbeddingAdapter(loaded, kernel=habana.kernels.attention)
    # Without a warm-up no graphs, whose memory would not be accounted for.
    graph = config.embeddings and config.captures and config.capture == "capture_all"
    forward = make_forward(adapter, config, habana) if graph or config.mode == "compile" else _without_graphs(adapter)
    return GaudiEmbedder(forward, sizes, habana, graph=graph)


def unallocated_embedder(loaded: LoadedModel, habana: Habana) -> GaudiEmbedder | None:
    """Return an embedder without graphs for a model without a KV cache; None if it cannot embed."""
    if not loaded.facts.embedding_size:
        return None
    scales = loaded.cache_scales
    attach(loaded.model, FlatKVCache(loaded.layers, num_blocks=0, block_size=1, device=habana.device, scales=scales))
    adapter = EmbeddingAdapter(loaded, kernel=habana.kernels.attention)
    longest = loaded.facts.max_model_len
    sizes = TextSizes(block_size=DEFAULT_BLOCK_SIZE, max_model_len=longest, max_tokens=longest)

    return GaudiEmbedder(_without_graphs(adapter), sizes, habana, graph=False)


def _without_graphs(adapter: EmbeddingAdapter) -> Forward:
    def forward(*args: torch.Tensor, graph: bool) -> torch.Tensor:
        vectors: torch.Tensor = adapter(*args)
        return vectors

    return forward
