"""One page of metrics out of what several components show: what no scraper would read, or comes twice, is left out and named.

Prometheus refuses a whole page for one line that it cannot read, and for a family that is declared twice; what one observer does wrong
would cost the operator everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import attrs

from trencadis.faults import FaultLog, shown

__all__ = ["MAX_PAGE_CHARS", "MetricsPage"]

MAX_PAGE_CHARS: Final = 4 << 20
"""Longest page of one component: some 50,000 samples."""

_OF_THE_SERVER: Final = re.compile(r"(?:trencadis_(?:http_|admitted_|engine_up|engine_restarts)|process_).*")
"""Families that the server adds to the page."""

_NAME: Final = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL: Final = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\n"])*"'
_ONE_LABEL: Final = re.compile(_LABEL)
_VALUE: Final = r"[+-]?(?:\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|[iI]nf|[nN]a[nN])"
_SAMPLE: Final = re.compile(rf"({_NAME})((?:\{{(?:{_LABEL}(?:,{_LABEL})*,?)?\}})?)[ \t]+{_VALUE}(?:[ \t]+-?\d+)?[ \t]*")
_COMMENT: Final = re.compile(rf"#[ \t]+(?:(HELP)[ \t]+({_NAME})(?:[ \t].*)?|(TYPE)[ \t]+({_NAME})[ \t]+(\w+)[ \t]*)")
"""Source: Prometheus, exposition formats, text format 0.0.4."""

_SUFFIXES: Final = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
_TYPES: Final = frozenset({"counter", "gauge", "histogram", "summary", "untyped"})


@attrs.define
class _Family:
    """The lines of one family, and which series they show."""

    name: str
    kind: str = ""
    has_help: bool = False
    lines: list[str] = attrs.field(factory=list)
    series: set[str] = attrs.field(factory=set)

    def owns(self, sample: str) -> bool:
        if sample == self.name:
            return self.kind != "histogram"
        return any(sample == self.name + suffix for suffix in _SUFFIXES.get(self.kind, ()))


class MetricsPage:
    """Puts a page together, component by component.

    Args:
        log: Told what is left out.
    """

    def __init__(self, log: FaultLog) -> None:
        self._log = log
        self._names: set[str] = set()
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The page, in Prometheus' text format."""
        return "".join(self._texts)

    def add(self, label: str, text: str) -> bool:
        """Add what a component shows; False if anything was left out, which is logged.

        Args:
            label: Names the component and its distribution.
            text: In Prometheus' text format.
        """
        fault = ""
        if len(text) > MAX_PAGE_CHARS:
            fault = f"{len(text)} characters, where {MAX_PAGE_CHARS} are the most; nothing of it is shown"
            text = ""
        try:
            families = list(_families(text))
        except ValueError as error:
            families, fault = [], f"{error}; nothing of it is shown"
        for family in families:
            names = {family.name, *(family.name + suffix for suffix in _SUFFIXES.get(family.kind, ()))}
            if names & self._names or any(map(_OF_THE_SERVER.fullmatch, names)):
                fault = fault or f"{shown(family.name)}, which the page has already; it is shown once"
                continue
            self._names |= names
            self._texts.extend(family.lines)
        if fault:
            said = f"{label} returned metrics with {fault}. Mend its metrics(), or take it out of the configuration."
            self._log.say(f"{label}.metrics", said)
        return not fault


def _families(text: str) -> Iterator[_Family]:
    """Yield the families of a text, in order. Pure.

    Raises:
        ValueError: A line that no scraper reads; says which.
    """
    family: _Family | None = None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip(" \t"):
            continue
        if line.startswith("#"):
            comment = _COMMENT.fullmatch(line)
            if comment is None:
                if re.match(r"#[ \t]+(?:HELP|TYPE)\b", line):
                    raise _unreadable(number, line)
                continue  # a comment, which says nothing to a scraper
            name = comment[2] or comment[4]
            if family is None or family.name != name or family.series:
                if family is not None:
                    yield family
                family = _Family(name)
            _declare(family, comment[5] or "", number, line)
            family.lines.append(f"{line}\n")
            continue
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            raise _unreadable(number, line)
        if family is None or not family.owns(sample[1]):
            if family is not None:
                yield family
            family = _Family(sample[1])
        series = sample[1] + sample[2]
        labels = [label.split("=", 1)[0] for label in _ONE_LABEL.findall(sample[2])]
        if len(labels) != len(set(labels)):
            raise _unreadable(number, line)
        if series in family.series:
            raise ValueError(f"line {number}, {shown(line)}, which shows a series twice")
        family.series.add(series)
        family.lines.append(f"{line}\n")
    if family is not None:
        yield family


def _declare(family: _Family, kind: str, number: int, line: str) -> None:
    """Note a HELP or TYPE line.

    Raises:
        ValueError: It comes twice, or names no type.
    """
    if kind and (family.kind or kind not in _TYPES):
        raise _unreadable(number, line)
    if not kind and family.has_help:
        raise _unreadable(number, line)
    family.kind = family.kind or kind
    family.has_help |= not kind


def _unreadable(number: int, line: str) -> ValueError:
    return ValueError(f"line {number}, {shown(line)}, which is not Prometheus' text format")
