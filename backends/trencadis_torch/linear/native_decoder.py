"""``decoder.cpp`` from Python: the structures it reads, and one call for a whole pass."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from trencadis.errors import BackendError
from trencadis_torch.linear.native import Product
from trencadis_torch.native_build import Source, load_library

__all__ = [
    "PARTS",
    "SOURCE",
    "Decoder",
    "Layer",
    "NativeDecoder",
    "Pass",
    "layer_array",
    "native_decoder",
]

logger = logging.getLogger("trencadis.torch")

SOURCE: Final = Path(__file__).with_name("decoder.cpp")

PARTS: Final = (
    *("embeddings", "norms", "queries, keys, values", "attention", "attention output", "gates and values"),
    *("down", "output projection"),
)
"""What the library can time, in its order."""

_AT, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Layer(ctypes.Structure):
    """Mirrors ``Layer`` of the source, as the others do theirs: weights and sizes of one layer."""

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
        *((name, _AT) for name in ("final_norm", "embeddings", "table")),
        *((name, _INT) for name in ("num_layers", "hidden_size", "num_embeddings")),
        *((name, _DOUBLE) for name in ("eps", "embedding_scale")),
    )


class Pass(ctypes.Structure):
    """The inputs and buffers of one call."""

    _fields_ = (
        *((name, _AT) for name in ("token_ids", "positions", "kept", "cosines", "sines", "calls", "attend")),
        *((name, _AT) for name in ("hidden", "normed", "qkv", "attended", "gated", "wide", "logits")),
        *((name, _AT) for name in ("bytes", "scratch", "seconds")),
        *((name, _INT) for name in ("num_tokens", "num_kept", "call_bytes", "num_turned", "scratch_floats")),
        ("num_threads", _INT),
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
        size = ctypes.sizeof(Decoder) + ctypes.sizeof(Layer) + ctypes.sizeof(Pass)
        if (library.trencadis_decoder_bytes(), library.trencadis_decoder_parts()) != (size, len(PARTS)):
            raise BackendError(f"{SOURCE.name} takes other structures than are given: remove its cache.")
        self.decode: Any = library.trencadis_decode
        self._library = library

    def sizes(self, decoder: Decoder) -> tuple[int, int]:
        """Return bytes of the widest row that is quantised, 0 if none is, and floats of one thread's scratch."""
        at = ctypes.addressof(decoder)
        return int(self._library.trencadis_decoder_widest(at)), int(self._library.trencadis_decoder_scratch(at))


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
