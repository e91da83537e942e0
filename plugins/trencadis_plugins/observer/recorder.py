"""Sizes and times of every step, as lines of JSON: what step times are fitted from.

The first line says what was measured: model, processor, versions. Every other line is a step: times, and the fields of
:class:`~trencadis.records.StepShape`, buckets as lists.
"""

from __future__ import annotations

import json
import math
import platform
from pathlib import Path
from typing import Any, Final, TextIO

from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext, Observer
from trencadis.records import Bucket, FinishedSequence, ModelFacts, StepStats, UnifiedBucket, step_shape
from trencadis_plugins.observer.config import RecorderObserverConfig

__all__ = ["FORMAT", "RecorderObserver", "bucket_fields"]

FORMAT: Final = "trencadis steps 1"
"""Value of ``format`` in the first line."""

_encode = json.JSONEncoder(separators=(",", ":")).encode


class RecorderObserver(Observer):
    """Writes one line for each step that computed a token.

    Times are seconds: ``now_s`` of the commit; ``device_s`` on the device, as the backend measures it; ``plan_s``, ``draft_s`` and
    ``commit_s`` on the host; ``wall_s`` since the commit before if that left anything to do, else since planning began: no idle time. What
    ``wall_s`` exceeds ``device_s`` by is time that the device waited for the host, who calls the engine included. ``overlaps``: it was
    planned before the step before it was committed.

    Args:
        config: Where to.
        context: Names the model and the replica.

    Raises:
        ConfigValueError: The directory does not exist.
    """

    def __init__(self, config: RecorderObserverConfig, context: ComponentContext) -> None:
        path = Path(config.file)
        if context.num_replicas > 1:
            path = path.with_name(f"{path.stem}.{context.replica}{path.suffix}")
        if not path.name or not path.absolute().parent.is_dir():
            raise ConfigValueError(
                f"observer.recorder.file = {config.file!r} lies in no directory that exists.",
                hint="Make the directory, or name another file.",
            )
        self._path = path
        self._header = _header(context.model, context.label)
        self._lines: TextIO | None = None
        self._committed_s = float("-inf")
        self._num_left = 0
        self._idle_since_s = float("-inf")

    def on_step(self, stats: StepStats) -> None:
        """Write a line; a step without tokens leaves none."""
        was_idle = self._idle_since_s <= stats.start_s
        overlaps = stats.start_s < self._committed_s
        since_s = max(self._committed_s, stats.start_s) if was_idle else self._committed_s
        self._committed_s, self._num_left = stats.now_s, stats.num_running + stats.num_waiting
        self._idle_since_s = math.inf if self._num_left else stats.now_s
        if not stats.num_scheduled_tokens:
            return
        if self._lines is None:
            self._lines = self._path.open("w", encoding="utf-8")
            self._lines.write(_encode(self._header) + "\n")
        self._lines.write(_encode(_record(stats, wall_s=stats.now_s - since_s, overlaps=overlaps)) + "\n")

    def on_request(self, finished: FinishedSequence) -> None:
        """Note when nothing is left: a caller may end the last request between two steps."""
        self._num_left -= 1
        if not self._num_left:
            self._idle_since_s = finished.finish_s

    def close(self) -> None:
        """Write what is buffered; a later step begins the file anew."""
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def _record(stats: StepStats, *, wall_s: float, overlaps: bool) -> dict[str, Any]:
    """Return the line of a step. Pure."""
    has_buckets = bool(stats.num_bucket_hits or stats.num_fallbacks or stats.num_substituted)
    shape = step_shape(stats.passes, num_new=stats.num_admitted, has_buckets=has_buckets)
    return {
        "step": stats.step,
        "now_s": stats.now_s,
        "wall_s": wall_s,
        "overlaps": overlaps,
        "device_s": stats.device_s,
        "plan_s": stats.plan_s,
        "draft_s": stats.draft_s,
        "commit_s": stats.commit_s,
        "num_compilations": stats.num_compilations + stats.num_unprepared,
        "num_emitted_tokens": stats.num_emitted_tokens,
        "num_decodes": shape.num_decodes,
        "num_prefills": shape.num_prefills,
        "num_decode_tokens": shape.num_decode_tokens,
        "num_prefill_tokens": shape.num_prefill_tokens,
        "num_decode_context": shape.num_decode_context,
        "num_prefill_context": shape.num_prefill_context,
        "prefill_products": shape.prefill_products,
        "num_new": shape.num_new,
        "buckets": [bucket_fields(bucket) for bucket in shape.buckets],
    }


def bucket_fields(bucket: Bucket) -> list[Any]:
    """Return a bucket as a list that begins with its phase, or ``unified``. Pure."""
    if isinstance(bucket, UnifiedBucket):
        return ["unified", bucket.query_len, bucket.num_blocks, bucket.num_unique_blocks, bucket.is_causal]
    return [bucket.phase.value, bucket.batch_size, bucket.query_len, bucket.num_blocks]


def _header(model: ModelFacts | None, label: str) -> dict[str, Any]:
    names = (
        "architecture",
        "dtype",
        "num_parameters",
        "weights_bytes",
        "kv_bytes_per_token",
        "max_model_len",
        "fingerprint",
    )
    return {
        "format": FORMAT,
        "model": {} if model is None else {name: getattr(model, name) for name in names},
        "processor": _processor(),
        "versions": {"recorder": label, "python": platform.python_version()},
    }


def _processor() -> str:
    """Return the processor's name, as Linux tells it, or what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
