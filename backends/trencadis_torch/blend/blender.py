"""Blending: KV of chunks that were computed apart becomes the KV of one prompt, by computing a few tokens anew.

    layer 0    all tokens: what enters it does not depend on other tokens, what leaves it does
    layer 1    new keys and values of all; those that differ most from the chunks' go on, with those that must
    layer 2 …  the same again, among fewer; then the rest of the way with the share that was asked for

At every layer the tokens on the way put their keys and values in the place of the chunks', and attend to all that lie before them.

Shapes: T tokens of the prompt, n of them to be filled, KV heads, D head dimension.

Source: CacheBlend, arXiv:2405.16444, section 4; that values count beside keys, and that some tokens are never left out, is ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trencadis.errors import BackendError
from trencadis.interfaces import BlendOrder, KVBlender
from trencadis_torch.attention.adapter import PASS_ARGUMENT
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.sdpa import attend
from trencadis_torch.attention.whole_texts import WholeTexts
from trencadis_torch.blend.packed_tokens import PackedTokens
from trencadis_torch.blend.partial_forward import PartialForward
from trencadis_torch.blend.reposition import Angles, Pairs, Rotary, rotate, unrotate
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache
from trencadis_torch.cache.storage import decode
from trencadis_torch.device import to_device
from trencadis_torch.linear.decoder import original_of

__all__ = ["Blender", "make_blender", "shares", "check_layers", "pairs_of_layers"]

MAX_PIECE = 256
"""Queries of one call of the attention: bounds the mask, [queries, keys]."""

_EXTRA = (1.5, 1.25, 1.0)
"""Shares that go on from layers 1, 2 and 3, over the one asked for. Which tokens differ changes little from layer to layer, but it
changes: who is left out early cannot come back."""


def make_blender(model: Any, cache: PagedKVCache) -> Blender:
    """Return a blender for a model whose paged attention is switched on; costs a few forwards of some tokens.

    Raises:
        BackendError: The model is not made as blending needs it, or its KV is held as int8; the message says how.
    """
    if any(layer.dtype is torch.int8 for layer in cache.layers):
        raise BackendError(
            "Keys held as int8 cannot be moved to other positions.", hint="Choose another [backend.torch] kv_dtype."
        )
    model = original_of(model)
    walk = PartialForward(model)
    check_layers(model, walk, cache.layers)
    rotary = Rotary(model)
    return Blender(walk, rotary, cache, pairs=pairs_of_layers(walk, rotary, model.device, cache.layers))


class Blender(KVBlender):
    """Blends in the blocks of one cache.

    Args:
        walk: Through the model's layers.
        rotary: Angles of the model.
        cache: With the blocks.
        pairs: Pairs of turned elements in each layer's keys.
    """

    def __init__(self, walk: PartialForward, rotary: Rotary, cache: PagedKVCache, *, pairs: tuple[Pairs, ...]) -> None:
        self._walk = walk
        self._rotary = rotary
        self._cache = cache
        self._pairs = pairs
        self._packed = PackedTokens(cache.layers, pairs, block_size=cache.block_size)
        self.token_bytes = self._packed.token_bytes

    @torch.inference_mode()
    def pack(self, blocks: NDArray[np.uint8], *, skip: int, num_tokens: int, position: int) -> NDArray[np.uint8]:
        """Return tokens without their positions."""
        angles = self._rotary.angles(torch.arange(position, position + num_tokens))
        return self._packed.pack(blocks, skip=skip, num_tokens=num_tokens, angles=angles)

    def blend(self, order: BlendOrder) -> Iterator[None]:
        """Fill the blocks, one layer at a time."""
        one = _Blend(order, self._cache, self._rotary)
        with torch.inference_mode():
            walkers = self._walk.begin(one.token_ids, one.positions)
        steps = shares(order.ratio, len(self._walk))
        for place, layer in enumerate(self._cache.layers):
            with torch.inference_mode():
                one.place_chunks(layer.index, self._packed, place, self._pairs[place])
                share = steps.get(place)
                if share is not None:
                    keys, values = self._walk.look(place, walkers)
                    chosen = one.choose(layer.index, keys, values, share=share)
                    walkers = walkers.only(chosen)
                if place < len(self._walk) - 1:
                    walkers = self._walk.through(place, walkers, one)
            yield


def shares(ratio: float, num_layers: int) -> dict[int, float]:
    """Return the share of tokens that goes on from each layer where some are left out. Pure.

    The last layer is always among them: its keys and values are wanted, what leaves it is not.

    Args:
        ratio: Asked for, 0 .. 1.
        num_layers: Number of layers of the model.
    """
    found = {i: min(1.0, ratio * extra) for i, extra in enumerate(_EXTRA, 1) if i < num_layers - 1}
    return {**found, num_layers - 1: ratio}


class _Blend:
    """One order on its way through the layers; attends for the tokens that are left.

    Args:
        order: Order to carry out.
        cache: Where.
        rotary: For the chunks' new positions.
    """

    def __init__(self, order: BlendOrder, cache: PagedKVCache, rotary: Rotary) -> None:
        self._cache = cache
        self._first, total = order.num_exact, len(order.token_ids)
        self._chunks = order.chunks
        self._blocks = to_device(np.asarray(order.blocks, np.int64), cache.device)
        self._num = total - self._first
        self.token_ids = to_device(order.token_ids[self._first :].astype(np.int64), cache.device)
        self.positions = torch.arange(self._first, total, device=cache.device)
        spans = [np.arange(chunk.position, chunk.position + len(chunk.tokens)) for chunk in order.chunks]
        covered = np.concatenate(spans) if spans else np.empty(0, np.int64)
        forced = np.ones(self._num, np.bool_)
        forced[covered - self._first] = False
        forced[-1] = True  # what follows looks at it most; and somebody must go on
        forced |= order.forced[self._first :]
        self._num_forced = int(forced.sum())
        self._forced = to_device(forced, cache.device)
        self._places = to_device(covered.astype(np.int64), cache.device)
        self._angles: Angles | None = rotary.angles(self._places) if len(covered) else None

    def place_chunks(self, layer_index: int, packed: PackedTokens, place: int, pairs: Pairs) -> None:
        """Write the chunks' keys, at their new positions, and values of one layer."""
        if self._angles is None:
            return
        device, dtype = self._cache.device, self._cache.layers[place].dtype
        keys = torch.cat([packed.keys(chunk.tokens, place) for chunk in self._chunks]).to(device)
        values = torch.cat([packed.values(chunk.tokens, place) for chunk in self._chunks]).to(device)
        turned = rotate(keys, self._angles, pairs).to(dtype)
        self._cache.write(layer_index, self._slots(self._places), turned, values)

    def choose(self, layer_index: int, keys: torch.Tensor, values: torch.Tensor, *, share: float) -> torch.Tensor:
        """Write new keys and values, and return which of their tokens go on: those that must, then those that differ most.

        Args:
            layer_index: The module's ``layer_idx``.
            keys: Keys of the tokens that reached this layer, ``[m, KV, D]``.
            values: The same.
            share: Share of the tokens that are not forced to go on and do.
        """
        slots = self._slots(self.positions)
        stored = (cache.flatten(0, 1).index_select(0, slots) for cache in self._cache.layer(layer_index))
        old = [decode(part, keys.dtype) for part in stored]
        change = _change(keys, old[0]) + _change(values, old[1])
        change = torch.where(self._forced, math.inf, change)
        self._cache.write(layer_index, slots, keys, values)
        count = min(len(change), self._num_forced + math.ceil(share * (self._num - self._num_forced)))
        chosen = change.topk(count).indices.sort().values
        self.positions, self._forced = self.positions[chosen], self._forced[chosen]
        return chosen

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Store new keys and values, and return attention outputs over all that lies before; as any pass."""
        self._cache.write(layer_index, self._slots(self.positions), keys, values)
        stored = (cache.index_select(0, self._blocks).flatten(0, 1) for cache in self._cache.layer(layer_index))
        seen = [decode(part, query.dtype) for part in stored]
        output = query.new_empty(*query.shape[:2], values.shape[-1])
        for start in range(0, len(query), MAX_PIECE):
            piece = slice(start, start + MAX_PIECE)
            at = self.positions[piece]
            end = int(at[-1]) + 1
            mask = torch.arange(end, device=at.device) <= at[:, None]
            part = attend(
                query[piece].transpose(0, 1)[None],
                seen[0][:end].transpose(0, 1)[None],
                seen[1][:end].transpose(0, 1)[None],
                mask=mask[None, None],
                options=options,
            )
            output[piece] = part[0].transpose(0, 1)
        return output

    def _slots(self, positions: torch.Tensor) -> torch.Tensor:
        size = self._cache.block_size
        return self._blocks[positions // size] * size + positions % size


def _change(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return how far each token's rows moved, squared, over the mean square of the new ones, float32 ``[m]``. Pure."""
    new, old = new.float().flatten(1), old.float().flatten(1)
    return (new - old).square().sum(1) / new.square().sum(1).mean().clamp_min(1e-12)


