"""What is configured, and by whom: the rows of ``trencadis config --explain``."""

from __future__ import annotations

import json
from collections.abc import Sequence

import attrs

from trencadis.config.load import ResolvedConfig
from trencadis.config.messages import DEFAULT, show

__all__ = ["Row", "as_json", "explain"]


@attrs.frozen(kw_only=True)
class Row:
    """One line of the explanation.

    Attributes:
        path: Dotted path of the setting.
        value: Value in TOML; stars for a secret that is set, ``(required)`` for a value that is not given.
        source: Who set it.
        unit: Such as ``tokens``.
        meaning: One sentence.
    """

    path: str
    value: str
    source: str
    unit: str
    meaning: str


def explain(resolved: ResolvedConfig) -> list[Row]:
    """Return one row for each setting and each option of an import-path component, in the schema's order. Pure."""
    rows = []
    for path, value in resolved.values.items():
        setting = resolved.settings.get(path)
        secret = setting is not None and setting.secret and value != setting.default
        rows.append(
            Row(
                path=path,
                value="***" if secret else "(required)" if value is attrs.NOTHING else show(value),
                source=resolved.sources.get(path, DEFAULT),
                unit=setting.unit if setting else "",
                meaning=setting.help if setting else "Option of the component given by import path.",
            )
        )
    return rows


def as_json(rows: Sequence[Row]) -> str:
    """Return the rows as a JSON array of objects. Pure."""
    return json.dumps([attrs.asdict(row) for row in rows], indent=2, ensure_ascii=False)
