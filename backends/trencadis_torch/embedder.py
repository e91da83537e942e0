"""Texts to vectors: one forward over whole texts, then pooling.

decoder   all texts in one flat run, kept apart by the attention pass ─▶ hidden states [T, hidden_size]
encoder   texts sorted by length, padded a little, masked             ─▶ hidden states [T, hidden_size]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trencadis.records import Float32Array, Int32Array
from trencadis_torch.attention.adapter import PASS_ARGUMENT
from trencadis_torch.attention.whole_texts import WholeTexts
from trencadis_torch.cache.kv_cache import AttentionLayer
from trencadis_torch.device import to_device
from trencadis_torch.loading.pooling_config import PoolingConfig

__all__ = ["DecoderEmbedder", "Embedder", "EncoderEmbedder"]

SLACK = 1.25
"""Texts are padded together if none is more than this many times as long as the shortest."""

SMALL_BATCH = 128
"""Padded tokens up to which texts of any lengths share a forward: its fixed costs outweigh the padding."""


class Embedder(ABC):
    """A model that embeds.

    Args:
        model: Model of transformers; its forward gives ``last_hidden_state``.
        pooling_config: From hidden states to vectors.

    Attributes:
        pooling_config: Way from hidden states to vectors.
    """

    def __init__(self, model: Any, pooling_config: PoolingConfig) -> None:
        self.pooling_config = pooling_config
        self._model = model

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[Int32Array]) -> Float32Array:
        """Return float32 ``[num_texts, embedding_size]``, in the order of the texts.

        Args:
            token_ids: Tokens of each text, int32 ``[num_tokens]``, at least one.
        """
        lengths = np.array([len(text) for text in token_ids])
        # Equal lengths side by side: decoders attend to them in one call, encoders pad less.
        order = np.argsort(lengths, kind="stable")
        vectors = [self._embed_sorted([token_ids[index] for index in part]) for part in self._parts(order, lengths)]
        found: Float32Array = torch.cat(vectors).cpu().numpy()
        result = np.empty_like(found)
        result[order] = found
        return result

    def _embed_sorted(self, texts: list[Int32Array]) -> torch.Tensor:
        lengths = np.array([len(text) for text in texts], np.int64)
        device: torch.device = self._model.device
        return self.pooling_config.vectors(self._hidden(texts, lengths), to_device(lengths, device))

    @abstractmethod
    def _parts(self, order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        """Yield which texts share a forward; together they are ``order``."""

    @abstractmethod
    def _hidden(self, texts: list[Int32Array], lengths: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return the last hidden states of all texts, one after the other, ``[T, hidden_size]``."""


class DecoderEmbedder(Embedder):
    """The decoder that also generates, its paged attention switched on: nothing is switched, cached or padded for a text.

    Args:
        model: Without its output projection.
        pooling_config: From hidden states to vectors.
        layers: Attention layers of the model.
    """

    def __init__(self, model: Any, pooling_config: PoolingConfig, layers: tuple[AttentionLayer, ...]) -> None:
        super().__init__(model, pooling_config)
        self._layers = layers

    def _parts(self, order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        yield order

    def _hidden(self, texts: list[Int32Array], lengths: npt.NDArray[np.int64]) -> torch.Tensor:
        host = np.empty((2, int(lengths.sum())), np.int64)
        host[0] = np.concatenate(texts)
        host[1] = np.concatenate([np.arange(length) for length in lengths.tolist()])
        tokens, positions = to_device(host, self._model.device)
        options = {PASS_ARGUMENT: WholeTexts(self._layers, lengths.tolist())}
        output = self._model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **options)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden


class EncoderEmbedder(Embedder):
    """A model of any architecture that takes a padding mask."""

    def __init__(self, model: Any, pooling_config: PoolingConfig) -> None:
        super().__init__(model, pooling_config)
        # Masked, whatever it is; but some architectures count positions without it.
        self._padding = getattr(model.config, "pad_token_id", None) or 0

    def _parts(self, order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        """Cut where texts become much longer than the shortest of the part."""
        first = 0
        for index in range(1, len(order) + 1):
            if index < len(order):
                longest, shortest = int(lengths[order[index]]), int(lengths[order[first]])
                if longest <= SLACK * shortest or longest * (index + 1 - first) <= SMALL_BATCH:
                    continue
            yield order[first:index]
            first = index

    def _hidden(self, texts: list[Int32Array], lengths: npt.NDArray[np.int64]) -> torch.Tensor:
        longest = int(lengths.max())
        host = np.full((2, len(texts), longest), self._padding, np.int64)
        host[1] = np.arange(longest) < lengths[:, None]
        host[0][host[1] > 0] = np.concatenate(texts)
        tokens, mask = to_device(host, self._model.device)
        output = self._model(input_ids=tokens, attention_mask=mask, return_dict=True)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden.flatten(0, 1)[mask.flatten() > 0]
