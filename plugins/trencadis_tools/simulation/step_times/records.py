"""Steps as the observer ``recorder`` wrote them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from trencadis.errors import ConfigError
from trencadis.files import parse_json, read_text
from trencadis.records import Bucket, Phase, StepShape, UnifiedBucket
from trencadis_plugins.observer.recorder import FORMAT

__all__ = ["KINDS", "StepRecord", "StepRecords", "bucket_of", "kind_of", "read_records", "steady"]

KINDS = ("decode", "prefill", "mixed")
"""Kinds of steps: of decodes alone, of prefills alone, of both."""

_SIZES = tuple(field.name for field in attrs.fields(StepShape) if field.name != "buckets")
_TIMES = ("now_s", "wall_s", "device_s", "plan_s", "draft_s", "commit_s")


@attrs.frozen(kw_only=True)
class StepRecord:
    """One step that was measured.

    Attributes:
        shape: Sizes of the step.
        now_s: Engine clock at its commit.
        wall_s: Since the commit before, idle time left out, seconds; see the recorder.
        device_s: On the device, seconds.
        plan_s: To plan and submit it, seconds.
        draft_s: To draft for it, part of ``plan_s``, seconds.
        commit_s: To commit it, seconds.
        num_compilations: Programs compiled for it, and buckets that were not prepared.
        num_emitted_tokens: Output tokens committed.
        overlaps: It was planned while the step before it ran.
    """

    shape: StepShape
    now_s: float
    wall_s: float
    device_s: float
    plan_s: float = 0.0
    draft_s: float = 0.0
    commit_s: float = 0.0
    num_compilations: int = 0
    num_emitted_tokens: int = 0
    overlaps: bool = False

    @property
    def busy_s(self) -> float:
        """How long the device was taken: ``device_s``; of steps that overlap ``wall_s``, for what the host then adds it hides nowhere."""
        return self.wall_s if self.overlaps else self.device_s

    @property
    def host_s(self) -> float:
        """How long the host took beside it: what the device waited; of steps that overlap planning and commit, which the device hides.

        Drafting is left out: how long it takes belongs to the speculator.
        """
        took_s = self.plan_s + self.commit_s if self.overlaps else self.wall_s - self.device_s
        return took_s - self.draft_s


@attrs.frozen(kw_only=True)
class StepRecords:
    """The steps of one run.

    Attributes:
        steps: In order.
        measured: Model, processor and versions by the first line.
        file: Where they come from.
    """

    steps: tuple[StepRecord, ...] = attrs.field(repr=lambda steps: f"<{len(steps)} steps>")
    measured: Mapping[str, Any] = attrs.field(factory=dict)
    file: str = ""


def kind_of(shape: StepShape) -> str:
    """Return which of ``KINDS`` a step is. Pure."""
    if not shape.num_prefills:
        return "decode"
    return "mixed" if shape.num_decodes else "prefill"


def steady(steps: Iterable[StepRecord], *, num_warm_up: int) -> list[StepRecord]:
    """Return the steps that say how long such steps take: without the first ones, and those that waited for a compiler. Pure."""
    return [step for step in list(steps)[num_warm_up:] if not step.num_compilations and step.shape.num_tokens]


def read_records(path: str | Path) -> StepRecords:
    """Return the steps of a file.

    Raises:
        ConfigError: There is no such file, or it holds something else; names the line.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}.", hint='Record steps with observer.names = "recorder".') from error
    try:
        header = parse_json(lines[0]) if lines else {}
    except ValueError:
        header = {}
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ConfigError(
            f'{path}: its first line is not that of recorded steps, which has "format": "{FORMAT}".',
            hint='Record steps with observer.names = "recorder".',
        )
    measured = {name: value for name, value in header.items() if name != "format"}
    return StepRecords(steps=tuple(_steps(lines, path)), measured=measured, file=str(path))


def _steps(lines: Sequence[str], path: str | Path) -> Iterable[StepRecord]:
    for number, line in enumerate(lines[1:], 2):
        try:
            yield _step(parse_json(line))
        except (AttributeError, OverflowError, ValueError, KeyError, TypeError) as error:
            if number == len(lines) and isinstance(error, json.JSONDecodeError):
                return  # a run that was killed left half a line
            raise ConfigError(f"{path}, line {number} is no step: {type(error).__name__}: {error}.") from error


def _step(line: Mapping[str, Any]) -> StepRecord:
    return StepRecord(
        shape=StepShape(
            **{name: line[name] for name in _SIZES}, buckets=tuple(bucket_of(sizes) for sizes in line["buckets"])
        ),
        **{name: float(line[name]) for name in _TIMES},
        num_compilations=line["num_compilations"],
        num_emitted_tokens=line["num_emitted_tokens"],
        overlaps=line["overlaps"],
    )


def bucket_of(sizes: Sequence[Any]) -> Bucket:
    """Return the bucket that a list describes. Pure.

    Raises:
        ValueError: It describes none.
    """
    kind, *rest = sizes
    if kind == "unified":
        return UnifiedBucket(*rest)
    batch_size, query_len, num_blocks = rest
    return Bucket(batch_size, query_len, num_blocks, Phase(kind))
