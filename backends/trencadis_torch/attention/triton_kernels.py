"""Paged attention on a GPU in Triton kernels: one stores new keys and values, one attends, one merges what several programs found for a query.

    program (tile, KV head, span):  a tile of queries with all heads that share the KV head   ×   keys begin .. end
                                    key tile ─▶ scores ─▶ online softmax ─▶ weighted values    until the span ends
    few queries                     the keys of a sequence are shared out to spans, whose results are merged
    many queries                    one span

Without Triton the module can be imported and its functions are never called: PyTorch brings it where there is CUDA.

Shapes: T tokens of the pass, H query heads, KV key-value heads, D and Dv their dimensions, B sequences, S tokens per block.

Source: online softmax, arXiv:1805.02867, section 3; tiles of queries and keys, arXiv:2307.08691; keys shared out to programs and merged,
https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # a build of PyTorch for the CPU
    triton = tl = None

__all__ = ["attend_kernel", "is_installed", "is_interpreted", "merge_kernel", "store_kernel"]


def _kernel(function: Callable[..., None]) -> Any:
    """Let Triton compile a function when it is first launched, and not again because a pass has one tile or sixteen."""
    return function if triton is None else triton.jit(function, do_not_specialize=["tiles", "spans"])


@_kernel
def store_kernel(  # type: ignore[no-untyped-def]
    keys,  # [T, KV, D], the last axis dense
    values,  # [T, KV, Dv], the last axis dense
    slots,  # int64 [T]
    cached_keys,  # [.., S, KV, D], contiguous
    cached_values,
    key_token,
    key_head,
    value_token,
    value_head,
    KEY_DIM: tl.constexpr,  # noqa: N803 - as constants are written in Triton
    VALUE_DIM: tl.constexpr,  # noqa: N803
    KEY_PAD: tl.constexpr,  # noqa: N803
    VALUE_PAD: tl.constexpr,  # noqa: N803
):
    """Write one head of a token to its slot."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.load(slots + token) * tl.num_programs(1) + head
    key_dims, value_dims = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    is_key, is_value = key_dims < KEY_DIM, value_dims < VALUE_DIM
    key = tl.load(keys + token * key_token + head * key_head + key_dims, mask=is_key, other=0)
    value = tl.load(values + token * value_token + head * value_head + value_dims, mask=is_value, other=0)
    tl.store(cached_keys + place * KEY_DIM + key_dims, key, mask=is_key)
    tl.store(cached_values + place * VALUE_DIM + value_dims, value, mask=is_value)


@_kernel
def _with_sink(highest, total, sink):  # type: ignore[no-untyped-def]
    """Return the factor that sums shrink by, and the sum of weights with a sink's."""
    log2e: tl.constexpr = 1.4426950408889634
    higher = tl.maximum(highest, sink * log2e)
    shrink = tl.exp2(highest - higher)
    return shrink, total * shrink + tl.exp2(sink * log2e - higher)


@_kernel
def _scores(  # type: ignore[no-untyped-def]
    q,
    keys,
    key_scales,
    starts,  # of the keys' heads in the cache
    places,
    positions,
    end,
    scale,
    softcap,
    KEY_DIM: tl.constexpr,  # noqa: N803 - as constants are written in Triton
    KEY_PAD: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
    IS_INT8: tl.constexpr,  # noqa: N803
    HAS_SOFTCAP: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
):
    """Return the scores of a tile of keys in base 2, ``[ROWS, KEYS]``; -inf where a query does not see a key."""
    log2e: tl.constexpr = 1.4426950408889634
    dims = tl.arange(0, KEY_PAD)
    is_key = places < end
    k = tl.load(keys + starts[None, :] + dims[:, None], mask=(dims < KEY_DIM)[:, None] & is_key[None, :], other=0)
    scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * scale
    if IS_INT8:
        scores = scores * tl.load(key_scales + (starts + KEY_DIM) // 4, mask=is_key, other=0.0)[None, :]
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), right at both ends, where exp is 0 or infinite.
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * log2e / softcap)) + 1.0))
    seen = (places[None, :] <= positions[:, None]) & is_key[None, :]
    if WINDOW > 0:
        seen = seen & (places[None, :] > positions[:, None] - WINDOW)
    return tl.where(seen, scores * log2e, float("-inf"))


