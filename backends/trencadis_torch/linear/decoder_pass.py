"""Passes of a decoder that runs in one call: buffers that are used again, one attention call for each layer, and the rows that are kept.

    pass ─▶ which tokens' logits are asked for ─▶ all layers in one call ─▶ logits

After the last layer's attention only those tokens go on; keys and values of all are written before.

Shapes: T tokens of the pass, L of them asked for, V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trencadis.errors import OutOfMemoryError
from trencadis.interfaces import GuessBatch
from trencadis.records import Int32Array
from trencadis_torch.attention.native import CALL, DTYPES, NativeAttention
from trencadis_torch.attention.options import NUMBERS
from trencadis_torch.attention.ragged import RaggedPass, Workspace
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.linear.decoder import FusedDecoder
from trencadis_torch.linear.guesses import GuessSteps
from trencadis_torch.linear.native import threads_for
from trencadis_torch.linear.native_decoder import PARTS, AngleTable, Pass

__all__ = ["DecoderPasses", "pass_bytes", "queries_together"]


class DecoderPasses:
    """A decoder over a cache, one pass at a time.

    Args:
        decoder: Decoder with the model's weights.
        cache: Read and written; it has a kernel that attends over it.
    """

    def __init__(self, decoder: FusedDecoder, cache: PagedKVCache) -> None:
        self._decoder = decoder
        self._cache = cache
        self._capacity = 0
        self._buffers: dict[str, torch.Tensor] = {}
        self._scratch = torch.empty(0)
        _, self._scratch_floats = decoder.native.sizes(decoder.structure)
        self._calls = _calls(decoder, cache)
        self._angles = (AngleTable * len(decoder.angles))()
        assert isinstance(cache.kernel, NativeAttention), "asked for by whoever makes it"
        last = decoder.attention[-1]
        self._together = queries_together(cache.kernel.rows_together, last.num_heads // last.num_kv_heads)
        self._pass = Pass(
            attend=cache.kernel.in_team,
            calls=self._calls.ctypes.data,
            call_bytes=self._calls.itemsize,
            angles=ctypes.addressof(self._angles),
            scratch_floats=self._scratch_floats,
        )
        self._told_layers = np.empty(0, np.int64)
        self._at = (ctypes.addressof(decoder.structure), ctypes.addressof(self._pass))

    def watch(self) -> None:
        """Measure from now on where time goes; costs about a microsecond for each operation of a layer."""
        self._seconds = np.zeros(len(PARTS))
        self._pass.seconds = self._seconds.ctypes.data

    def spent(self) -> dict[str, float]:
        """Return CPU seconds of the first thread since :meth:`watch`, by part."""
        return dict(zip(PARTS, self._seconds.tolist(), strict=True))

    def tell(self, layers: Sequence[int]) -> None:
        """Give out, from now on, what some layers begin with, or the last one gives: :meth:`told` after each :meth:`logits`.

        Args:
            layers: Their numbers, ascending; that behind the last one's stands for what the last layer gives.
        """
        self._told_layers = np.array(layers, np.int64)
        self._pass.told_layers = self._told_layers.ctypes.data

    @property
    def told(self) -> torch.Tensor:
        """Hidden states of the last pass's tokens at the layers that were named, float32 ``[T, layers, H]``."""
        return self._told

    def logits(
        self,
        attention: RaggedPass,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        tokens: npt.NDArray[np.int64],
    ) -> torch.Tensor:
        """Return logits ``[L, V]``, and write keys and values of all tokens.

        Args:
            attention: Whose tokens they are, without drafts that branch.
            token_ids: int64 ``[1, T]``.
            positions: int64 ``[1, T]``.
            tokens: Those that logits are asked for, indices into the pass, ``[L]``.

        Raises:
            IndexError: A token id has no embedding.
            OutOfMemoryError: No room for the attention kernel's buffers.
        """
        decoder, one = self._decoder, self._pass
        num_tokens = token_ids.numel()
        kept, order = _kept(tokens, num_tokens)
        num_threads = threads_for(num_tokens * decoder.num_products)
        self._reserve(num_tokens, num_threads)
        self._reach(int((attention.starts + attention.query_lens).max()))
        held = self._aim(attention, kept, num_tokens, num_threads)
        logits = torch.empty(len(kept), decoder.vocab_size)
        one.num_told = len(self._told_layers)
        if one.num_told:
            self._told = torch.empty(num_tokens, one.num_told, decoder.structure.hidden_size)
            one.told = self._told.data_ptr()
        one.token_ids, one.positions, one.kept = token_ids.data_ptr(), positions.data_ptr(), kept.ctypes.data
        one.num_tokens, one.num_kept, one.num_threads = num_tokens, len(kept), num_threads
        one.logits = logits.data_ptr()
        _check(decoder.native.decode(*self._at))
        del held
        decoder.ending.apply(logits)
        return logits if order is None else logits.index_select(0, torch.from_numpy(order))

    def _reach(self, num_positions: int) -> None:
        """Have the angles of positions below a number."""
        for table, angles in zip(self._angles, self._decoder.angles, strict=True):
            angles.reach(num_positions)
            table.cosines, table.sines = angles.cosines.data_ptr(), angles.sines.data_ptr()
            table.num_turned = angles.cosines.shape[1]
            table.query_scales = None if angles.query_scales is None else angles.query_scales.data_ptr()

    def guess(self, batch: GuessBatch, tables: torch.Tensor) -> Int32Array:
        """Return the most likely tokens after texts, int32 ``[B, most guesses]``; see ``SupportsGuessing``.

        The first ones come from a pass over what is new of the texts, the others from one call of the library.

        Args:
            batch: The texts, B of them.
            tables: Block tables of all rows.

        Raises:
            IndexError: A token id has no embedding.
            OutOfMemoryError: No room for the attention kernel's buffers.
        """
        guesses = GuessSteps(batch, tables.numpy(), self._cache.block_size)
        attention = RaggedPass(
            self._cache,
            tables=tables,
            slots=torch.from_numpy(guesses.slots_of_text()),
            rows=batch.rows,
            starts=batch.starts,
            query_lens=batch.query_lens,
            workspace=Workspace(),
        )
        text = torch.from_numpy(batch.token_ids.astype(np.int64))[None]
        positions = torch.from_numpy(guesses.columns)[None]
        logits = self.logits(attention, text, positions, guesses.lasts)
        self._reach(int(guesses.starts.max()) + guesses.num_steps)
        self._guess_on(guesses, logits)
        return guesses.found()

    def _guess_on(self, guesses: GuessSteps, logits: torch.Tensor) -> None:
        """Choose the first guess of each sequence from logits, which are overwritten, and compute the others, one token of each at a time."""
        one, calls, count = self._pass, self._calls, len(guesses.rows)
        one.num_threads = threads_for(count * self._decoder.num_products)
        self._reserve(count, one.num_threads)
        one.num_told = 0
        calls["num_threads"] = one.num_threads
        calls["slots"] = guesses.slots.ctypes.data
        held = [guesses.rows, guesses.starts, np.ones(count, np.int32), np.arange(count, dtype=np.int32)]
        _set_sequences(calls, held)
        kept = np.arange(count, dtype=np.int64)
        one.token_ids, one.positions = guesses.token_ids.ctypes.data, guesses.positions.ctypes.data
        one.kept, one.logits = kept.ctypes.data, logits.data_ptr()
        steps = guesses.structure(self._decoder.vocab_size, self._decoder.ending)
        _check(self._decoder.native.guess(*self._at, ctypes.addressof(steps)))

    def _reserve(self, num_tokens: int, num_threads: int) -> None:
        """Have buffers for so many tokens; memory that was never written costs nothing, so they grow in powers of two."""
        if self._scratch.numel() < num_threads * self._scratch_floats:
            self._scratch = torch.empty(num_threads * self._scratch_floats)
            self._pass.scratch = self._scratch.data_ptr()
        if num_tokens <= self._capacity:
            return
        self._capacity = _capacity(num_tokens)
        self._buffers = {
            name: torch.empty(size, dtype=torch.uint8) for name, size in _buffers(self._decoder, self._capacity).items()
        }
        for name, buffer in self._buffers.items():
            setattr(self._pass, name, buffer.data_ptr())
        self._place_calls()

    def _place_calls(self) -> None:
        """Tell every layer's attention where queries, keys and values are, and where its output goes."""
        at, calls = self._buffers["qkv"].data_ptr(), self._calls
        kv_bytes = calls["num_kv_heads"] * calls["key_dim"] * 4
        calls["query"] = at
        calls["new_keys"] = at + calls["num_heads"] * calls["key_dim"] * 4
        calls["new_values"] = calls["new_keys"] + kv_bytes.astype(np.uint64)
        calls["output"] = self._buffers["attended"].data_ptr()

    def _aim(self, attention: RaggedPass, kept: npt.NDArray[np.int64], num_tokens: int, num_threads: int) -> Any:
        """Fill in this pass in every layer's call; returns the objects that must live as long as the pass."""
        calls, tables, slots = self._calls, attention.tables, attention.slots
        sequences = (attention.rows, attention.starts, attention.query_lens)
        firsts = np.cumsum(attention.query_lens) - attention.query_lens
        held = [np.ascontiguousarray(array, np.int32) for array in (*sequences, firsts)]
        calls["tables"], calls["table_stride"] = tables.data_ptr(), tables.stride(0)
        calls["slots"], calls["num_tokens"], calls["num_threads"] = slots.data_ptr(), num_tokens, num_threads
        _set_sequences(calls, held)
        if len(kept) == num_tokens or self._decoder.structure.num_layers in self._told_layers:
            return held
        parts = _parts(kept, *held, together=self._together)
        _set_sequences(calls[-1:], parts)
        return held, parts


