"""Buckets listed in a file, in the format of the vLLM plugin for Gaudi, and the writer of such files.

    # comment
    (1, 2048, 0)                             one bucket: batch size, query length, blocks
    (1, [256, 512], [0, 4, 8])               every combination: six
    ([64, 128, 256], 1, range(512, 1024, 32))   a query of one token: decode; range() without its end, as in Python

Source: vllm-gaudi, extension/bucketing/file_strategy.py.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from trencadis.errors import ConfigValueError
from trencadis.files import read_text
from trencadis.records import Bucket, BucketLimits, Phase
from trencadis_plugins.bucketing.config import FromFileConfig
from trencadis_plugins.bucketing.generate import legal_buckets, why_omitted, with_drafts
from trencadis_plugins.bucketing.strategy import TableStrategy

__all__ = ["FromFile", "bucket_file_text", "read_bucket_file", "write_bucket_file"]

_log = logging.getLogger("trencadis.bucketing")

_MAX_BUCKETS = 100_000
_MAX_RANGE = 10_000
_NUMBER = r"(?:[+-]?\d{1,9}|'[+-]?\d{1,9}'|\"[+-]?\d{1,9}\")"
_NUMBERS = re.compile(r"[+-]?\d{1,9}")
_ITEM = re.compile(
    rf"\s*(?:(?P<one>{_NUMBER})"
    rf"|\[\s*(?P<list>{_NUMBER}(?:\s*,\s*{_NUMBER})*)\s*,?\s*\]"
    rf"|range\s*\(\s*(?P<range>{_NUMBER}\s*,\s*{_NUMBER}(?:\s*,\s*{_NUMBER})?)\s*,?\s*\))\s*"
)


class FromFile(TableStrategy):
    """The buckets of a file, as far as the limits allow them. Immutable: the file is read once.

    A bucket that no legal pass can need is left out with a warning; one with more blocks than its sequences can have is cut.

    Args:
        limits: Limits that ``bucket_for`` keeps.
        config: Which file, and what it must hold.

    Raises:
        ConfigValueError: The file cannot be read, a phase has no bucket, or (with ``strict``) a line is invalid.
    """

    def __init__(self, limits: BucketLimits, config: FromFileConfig) -> None:
        self._config = config
        self._listed = read_bucket_file(config.path, strict=config.strict)
        for bucket in self._listed:
            reason = _why_omitted(bucket, limits)
            if reason:
                sizes = (bucket.batch_size, bucket.query_len, bucket.num_blocks)
                _log.warning("%s: the %s bucket %s is left out: %s.", config.path, bucket.phase.value, sizes, reason)
        super().__init__(limits)

    def buckets(self, limits: BucketLimits) -> tuple[Bucket, ...]:
        """Return the table: prefill buckets, then decode buckets. Pure.

        Raises:
            ConfigValueError: A phase has no bucket within the limits, and the config does not say that it has none.
        """
        fitting = [bucket for bucket in self._listed if not _why_omitted(bucket, limits)]
        prefill = legal_buckets([bucket for bucket in fitting if bucket.phase is Phase.PREFILL], limits)
        seeds = legal_buckets([_cut(bucket, limits) for bucket in fitting if bucket.phase is Phase.DECODE], limits)
        decode = with_drafts(seeds, limits, flat=self._config.flat_drafts)
        for phase, found in ((Phase.PREFILL, prefill), (Phase.DECODE, decode)):
            if not found and self._config.phases in ("both", phase.value):
                self._refuse(phase)
        return prefill + decode

    def _refuse(self, phase: Phase) -> None:
        listed = sum(bucket.phase is phase for bucket in self._listed)
        other = Phase.DECODE if phase is Phase.PREFILL else Phase.PREFILL
        why = f"none of its {listed} is within the engine's limits" if listed else "it lists none"
        shape = "a query of 1 token is decode" if phase is Phase.DECODE else "a query above 1 token is prefill"
        raise ConfigValueError(
            f'[bucketing.from_file] path = "{self._config.path}": no {phase.value} bucket: {why}.',
            hint=f'Add a line ({shape}), or set phases = "{other.value}" if every {phase.value} pass may be a fallback.',
        )


def read_bucket_file(path: str | Path, *, strict: bool = False) -> tuple[Bucket, ...]:
    """Return the buckets of a file, prefill before decode, sorted and without duplicates.

    A line that is no entry is skipped with a warning that says its number and what is wrong.

    Args:
        path: UTF-8 text, one entry a line.
        strict: Refuse a file with an invalid line.

    Raises:
        ConfigValueError: The file cannot be read; with ``strict``, a line is invalid: all of them are named.
    """
    try:
        lines = read_text(path, encoding="utf-8-sig").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    except ValueError as error:
        raise _unreadable(path, str(error)) from error
    found: set[Bucket] = set()
    wrong = []
    for number, line in enumerate(lines, start=1):
        try:
            found.update(_buckets_of(line))
            if len(found) > _MAX_BUCKETS:
                raise _too_many(path, number)
        except ValueError as error:
            wrong.append(f"line {number}: {error}")
            if not strict:
                _log.warning("Skipping invalid bucketing line %d in %s: %s", number, path, error)
    if wrong and strict:
        raise ConfigValueError(
            f'[bucketing.from_file] path = "{path}": {"; ".join(wrong)}.', hint="Correct these lines."
        )
    return tuple(sorted(found, key=lambda bucket: (bucket.phase is Phase.DECODE, bucket)))


def _buckets_of(line: str) -> list[Bucket]:
    """Return the buckets of one line; a ValueError says what is wrong with it."""
    text = line.partition("#")[0].strip()
    if not text:
        return []
    batch_sizes, query_lens, counts = _three_items(text)
    num_buckets = len(batch_sizes) * len(query_lens) * len(counts)
    if num_buckets > _MAX_BUCKETS:
        raise ValueError(f"{num_buckets} buckets, more than {_MAX_BUCKETS}")
    return [_bucket(*sizes) for sizes in itertools.product(batch_sizes, query_lens, counts)]


def _three_items(text: str) -> list[list[int]]:
    inner = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    items, start = [], 0
    while start < len(inner):
        match = _ITEM.match(inner, start)
        if match is None or inner[match.end() : match.end() + 1] not in ("", ","):
            raise ValueError(f"no whole number, list or range(start, stop[, step]) at {inner[start:].strip()[:40]!r}")
        items.append(_values(match))
        start = match.end() + 1
    if len(items) != 3:
        raise ValueError(f"{len(items)} values, but a bucket has three: batch size, query length, blocks")
    return items


def _values(match: re.Match[str]) -> list[int]:
    numbers = [int(number) for number in _NUMBERS.findall(match["one"] or match["list"] or match["range"])]
    if match["range"] is None:
        return numbers
    if len(numbers) == 3 and not numbers[2]:
        raise ValueError("range() with a step of 0")
    values = range(*numbers)
    if not values:
        raise ValueError(f"{values} is empty")
    if len(values) > _MAX_RANGE:
        raise ValueError(f"{values} has {len(values)} values, more than {_MAX_RANGE}")
    return list(values)


def _bucket(batch_size: int, query_len: int, num_blocks: int) -> Bucket:
    phase = Phase.DECODE if query_len == 1 else Phase.PREFILL
    if min(batch_size, query_len) < 1 or num_blocks < (phase is Phase.DECODE):
        raise ValueError(
            f"({batch_size}, {query_len}, {num_blocks}): batch size and query length are 1 or more, blocks too in decode"
        )
    return Bucket(batch_size, query_len, num_blocks, phase)


def _unreadable(path: str | Path, why: str) -> ConfigValueError:
    return ConfigValueError(
        f'[bucketing.from_file] path = "{path}": {why}.', hint="Give a text file with one bucket a line."
    )


def _too_many(path: str | Path, number: int) -> ConfigValueError:
    return ConfigValueError(
        f'[bucketing.from_file] path = "{path}": more than {_MAX_BUCKETS} buckets up to line {number}.',
        hint="Use fewer sizes.",
    )


def _why_omitted(bucket: Bucket, limits: BucketLimits) -> str:
    """Return why no legal pass needs ``bucket``; more than the filter of made tables, whose sizes are legal one by one."""
    is_prefill = bucket.phase is Phase.PREFILL
    most = limits.max_prefill_batch_size if is_prefill else limits.max_num_seqs
    if bucket.batch_size > most:
        return f"{bucket.batch_size} sequences, but a {bucket.phase.value} pass has at most {most}"
    return why_omitted(bucket, limits)


def _cut(bucket: Bucket, limits: BucketLimits) -> Bucket:
    """A range of blocks ends with the cache, whose size differs from one machine to the next."""
    if limits.contiguous and bucket.num_blocks > limits.num_blocks:
        return Bucket(bucket.batch_size, bucket.query_len, limits.num_blocks, bucket.phase)
    return bucket


def bucket_file_text(buckets: Iterable[Bucket], *, comment: str = "") -> str:
    """Return the lines of a bucket file. Pure.

    What verifies drafts is written as its bucket of one token: readers add the longer queries from their own limits.

    Args:
        buckets: Buckets of both phases, in any order.
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
