"""Shapes of the models that are made, and the time that memory and multipliers must take for a workload.

A decode step of ``b`` sequences reads every weight once and multiplies it ``b`` times, then reads the keys and values of every
sequence; the limit is the slower of the first two, plus the third::

    step_s = max(weight_bytes / read, 2 · weights · b / multiply) + kv_bytes(b, context) / read
"""

from __future__ import annotations

import attrs

__all__ = ["SHAPES", "Ceilings", "Shape", "decode_limit_s", "prefill_limit_s"]

CACHE_BYTES = (
    4  # of a key or value element: equal for all, so that the limit of int8 weights is not that of a smaller cache
)


@attrs.frozen(kw_only=True)
class Shape:
    """A decoder with gated feed-forward and tied embeddings; sizes in elements.

    Its weights are random, but for two trained models from the package registry: those of the architecture ``smollm2``, and Gemma, which
    is run as the file that was published.
    """

    name: str
    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def is_trained(self) -> bool:
        """Whether it goes on with what it reads: then prompts are text."""
        return self.architecture == "smollm2" or self.is_published

    @property
    def is_published(self) -> bool:
        """Whether it is one file with weights of one precision, as it was published."""
        return self.architecture == "gemma3"

    @property
    def num_layer_weights(self) -> int:
        """Weights of the linear maps of all layers."""
        attention = 2 * self.hidden_size * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        """Weights of the map from hidden states to logits, which are also the embeddings."""
        return self.hidden_size * self.vocab_size

    @property
    def num_weights(self) -> int:
        """All weights that a decode step reads."""
        return self.num_layer_weights + self.num_head_weights

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * CACHE_BYTES


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="tiny",
            architecture="llama",
            hidden_size=64,
            intermediate_size=192,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=32,
            vocab_size=4096,
        ),
        Shape(
            name="llama-110m",
            architecture="llama",
            hidden_size=768,
            intermediate_size=2048,
            num_layers=12,
            num_heads=12,
            num_kv_heads=12,
            head_dim=64,
            vocab_size=32000,
        ),
        Shape(
            name="qwen3-0.5b",
            architecture="qwen3",
            hidden_size=1024,
            intermediate_size=3072,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=65536,
        ),
        Shape(
            name="smollm2-135m",
            architecture="smollm2",
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            vocab_size=49152,
        ),
        Shape(
            name="gemma3-270m",
            architecture="gemma3",
            hidden_size=640,
            intermediate_size=2048,
            num_layers=18,
            num_heads=4,
            num_kv_heads=1,
            head_dim=256,
            vocab_size=262144,
        ),
    )
}


@attrs.frozen(kw_only=True)
class Ceilings:
    """Rates of the machine: bytes read, and operations of a matrix product at the precision of the weights; per second."""

    read: float
    multiply: float


def decode_limit_s(
    shape: Shape, ceilings: Ceilings, *, weight_bytes: float, num_sequences: int, context_len: int, num_steps: int
) -> float:
    """Return the least time of some decode steps, whose first has ``context_len`` tokens in the cache of each sequence."""
    weights_s = max(
        shape.num_weights * weight_bytes / ceilings.read, 2 * shape.num_weights * num_sequences / ceilings.multiply
    )
    num_read = num_steps * context_len + num_steps * (num_steps - 1) // 2  # tokens of one sequence, over all steps
    return num_steps * weights_s + num_sequences * num_read * shape.kv_bytes_per_token / ceilings.read


def prefill_limit_s(
    shape: Shape, ceilings: Ceilings, *, weight_bytes: float, num_sequences: int, prompt_len: int
) -> float:
    """Return the least time to the first token of prompts; logits are needed for the last token of each."""
    num_tokens = num_sequences * prompt_len
    linear = 2 * (shape.num_layer_weights * num_tokens + shape.num_head_weights * num_sequences)
    pairs = num_sequences * prompt_len * (prompt_len + 1) // 2  # of query and key, causal
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    return max((linear + attention) / ceilings.multiply, shape.num_weights * weight_bytes / ceilings.read)
