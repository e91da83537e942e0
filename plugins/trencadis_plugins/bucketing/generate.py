"""From the sizes of each dimension to a table of buckets: product, filters, correctors; the same for every strategy.

    batch sizes × query lengths × blocks ─ filter: can a legal pass need it? ─ corrector ─ drafts ─▶ sorted buckets

Names of the formulas: P most sequences of a prefill pass, S most sequences, C context blocks, M decode blocks.
Source: vllm-gaudi, extension/bucketing/common.py, exponential.py and linear.py, rules of 2026.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from trencadis.records import Bucket, BucketLimits, Phase
from trencadis_plugins.bucketing.prompt_rules import PromptRules

__all__ = [
    "LONG_MODEL_LEN",
    "corrected",
    "decode_buckets",
    "decode_query_lens",
    "flattened",
    "legal_buckets",
    "prefill_buckets",
    "why_omitted",
    "with_drafts",
]

_log = logging.getLogger("trencadis.bucketing")

LONG_MODEL_LEN = 8192
"""From this ``max_model_len`` on, the largest context of a query length is what the query leaves of the model length."""


def prefill_buckets(
    limits: BucketLimits,
    *,
    batch_sizes: Sequence[int],
    query_lens: Sequence[int],
    context_blocks: Sequence[int],
    max_edge: int | None = None,
    rules: PromptRules | None = None,
) -> tuple[Bucket, ...]:
    """Return the prefill buckets over all combinations that a legal pass can need, sorted; maybe none. Pure.

    Args:
        limits: Limits of a shape.
        batch_sizes: Ascending.
        query_lens: Tokens, ascending.
        context_blocks: Blocks per sequence, ascending.
        max_edge: The largest context follows the query length only where that stays below this many blocks.
        rules: Rules for query lengths.
    """
    rules = rules or PromptRules()
    edge = context_blocks[-1]
    found = []
    for query_len in rules.in_chunks(query_lens):
        left = (limits.max_model_len - query_len) // limits.block_size
        if (
            limits.max_merged_prefills == 1
            and limits.max_model_len >= LONG_MODEL_LEN
            and left >= 0
            and (max_edge is None or left < max_edge)
        ):
            edge = left
        contexts = (*context_blocks[:-1], edge)
        found += [Bucket(batch_size, query_len, context) for batch_size in batch_sizes for context in contexts]
    return legal_buckets(filter(rules.allows, found), limits)


def decode_buckets(
    limits: BucketLimits, *, batch_sizes: Sequence[int], num_blocks: Iterable[int], flat_drafts: bool = False
) -> tuple[Bucket, ...]:
    """Return the decode buckets over all combinations that a legal pass can need, sorted; maybe none. Pure.

    With contiguous blocks a range over the whole cache is added.

    Args:
        limits: Limits of a shape.
        batch_sizes: Ascending.
        num_blocks: Blocks of all sequences together.
        flat_drafts: How passes with drafts are shaped, see :func:`with_drafts`.
    """
    blocks = set(num_blocks) | ({limits.num_blocks} if limits.contiguous else set())
    pairs = [Bucket(batch_size, 1, count, Phase.DECODE) for batch_size in batch_sizes for count in sorted(blocks)]
    return with_drafts(legal_buckets(pairs, limits), limits, flat=flat_drafts)


def legal_buckets(buckets: Iterable[Bucket], limits: BucketLimits) -> tuple[Bucket, ...]:
    """Return those that a legal pass can need, corrected, sorted and without duplicates. Pure; logs the rest at DEBUG."""
    candidates = set(buckets)
    omitted = sorted((bucket for bucket in candidates if why_omitted(bucket, limits)), key=_order)
    if omitted and _log.isEnabledFor(logging.DEBUG):
        sizes = [(bucket.batch_size, bucket.query_len, bucket.num_blocks) for bucket in omitted]
        name = "prompt" if omitted[0].phase is Phase.PREFILL else "decode"
        _log.debug("Omitted %d %s buckets: %s", len(omitted), name, sizes)
    left_out = set(omitted)
    return tuple(sorted({corrected(bucket, limits) for bucket in candidates if bucket not in left_out}, key=_order))


def _order(bucket: Bucket) -> tuple[int, int, int, Bucket]:
    """Return the key that orders buckets as they order themselves, ten times as fast: ``linear`` lists tens of thousands. Pure."""
    return bucket.batch_size, bucket.query_len, bucket.num_blocks, bucket


def why_omitted(bucket: Bucket, limits: BucketLimits) -> str:
    """Return why no legal pass needs ``bucket``, or an empty string. Pure.

    Without contiguous blocks every sequence of a decode pass reads at least one block.
    """
    if bucket.phase is Phase.DECODE:
        fewer = not limits.contiguous and bucket.num_blocks < bucket.batch_size
        return f"{bucket.num_blocks} blocks for {bucket.batch_size} sequences" if fewer else ""
    prompts = limits.max_merged_prefills
    if bucket.num_blocks > limits.max_context_blocks:
        owner = "a sequence has" if prompts == 1 else f"{prompts} prompts have"
        return f"{bucket.num_blocks} context blocks, but {owner} at most {limits.max_context_blocks}"
    if bucket.query_len > prompts * limits.max_model_len:
        row = "" if prompts == 1 else f", for each of {prompts} prompts"
        return f"a query of {bucket.query_len} tokens, but max_model_len is {limits.max_model_len}{row}"
    if bucket.num_tokens > limits.max_num_batched_tokens:
        return f"{bucket.num_tokens} tokens, but max_num_batched_tokens is {limits.max_num_batched_tokens}"
    # Of prompts that share the queries evenly.
    room = prompts * ((limits.max_model_len - bucket.query_len // prompts) // limits.block_size)
    if prompts > 1 and bucket.num_blocks > room:
        return f"{bucket.num_blocks} context blocks, but {prompts} prompts leave room for {room}"
    return ""


def corrected(bucket: Bucket, limits: BucketLimits) -> Bucket:
    """Return ``bucket`` with no more blocks than its sequences' longest tables hold, where blocks are listed. Pure."""
    if bucket.phase is Phase.PREFILL or limits.contiguous:
        return bucket
    most = bucket.batch_size * limits.max_blocks_per_sequence
    return Bucket(bucket.batch_size, bucket.query_len, min(bucket.num_blocks, most), Phase.DECODE)


