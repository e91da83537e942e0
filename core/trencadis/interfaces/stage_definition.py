"""What the hook ``trencadis_stages`` yields: a part of the engine that a configuration can leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from trencadis.records import LayoutFeature

__all__ = ["StageDefinition"]


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@attrs.frozen(kw_only=True)
class StageDefinition:
    """A stage by name, and when an engine has it.

    Attributes:
        name: Unique among all stages; lower-case with underscores.
        make: Called with the ``trencadis.engine.stage.Makings`` of an engine; returns a ``trencadis.engine.stage.Stage``, or None if there is
            nothing to do in this engine. Imports the stage inside.
        summary: One line for ``trencadis plugins``.
        when: Called with the ``trencadis.config.Config``; whether the engine asks ``make``.
        make_engine: Called with the ``trencadis.engine.stage.BareParts`` of a model that generates nothing; returns its engine, a
            ``trencadis.engine.stage.AnyEngine``. None: the stage is of no use to such a model.
        uses: Nouns whose chosen component the stage is given, by ``Makings.made``.
        layouts: The layouts of ranks under which settings of the stage are refused; a row each on the page of layouts.
        before: Names of stages before which it acts, at every moment; those that are absent do not matter.
    """

    name: str
    make: Callable[[Any], Any]
    summary: str
    when: Callable[[Any], bool] = lambda _: True
    make_engine: Callable[[Any], Any] | None = None
    uses: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
    layouts: tuple[LayoutFeature, ...] = ()
    before: frozenset[str] = attrs.field(default=frozenset(), converter=_names)