@_kernel
def _values(  # type: ignore[no-untyped-def]
    values,
    value_scales,
    starts,
    is_key,
    VALUE_DIM: tl.constexpr,  # noqa: N803
    VALUE_PAD: tl.constexpr,  # noqa: N803
    IS_INT8: tl.constexpr,  # noqa: N803
):
    """Return a tile of values, ``[KEYS, VALUE_PAD]``."""
    dims = tl.arange(0, VALUE_PAD)
    v = tl.load(values + starts[:, None] + dims[None, :], mask=is_key[:, None] & (dims < VALUE_DIM)[None, :], other=0)
    if IS_INT8:
        v = v.to(tl.float32) * tl.load(value_scales + (starts + VALUE_DIM) // 4, mask=is_key, other=0.0)[:, None]
    return v


@_kernel
def attend_kernel(  # type: ignore[no-untyped-def]
    query,  # [T, H, D], the last axis dense
    keys,  # cache, [.., S, KV, D or D + 4]
    values,  # cache, [.., S, KV, Dv or Dv + 4]
    key_scales,  # the same memory as float32, if int8
    value_scales,
    sinks,  # float32 [H], if there are any
    output,  # [T, H, Dv], contiguous
    partials,  # float32 [all tiles × QUERIES, H, spans, Dv]
    stats,  # float32 [all tiles × QUERIES, H, spans, 2]: highest score, sum of weights
    tables,  # int32 [.., blocks]
    sequences,  # int32 [B, 4]: row, context, queries, first token
    query_token,
    query_head,
    key_slot,
    key_head,
    value_slot,
    value_head,
    table_row,
    scale,
    softcap,
    tiles,  # of each sequence
    HEADS: tl.constexpr,  # noqa: N803 - as constants are written in Triton
    GROUPS: tl.constexpr,  # noqa: N803
    KEY_DIM: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    KEY_PAD: tl.constexpr,  # noqa: N803
    VALUE_PAD: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    QUERIES: tl.constexpr,  # noqa: N803
    KEYS: tl.constexpr,  # noqa: N803
    IS_SPLIT: tl.constexpr,  # noqa: N803
    MIN_SPAN: tl.constexpr,  # noqa: N803
    WINDOW: tl.constexpr,  # noqa: N803
    IS_INT8: tl.constexpr,  # noqa: N803
    HAS_SINKS: tl.constexpr,  # noqa: N803
    HAS_SOFTCAP: tl.constexpr,  # noqa: N803
    PRECISION: tl.constexpr,  # noqa: N803
):
    """Attend with ``QUERIES`` queries of a sequence to one span of its keys.

    Scores are kept in base 2: one multiplication less for each weight.
    """
    tile, kv_head, span, spans = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    facts = sequences + tile // tiles * 4
    row, first = tl.load(facts).to(tl.int64), tl.load(facts + 3).to(tl.int64)
    context, length = tl.load(facts + 1), tl.load(facts + 2)
    first_query = tile % tiles * QUERIES

    rows = tl.arange(0, ROWS)
    queries = first_query + rows // GROUPS
    heads = kv_head * GROUPS + rows % GROUPS
    is_row = (rows < QUERIES * GROUPS) & (queries < length)
    key_dims, value_dims = tl.arange(0, KEY_PAD), tl.arange(0, VALUE_PAD)
    of_query = (first + queries)[:, None] * query_token + heads[:, None] * query_head + key_dims[None, :]
    q = tl.load(query + of_query, mask=is_row[:, None] & (key_dims < KEY_DIM)[None, :], other=0.0)
    positions = context + queries

    # A tile after the last query has no keys, so its loop ends at once.
    begin = tl.maximum(context + first_query - WINDOW + 1, 0) if WINDOW > 0 else context * 0
    end = tl.where(first_query < length, context + tl.minimum(first_query + QUERIES, length), begin)
    if IS_SPLIT:
        size = tl.maximum((end - begin + spans - 1) // spans, MIN_SPAN)
        begin = begin + span * size
        end = tl.minimum(end, begin + size)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    for base in range(begin, end, KEYS):
        places = base + tl.arange(0, KEYS)
        blocks = tl.load(tables + row * table_row + places // BLOCK_SIZE, mask=places < end, other=0).to(tl.int64)
        slots = blocks * BLOCK_SIZE + places % BLOCK_SIZE
        starts = slots * key_slot + kv_head * key_head
        scores = _scores(
            *(q, keys, key_scales, starts, places, positions, end, scale, softcap),
            *(KEY_DIM, KEY_PAD, WINDOW, IS_INT8, HAS_SOFTCAP, PRECISION),
        )
        higher = tl.maximum(highest, tl.max(scores, 1))
        offset = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that sees nothing yet
        weights = tl.exp2(scores - offset[:, None])
        shrink = tl.exp2(highest - offset)
        starts = slots * value_slot + kv_head * value_head
        v = _values(values, value_scales, starts, places < end, VALUE_DIM, VALUE_PAD, IS_INT8)
        sums = sums * shrink[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        highest = higher

    is_output = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
    if IS_SPLIT:
        entries = ((tile * QUERIES + rows // GROUPS).to(tl.int64) * HEADS + heads) * spans + span
        is_output &= (begin + rows * 0 < end)[:, None]  # two numbers compared are no mask to Triton 3.9's interpreter
        tl.store(stats + entries * 2, highest, mask=is_row)
        tl.store(stats + entries * 2 + 1, total, mask=is_row)
        # Spans without keys are known by their highest score and never read.
        tl.store(partials + entries[:, None] * VALUE_DIM + value_dims[None, :], sums, mask=is_output)
    else:
        if HAS_SINKS:
            shrink, total = _with_sink(highest, total, tl.load(sinks + heads, mask=is_row, other=0.0))
            sums *= shrink[:, None]
        sums /= tl.where(is_row, total, 1.0)[:, None]
        of_output = ((first + queries) * HEADS + heads)[:, None] * VALUE_DIM + value_dims[None, :]
        tl.store(output + of_output, sums.to(output.dtype.element_ty), mask=is_output)


@_kernel
def merge_kernel(  # type: ignore[no-untyped-def]
    partials,  # as above
    stats,
    sinks,
    output,
    sequences,
    tiles,
    spans,
    HEADS: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    VALUE_PAD: tl.constexpr,  # noqa: N803
    QUERIES: tl.constexpr,  # noqa: N803
    MOST_SPANS: tl.constexpr,  # noqa: N803
    HAS_SINKS: tl.constexpr,  # noqa: N803
):
    """Merge the spans of one query and head."""
    log2e: tl.constexpr = 1.4426950408889634
    place = tl.program_id(0)
    head = tl.program_id(1)
    tile = place // QUERIES
    facts = sequences + tile // tiles * 4
    length = tl.load(facts + 2)
    first = tl.load(facts + 3).to(tl.int64)
    number = tile % tiles * QUERIES + place % QUERIES
    is_query = number < length

    numbers = tl.arange(0, MOST_SPANS)
    dims = tl.arange(0, VALUE_PAD)
    entries = (place.to(tl.int64) * HEADS + head) * spans + numbers
    is_span = (number + numbers * 0 < length) & (numbers < spans)  # as above: a mask is made of blocks
    highest = tl.load(stats + entries * 2, mask=is_span, other=float("-inf"))
    totals = tl.load(stats + entries * 2 + 1, mask=is_span, other=0.0)
    has_keys = highest > float("-inf")
    top = tl.max(highest, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head) * log2e
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    shares = tl.exp2(highest - top)
    total = tl.sum(totals * shares, 0)
    if HAS_SINKS:
        total = total + tl.exp2(sink - top)
    of_part = entries[:, None] * VALUE_DIM + dims[None, :]
    parts = tl.load(partials + of_part, mask=has_keys[:, None] & (dims < VALUE_DIM)[None, :], other=0.0)
    result = tl.sum(parts * shares[:, None], 0) / tl.where(is_query, total, 1.0)
    of_output = ((first + number) * HEADS + head) * VALUE_DIM + dims
    tl.store(
        output + of_output, result.to(output.dtype.element_ty), mask=(number + dims * 0 < length) & (dims < VALUE_DIM)
    )


def is_installed() -> bool:
    """Return whether there is Triton. Pure."""
    return triton is not None


def is_interpreted() -> bool:
    """Return whether Triton runs the kernels on the CPU, step by step, as ``TRITON_INTERPRET=1`` makes it do. Pure."""
    return triton is not None and not isinstance(attend_kernel, triton.JITFunction)