def pass_bytes(decoder: FusedDecoder, num_tokens: int) -> int:
    """Return the bytes of the buffers for a pass, but those of logits and of attention. Pure.

    Args:
        decoder: Decoder with the model's weights.
        num_tokens: Number of tokens of the pass.
    """
    _, scratch_floats = decoder.native.sizes(decoder.structure)
    inputs = num_tokens * 3 * 8  # tokens, positions and slots
    return (
        sum(_buffers(decoder, _capacity(num_tokens)).values()) + torch.get_num_threads() * scratch_floats * 4 + inputs
    )


def _capacity(num_tokens: int) -> int:
    return 1 << (num_tokens - 1).bit_length()


def _buffers(decoder: FusedDecoder, num_tokens: int) -> dict[str, int]:
    """Return the bytes of each buffer for so many tokens."""
    layers, hidden_size = decoder.structure.layers, decoder.structure.hidden_size
    count = range(decoder.structure.num_layers)
    widest, _ = decoder.native.sizes(decoder.structure)
    floats = {
        "hidden": hidden_size,
        "normed": hidden_size,
        "aside": hidden_size if any(layers[i].order for i in count) else 0,
        "qkv": max(layers[i].qkv.num_outputs for i in count),
        "attended": max(layers[i].out.num_inputs for i in count),
        "gated": decoder.intermediate_size,
        "wide": decoder.wide,
        "mixed": hidden_size + 1 if any(layers[i].mixture.num_experts for i in count) else 0,
    }
    found = {name: 4 * num_tokens * width for name, width in floats.items()}
    mixing = decoder.native.mixing_bytes(decoder.structure, num_tokens)
    return {**found, "bytes": num_tokens * widest, "mixing": mixing}


