"""``decoder.cpp`` from Python: the structures it reads, and one call for a whole pass."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from trencadis.errors import BackendError
from trencadis_torch.linear.native import Mixture, Product
from trencadis_torch.native_build import Source, load_library

__all__ = [
    "PARTS",
    "SOURCE",
    "AngleTable",
    "Decoder",
    "DraftSteps",
    "Followed",
    "Guesses",
    "Joined",
    "Layer",
    "NativeDecoder",
    "Norm",
    "Pass",
    "layer_array",
    "native_decoder",
]

logger = logging.getLogger("trencadis.torch")

SOURCE: Final = Path(__file__).with_name("decoder.cpp")

PARTS: Final = (
    *("embeddings", "norms", "queries, keys, values", "attention", "attention output", "router", "experts"),
    *("gates and values", "down", "output projection"),
)
"""What the library can time, in its order."""

_AT, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_SIZES: Final[dict[str, list[Any]]] = {
    "bytes": [],
    "parts": [],
    "widest": [_AT],
    "scratch": [_AT],
    "mixing": [_AT, _INT],
}
"""Functions that return sizes, and their arguments."""


class Norm(ctypes.Structure):
    """Mirrors ``Norm`` of the source, as the others do theirs: a norm; without a weight there is none."""

    _fields_ = (("weight", _AT), ("bias", _AT), ("eps", _DOUBLE), ("centred", _INT))


class Layer(ctypes.Structure):
    """Weights, sizes and structure of one layer."""

    _fields_ = (
        *((name, Product) for name in ("qkv", "out", "gate_up", "down")),
        *((name, Norm) for name in ("attention_norm", "attended_norm", "mlp_norm", "projected_norm")),
        *((name, _AT) for name in ("query_norm", "key_norm")),
        *((name, _INT) for name in ("num_heads", "num_kv_heads", "head_dim", "how", "angles")),
        *((name, _INT) for name in ("activation", "gated", "order")),
        *((name, _DOUBLE) for name in ("head_eps", "attended_scale", "projected_scale")),
        ("mixture", Mixture),
    )


class Joined(ctypes.Structure):
    """What makes a head's hidden state, and the norms of embedding and hidden state that its layer begins with, side by side."""

    _fields_ = (("states", Product), ("embedding_norm", Norm), ("hidden_norm", Norm), ("keeps_normed", _INT))


class Decoder(ctypes.Structure):
    """All layers, the embeddings before and the output projection after them."""

    _fields_ = (
        ("layers", ctypes.POINTER(Layer)),
        ("head", Product),
        *((name, Norm) for name in ("embedding_norm", "final_norm")),
        ("embeddings", _AT),
        ("table", ctypes.POINTER(Product)),
        ("joined", ctypes.POINTER(Joined)),
        *((name, _INT) for name in ("num_layers", "hidden_size", "num_embeddings")),
        ("embedding_scale", _DOUBLE),
    )


class AngleTable(ctypes.Structure):
    """Cosines, sines and scales of queries of every position; without scales there are none."""

    _fields_ = (("cosines", _AT), ("sines", _AT), ("query_scales", _AT), ("num_turned", _INT))


class Pass(ctypes.Structure):
    """The inputs and buffers of one call."""

    _fields_ = (
        *((name, _AT) for name in ("token_ids", "positions", "kept", "angles", "calls", "attend")),
        *((name, _AT) for name in ("hidden", "normed", "aside", "qkv", "attended", "gated", "wide", "logits")),
        *((name, _AT) for name in ("mixed", "mixing", "joined", "bytes", "scratch", "seconds", "told", "told_layers")),
        ("num_told", _INT),
        *((name, _INT) for name in ("num_tokens", "num_kept", "call_bytes", "scratch_floats", "num_threads")),
    )


class Guesses(ctypes.Structure):
    """The arrays of greedy continuations, and where a call of attention has its numbers of sequences and tokens."""

    _fields_ = (
        *((name, _AT) for name in ("tables", "rows", "starts", "counts", "columns", "slots", "token_ids", "positions")),
        *((name, _AT) for name in ("tokens", "closed")),
        *((name, _INT) for name in ("table_stride", "block_size", "num_sequences", "vocab_size")),
        *((name, _INT) for name in ("sequences_at", "tokens_at")),
        *((name, _DOUBLE) for name in ("min_probability", "scale", "softcap")),
    )


class DraftSteps(ctypes.Structure):
    """The arrays of a head's drafts; mirrors ``Drafts``."""

    _fields_ = (
        *((name, _AT) for name in ("keys", "values", "tables", "rows", "lengths", "counts")),
        *((name, _AT) for name in ("draft_keys", "draft_values", "columns", "token_ids", "positions", "tokens")),
        *((name, _AT) for name in ("target_ids", "qkv", "attended")),
        *((name, _INT) for name in ("table_stride", "block_size", "num_sequences")),
        *((name, _INT) for name in ("num_heads", "num_kv_heads", "head_dim", "count", "step")),
        ("min_probability", _DOUBLE),
    )


class Followed(ctypes.Structure):
    """Tokens of a model's pass that a head reads."""

    _fields_ = tuple((name, _AT) for name in ("states", "slots", "keys", "values"))


class NativeDecoder:
    """The library, loaded.

    Args:
        library: ``decoder.cpp``, compiled.

    Raises:
        BackendError: It is another one.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, arguments in _SIZES.items():
            function = getattr(library, f"trencadis_decoder_{name}")
            function.restype, function.argtypes = _INT, arguments
        library.trencadis_decode.restype, library.trencadis_decode.argtypes = _INT, [_AT, _AT]
        library.trencadis_guess.restype, library.trencadis_guess.argtypes = _INT, [_AT, _AT, _AT]
        library.trencadis_follow.restype, library.trencadis_follow.argtypes = _INT, [_AT, _AT, _AT]
        library.trencadis_draft.restype, library.trencadis_draft.argtypes = _INT, [_AT, _AT, _AT]
        size = sum(map(ctypes.sizeof, (Decoder, Layer, Pass, Guesses, Joined, DraftSteps, Followed)))
        if (library.trencadis_decoder_bytes(), library.trencadis_decoder_parts()) != (size, len(PARTS)):
            raise BackendError(f"{SOURCE.name} takes other structures than are given: remove its cache.")
        self.decode: Any = library.trencadis_decode
        self.guess: Any = library.trencadis_guess
        self.draft: Any = library.trencadis_draft
        self.follow: Any = library.trencadis_follow
        self._library = library

    def sizes(self, decoder: Decoder) -> tuple[int, int]:
        """Return bytes of the widest row that is quantised, 0 if none is, and floats of one thread's scratch."""
        at = ctypes.addressof(decoder)
        return int(self._library.trencadis_decoder_widest(at)), int(self._library.trencadis_decoder_scratch(at))

    def mixing_bytes(self, decoder: Decoder, num_tokens: int) -> int:
        """Return bytes that mixtures of experts need for a pass of so many tokens; 0: there are none."""
        return int(self._library.trencadis_decoder_mixing(ctypes.addressof(decoder), num_tokens))


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
