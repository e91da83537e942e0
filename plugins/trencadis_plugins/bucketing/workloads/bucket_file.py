"""The bucket file: one ``(batch size, query length, blocks)`` a line; a query length of 1 marks a decode bucket.

Source: the format that the vLLM plugin for Gaudi reads through ``VLLM_BUCKETING_FROM_FILE``.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trencadis.records import Bucket, Phase

__all__ = ["bucket_file_text", "write_bucket_file"]


def bucket_file_text(buckets: Iterable[Bucket], *, comment: str = "") -> str:
    """Return the lines of a bucket file. Pure.

    What verifies drafts is written as its bucket of one token: readers add the longer queries from their own limits.

    Args:
        buckets: Of both phases, in any order.
        comment: Goes to the top; may have several lines.

    Raises:
        ValueError: A prefill bucket has a query of one token: it would be read as decode.
    """
    rows = set()
    for bucket in buckets:
        if bucket.phase is Phase.PREFILL and bucket.query_len == 1:
            raise ValueError(f"{bucket}: in a bucket file a query of one token means decode")
        query_len = bucket.query_len if bucket.phase is Phase.PREFILL else 1
        rows.add((bucket.phase is Phase.DECODE, bucket.batch_size, query_len, bucket.num_blocks))
    lines = [f"# {line}".rstrip() for line in comment.splitlines()]
    lines += [f"({batch_size}, {query_len}, {blocks})" for _, batch_size, query_len, blocks in sorted(rows)]
    return "\n".join(lines) + "\n"


def write_bucket_file(path: str | Path, buckets: Iterable[Bucket], *, comment: str = "") -> None:
    """Write buckets so that ``from_file``, and the vLLM plugin for Gaudi, read the same ones.

    Args:
        path: Overwritten.
        buckets: See :func:`bucket_file_text`.
        comment: See :func:`bucket_file_text`.

    Raises:
        ValueError: See :func:`bucket_file_text`.
        OSError: The file cannot be written.
    """
    Path(path).write_text(bucket_file_text(buckets, comment=comment), encoding="utf-8")