def with_drafts(seeds: Sequence[Bucket], limits: BucketLimits, *, flat: bool = False) -> tuple[Bucket, ...]:
    """Return decode buckets of one token each and what verifies drafts beside them, sorted. Pure.

    A pass is as long as its longest run of drafts: lengths double, so that at most half of it is padding on that account, and end
    with the longest there is.

    Args:
        seeds: Decode buckets with a query of one token.
        limits: ``max_draft_tokens`` is read: 0 adds nothing.
        flat: A pass with drafts has a row for each token, as a backend that flattens asks for; else a longer query.
    """
    if flat:
        return flattened(seeds, limits)
    lens = decode_query_lens(limits)
    return tuple(
        sorted(Bucket(seed.batch_size, query, seed.num_blocks, Phase.DECODE) for seed in seeds for query in lens)
    )


def decode_query_lens(limits: BucketLimits) -> tuple[int, ...]:
    """Return the query lengths of decode passes: 1, 2, 4 … and the newest token with the most drafts, ascending. Pure."""
    longest = 1 + limits.max_draft_tokens
    return (*(1 << power for power in range((longest - 1).bit_length())), longest)


def flattened(seeds: Sequence[Bucket], limits: BucketLimits) -> tuple[Bucket, ...]:
    """Return decode buckets for passes whose drafts are rows of their own, beside the seeds, sorted. Pure.

    With t tokens a sequence a batch of bs has bs · t rows, which read the sequences' c blocks once (if there is one for
    each row) or once each, c · t.

    Source: vllm-gaudi, extension/bucketing/common.py, speculative decoding.
    """
    rows = 1 + limits.max_draft_tokens
    found = set(seeds)
    for seed in seeds:
        batch_size, blocks = seed.batch_size * rows, seed.num_blocks
        counts = (blocks, blocks * rows) if batch_size <= blocks else (blocks * rows,)
        found.update(corrected(Bucket(batch_size, 1, count, Phase.DECODE), limits) for count in counts)
    return tuple(sorted(found))