_NUM_TOKENS = 8
_OFFSET = 37
_EXACT, _ROUNDED = 1e-3, 5e-2
"""Largest difference over the largest element: in float32, and in 16 bits."""


@torch.inference_mode()
def check_layers(model: Any, walk: PartialForward, layers: tuple[AttentionLayer, ...]) -> None:
    """Compare the keys and values of a walk through the layers with those of the model's own forward.

    Raises:
        BackendError: They differ, or there are layers that blending does not know.
    """
    name = type(model).__name__
    if [layer.index for layer in layers] != list(range(len(walk))):
        raise BackendError(f"{name} has {len(walk)} layers, {len(layers)} of which attend.")
    if any(layer.window for layer in layers):
        raise BackendError(f"{name} has layers with a sliding window.")
    tokens, positions = _tokens(model.device), torch.arange(_NUM_TOKENS, device=model.device)
    whole, stepwise = (_Recorder(layers) for _ in range(2))
    model.base_model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, **{PASS_ARGUMENT: whole})
    walkers = walk.begin(tokens, positions)
    for index in range(len(walk)):
        walkers = walk.through(index, walkers, stepwise)
    for index in range(len(walk)):
        for one, other in zip(whole.found[index], stepwise.found[index], strict=True):
            if _difference(one, other) > _tolerance(one):
                raise BackendError(f"{name}: called one by one, its layers do not give what the model gives.")