def _calls(decoder: FusedDecoder, cache: PagedKVCache) -> npt.NDArray[Any]:
    """Return a call for each layer, with the fields that all passes share."""
    calls = np.zeros(len(decoder.attention), CALL)
    windows = {layer.index: layer.window for layer in cache.layers}
    for call, layer in zip(calls, decoder.attention, strict=True):
        keys, values = cache.layer(layer.index)
        call["keys"], call["values"] = keys.data_ptr(), values.data_ptr()
        call["num_heads"], call["num_kv_heads"] = layer.num_heads, layer.num_kv_heads
        for name in ("key_dim", "value_dim", "query_head", "key_head", "value_head"):
            call[name] = layer.head_dim
        for name in ("query_token", "key_token", "value_token"):
            call[name] = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
        call["window"] = windows[layer.index]
        numbers, sinks = layer.options.packed(layer.head_dim)
        call["sinks"] = 0 if sinks is None else sinks.data_ptr()  # of the decoder, which has them as they are packed
        for name, number in zip(NUMBERS, numbers, strict=True):
            call[name] = number
        call["dtype"], call["cache_dtype"] = DTYPES[torch.float32], DTYPES[keys.dtype]
    calls["block_size"] = cache.block_size
    return calls


def _kept(tokens: npt.NDArray[np.int64], num_tokens: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp] | None]:
    """Return the tokens asked for, ascending and once each, and where each one asked for is among them; None: as they are."""
    if len(tokens) == 1 or bool((tokens[1:] > tokens[:-1]).all()):
        return np.ascontiguousarray(tokens), None
    kept, order = np.unique(tokens, return_inverse=True)
    return kept, order


def queries_together(rows_together: int, num_groups: int) -> int:
    """Return how many queries of a sequence, counted from its first of the pass, the last layer attends for if one is asked for. Pure.

    The low bits of a query's output depend on the queries that the attention kernel takes with it. These are the same in every call
    that begins at a multiple of the result.

    Args:
        rows_together: Rows that the kernel takes together, one for each query and query head of a KV head.
        num_groups: Query heads of each KV head.
    """
    return rows_together // math.gcd(rows_together, num_groups)


def _parts(
    kept: npt.NDArray[np.int64],
    rows: Int32Array,
    starts: Int32Array,
    query_lens: Int32Array,
    firsts: Int32Array,
    *,
    together: int,
) -> list[Int32Array]:
    """Return sequences whose queries are those around the kept tokens, as the kernel takes them together. Pure."""
    of = np.searchsorted(firsts + query_lens, kept, side="right")
    sequence, first = of, (kept - firsts[of]) // together * together
    if len(kept) > 1:
        sequence, first = np.unique(np.stack([sequence, first]), axis=1)
    lengths = np.minimum(query_lens[sequence] - first, together)
    found = (rows[sequence], starts[sequence] + first, lengths, firsts[sequence] + first)
    return [np.ascontiguousarray(array, np.int32) for array in found]


def _set_sequences(calls: npt.NDArray[Any], arrays: list[Int32Array]) -> None:
    calls["num_sequences"] = len(arrays[0])
    for name, array in zip(("rows", "starts", "query_lens", "firsts"), arrays, strict=True):
        calls[name] = array.ctypes.data


def _check(result: int) -> None:
    if result == 1:
        raise OutOfMemoryError("The attention kernel has no room for its buffers.", hint="Lower engine.max_num_seqs.")
    if result:
        raise IndexError("index out of range: a token id has no embedding")
