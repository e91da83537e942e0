"""EAGLE-3: one layer that continues a text from hidden states of the model.

    hidden states of token i ▶ fc ──────────────▶ h ▶ norm ─┐
    embedding of token i + 1 ▶ norm ────────────────────────┴▶ side by side ▶ attention ▶ + h ▶ norm ▶ MLP ▶ + ▶ norm ▶ logits
                                                                                                             └▶ the next token's h

Its keys and values at position i are those of hidden state i and token i + 1.

Shapes: T tokens, H hidden size, S hidden states of the model side by side, N heads, KV key-value heads, D head dimension, V draft tokens.

Source: Li et al., "EAGLE-3", arXiv 2503.01840, section 3.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.cache.kv_cache import AttentionLayer
from trencadis_torch.heads.checkpoint import HeadFiles
from trencadis_torch.heads.contract import Attend
from trencadis_torch.heads.loop import HeadParts, draft_loop
from trencadis_torch.linear.heads import Heads
from trencadis_torch.linear.held import FloatWeight
from trencadis_torch.linear.native import ACTIVATIONS, Native
from trencadis_torch.linear.native_decoder import native_decoder
from trencadis_torch.linear.packed import pack
from trencadis_torch.loading.positions import max_positions
from trencadis_torch.rows import DRAFT_MARGIN

__all__ = ["Eagle"]

_LAYER = "layers.0."
_OPTIONS = AttentionOptions()


class Eagle(nn.Module):
    """The head, on the model's device.

    Args:
        files: Files with the head's weights.
        model: Whose hidden states it reads; lends embeddings and output projection where the files have none.
        layer_index: Number of its layer in the KV cache.
        native: Kernels for a CPU and float32; None: PyTorch's.
        cache_dtype: Data type of keys and values in the cache; None: the one that is computed.

    Attributes:
        layer: The layer of the KV cache that holds its keys and values.
        loop: Makes several drafts in one call; None: they are made one by one.
        target_ids: Token of the model for each draft token, int64 ``[V]``; None: the same number.
    """

    def __init__(
        self,
        files: HeadFiles,
        model: Any,
        *,
        layer_index: int,
        native: Native | None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._device, self._dtype = model.device, model.dtype
        fits = self._device.type == "cpu" and self._dtype is torch.float32
        self._weights, self._native = files.weights, native if fits else None
        config = files.layer
        self._keeps_normed = files.keeps_normed
        self._heads = Heads(
            num_heads=config.num_attention_heads, num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim
        )
        self._eps = config.rms_norm_eps
        self._fc = self._linear("fc")
        self._qkv = self._linear(*(f"{_LAYER}self_attn.{name}_proj" for name in "qkv"))
        self._out = self._linear(f"{_LAYER}self_attn.o_proj")
        self._gate_up = self._linear(f"{_LAYER}mlp.gate_proj", f"{_LAYER}mlp.up_proj")
        self._down = self._linear(f"{_LAYER}mlp.down_proj")
        names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        norms = [self._tensor(f"{_LAYER}{name}.weight") for name in names]
        self._embedding_norm, self._hidden_norm, self._mlp_norm = norms
        self._final_norm = self._tensor("norm.weight")
        self._embed = self._embedding(model)
        self._head = self._linear("lm_head") if "lm_head.weight" in files.weights else model.get_output_embeddings()
        ids = files.target_ids
        self.target_ids = None if ids is None else ids.to(self._device)
        # Positions of drafts reach beyond the longest text.
        num_positions = max_positions(model.config.get_text_config(decoder=True)) + DRAFT_MARGIN
        self._cosines, self._sines = (one.to(self._device, self._dtype) for one in _angles_of(config, num_positions))
        self.layer = AttentionLayer(
            index=layer_index,
            num_kv_heads=config.num_key_value_heads,
            key_dim=config.head_dim,
            value_dim=config.head_dim,
            window=0,
            dtype=cache_dtype or self._dtype,
        )
        self._weights = {}
        parts = HeadParts(
            states=self._fc,
            linear=(self._qkv, self._out, self._gate_up, self._down, self._head),
            norms=(self._embedding_norm, self._hidden_norm, self._mlp_norm, self._final_norm),
            eps=self._eps,
            embeddings=self._embed,
            heads=self._heads,
            keeps_normed=self._keeps_normed,
            angles=(self._cosines, self._sines),
            target_ids=self.target_ids,
        )
        self.loop = None if self._native is None else draft_loop(parts, native_decoder())

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """Return h of tokens, ``[T, H]``, from the model's hidden states ``[T, S]``."""
        made: torch.Tensor = self._fc(states)
        return made

    def keys_and_values(
        self, hidden: torch.Tensor, next_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, ``[T, KV, D]`` each; see ``Head``."""
        x, _ = self._inputs(hidden, next_ids)
        _, keys, values = self._attention_heads(x, positions)
        return keys, values

    def draft(
        self, hidden: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of draft tokens, ``[T, V]``, and the h of the tokens after these, ``[T, H]``; see ``Head``."""
        x, residual = self._inputs(hidden, tokens)
        return self._finish(attend(*self._attention_heads(x, positions), _OPTIONS), residual)

    # ------------------------------------------------------------------------------------------------- innards

    def _inputs(self, hidden: torch.Tensor, next_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what attention reads, ``[T, 2 H]``, and what its output is added to, ``[T, H]``.

        Args:
            hidden: h of tokens, ``[T, H]``.
            next_ids: The token after each, int64 ``[T]``.
        """
        normed = self._normed(hidden, self._hidden_norm)
        embedded = self._normed(self._embed(next_ids), self._embedding_norm)
        return torch.cat([embedded, normed], -1), normed if self._keeps_normed else hidden

    def _attention_heads(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries ``[T, N, D]``, keys and values, ``[T, KV, D]`` each, of attention's inputs at int64 positions ``[T]``."""
        made, heads = self._qkv(x), self._heads
        cosines, sines = self._angles(positions)
        sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
        if self._native is not None:
            self._native.rotate(made, heads, (cosines, sines))
        queries, keys, values = made.view(len(x), -1, heads.head_dim).split(sizes, 1)
        if self._native is not None:
            return queries, keys, values
        return _turned(queries, cosines, sines), _turned(keys, cosines, sines), values

    def _finish(self, attended: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of draft tokens, ``[T, V]``, and the h of the tokens after these, ``[T, H]``.

        Args:
            attended: Attention's output, ``[T, N, D]``.
            residual: The hidden states that it is added to.
        """
        hidden = residual + self._out(attended.flatten(1))
        hidden = hidden + self._down(self._gated(self._gate_up(self._normed(hidden, self._mlp_norm))))
        logits: torch.Tensor = self._head(self._normed(hidden, self._final_norm))
        return logits, hidden

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self._native is not None:
            return self._native.rms_norm(x, weight, self._eps)
        normed: torch.Tensor = functional.rms_norm(x, weight.shape, weight, self._eps)
        return normed

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        if self._native is not None:
            return self._native.gate(x, ACTIVATIONS["silu"])
        gates, values = x.chunk(2, -1)
        return functional.silu(gates) * values

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of positions, ``[T, D]`` each, from tables as long as a text may become."""
        return self._cosines[positions], self._sines[positions]

    def _tensor(self, name: str) -> torch.Tensor:
        return self._weights[name].to(self._device, self._dtype)

    def _linear(self, *names: str) -> nn.Module:
        """Return the layers of some weights with one input, side by side."""
        biases = [self._weights.get(f"{name}.bias") for name in names]
        if self._device.type == "cpu" and self._dtype is torch.float32:
            weights = [FloatWeight(self._weights[f"{name}.weight"]) for name in names]
            return pack(weights, [None if bias is None else bias.float() for bias in biases], self._native)
        weight = torch.cat([self._tensor(f"{name}.weight") for name in names])
        made = nn.Linear(weight.shape[1], weight.shape[0], bias=biases[0] is not None, device="meta")
        made.weight = nn.Parameter(weight, requires_grad=False)
        if biases[0] is not None:
            made.bias = nn.Parameter(torch.cat([self._tensor(f"{name}.bias") for name in names]), requires_grad=False)
        return made

    def _embedding(self, model: Any) -> nn.Module:
        if "embed_tokens.weight" not in self._weights:
            found: nn.Module = model.get_input_embeddings()
            return found
        table = self._tensor("embed_tokens.weight")
        made = nn.Embedding(table.shape[0], table.shape[1], device="meta")
        made.weight = nn.Parameter(table, requires_grad=False)
        return made


def _angles_of(config: Any, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of all positions, float32 ``[num_positions, D]`` each."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    cosines, sines = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(num_positions)[None])
    return cosines[0].contiguous(), sines[0].contiguous()


def _turned(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Return heads turned by their positions; the second half of a head belongs to the first. Pure."""
    first, second = heads.chunk(2, -1)
    turned: torch.Tensor = heads * cosines[:, None] + torch.cat([-second, first], -1) * sines[:, None]
    return turned