@torch.inference_mode()
def pairs_of_layers(
    walk: PartialForward, rotary: Rotary, device: torch.device, layers: tuple[AttentionLayer, ...]
) -> tuple[Pairs, ...]:
    """Return which elements of each layer's keys are turned together: those with which two positions give the same plain keys.

    Raises:
        BackendError: No way of turning them that is known here does.
    """
    tokens = _tokens(device)
    sets = [torch.arange(_NUM_TOKENS, device=device) + offset for offset in (1, _OFFSET)]
    walkers = [walk.begin(tokens, positions) for positions in sets]
    angles = [rotary.angles(positions) for positions in sets]
    found = []
    for index in range(len(layers)):
        keys = [walk.look(index, one)[0] for one in walkers]
        for pairs in Pairs:
            plain = [unrotate(one.float(), turn, pairs) for one, turn in zip(keys, angles, strict=True)]
            if _difference(*plain) <= _tolerance(keys[0]):
                found.append(pairs)
                break
        else:
            raise BackendError(f"The keys of layer {index} depend on the position in a way that is not known here.")
    return tuple(found)


class _Recorder:
    """Attends as a whole text does, and keeps every layer's keys and values."""

    def __init__(self, layers: tuple[AttentionLayer, ...]) -> None:
        self._texts = WholeTexts(layers, [_NUM_TOKENS])
        self.found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        self.found[layer_index] = keys, values
        return self._texts.attend(layer_index, query, keys, values, options=options)


def _tokens(device: torch.device) -> torch.Tensor:
    return torch.arange(_NUM_TOKENS, device=device) * 13 + 5


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max() / one.float().abs().max().clamp_min(1e-12))


def _tolerance(one: torch.Tensor) -> float:
    return _EXACT if one.dtype == torch.float32 else _ROUNDED
