"""``decoder.cpp`` from Python: the structures it reads, and one call for a whole pass."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from trencadis.errors import BackendError
from trencadis_torch.linear.packed import Int8Linear, PackedLinear
from trencadis_torch.native_build import Source, load_library

__all__ = [
    "PARTS",
    "SOURCE",
    "Decoder",
    "Guesses",
    "Layer",
    "NativeDecoder",
    "Pass",
    "Product",
    "layer_array",
    "native_decoder",
    "product",
]

logger = logging.getLogger("trencadis.torch")

SOURCE: Final = Path(__file__).with_name("decoder.cpp")

PARTS: Final = (
    *("embeddings", "norms", "queries, keys, values", "attention", "attention output", "gates and values"),
    *("down", "output projection"),
)
"""What the library can time, in its order."""

_AT, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Product(ctypes.Structure):
    """Mirrors ``Product`` of the source, as the others do theirs."""

    _fields_ = (
        *((name, _AT) for name in ("weights", "scales", "sums", "bias")),
        *((name, _INT) for name in ("num_outputs", "num_inputs")),
    )


class Layer(ctypes.Structure):
    """Weights and sizes of one layer."""

    _fields_ = (
        *((name, Product) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _AT) for name in ("attention_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, _AT) for name in ("attended_norm", "projected_norm")),
        *((name, _INT) for name in ("num_heads", "num_kv_heads", "head_dim", "activation")),
        *((name, _DOUBLE) for name in ("eps", "head_eps")),
    )


class Decoder(ctypes.Structure):
    """All layers, the embeddings before and the output projection after them."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        ("head", Product),
        *((name, _AT) for name in ("final_norm", "embeddings")),
        *((name, _INT) for name in ("num_layers", "hidden_size", "num_embeddings")),
        *((name, _DOUBLE) for name in ("eps", "embedding_scale")),
    )


class Pass(ctypes.Structure):
    """The inputs and buffers of one call."""

    _fields_ = (
        *((name, _AT) for name in ("token_ids", "positions", "kept", "cosines", "sines", "calls", "attend")),
        *((name, _AT) for name in ("hidden", "normed", "qkv", "attended", "gated", "wide", "logits")),
        *((name, _AT) for name in ("bytes", "scales", "scratch", "seconds")),
        *((name, _INT) for name in ("num_tokens", "num_kept", "call_bytes", "num_turned", "scratch_floats")),
        ("num_threads", _INT),
    )


class Guesses(ctypes.Structure):
    """The arrays of greedy continuations, and where a call of attention has its numbers of sequences and tokens."""

    _fields_ = (
        *((name, _AT) for name in ("tables", "rows", "starts", "counts", "slots", "token_ids", "positions")),
        *((name, _AT) for name in ("tokens", "closed")),
        *((name, _INT) for name in ("table_stride", "block_size", "num_sequences", "vocab_size")),
        *((name, _INT) for name in ("sequences_at", "tokens_at")),
    )


class NativeDecoder:
    """The library, loaded.

    Args:
        library: ``decoder.cpp``, compiled.

    Raises:
        BackendError: It is another one.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        for name in ("bytes", "parts", "widest", "scratch"):
            function = getattr(library, f"trencadis_decoder_{name}")
            function.restype, function.argtypes = _INT, [_AT] if name in ("widest", "scratch") else []
        library.trencadis_decode.restype, library.trencadis_decode.argtypes = _INT, [_AT, _AT]
        library.trencadis_guess.restype, library.trencadis_guess.argtypes = _INT, [_AT, _AT, _AT]
        size = sum(map(ctypes.sizeof, (Decoder, Layer, Pass, Guesses)))
        if (library.trencadis_decoder_bytes(), library.trencadis_decoder_parts()) != (size, len(PARTS)):
            raise BackendError(f"{SOURCE.name} takes other structures than are given: remove its cache.")
        self.decode: Any = library.trencadis_decode
        self.guess: Any = library.trencadis_guess
        self._library = library

    def sizes(self, decoder: Decoder) -> tuple[int, int]:
        """Return bytes of the widest row that may be quantised, and floats of one thread's scratch."""
        at = ctypes.addressof(decoder)
        return int(self._library.trencadis_decoder_widest(at)), int(self._library.trencadis_decoder_scratch(at))


def product(layer: PackedLinear | Int8Linear) -> Product:
    """Return the library's view of a packed layer, which must outlive it."""
    return Product(*map(_address, layer.tensors), layer.out_features, layer.in_features)


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def layer_array(layers: Sequence[Layer]) -> Any:
    """Return them one after the other."""
    return (Layer * len(layers))(*layers)


@functools.cache
def native_decoder() -> NativeDecoder | None:
    """Return the library, compiled at the first call; None, with a line in the log, where it cannot be."""
    try:
        return NativeDecoder(load_library(Source(SOURCE)))
    except BackendError as error:
        logger.info("A decoder's layers run one by one: %s", error)
        return None
