"""``docs/layouts.md``: which features work under which layouts of ranks, from the tables that the start reads."""

from __future__ import annotations

from collections.abc import Sequence

from docs_pages.markdown import heading_note, table
from trencadis.records import LayoutFeature
from trencadis.registry import Registry
from trencadis.registry.layout_support import FEATURES, LAYOUTS, Layout
from trencadis_gaudi.parallel.support import FEATURES as OF_GAUDI
from trencadis_torch.parallel.support import FEATURES as OF_TORCH

__all__ = ["layouts_page"]

_OURS = "trencadis"

_ALSO = {
    "tensor": ("processes",),
    "pipeline": ("processes",),
    "expert": ("tensor", "processes"),
    "attention": ("expert", "tensor", "processes"),
}
"""Layouts that one is, too."""

_HEAD = f"""# Features and layouts

{heading_note("trencadis.registry.layout_support, trencadis_stages, trencadis_torch.parallel.support and trencadis_gaudi.parallel.support")}

A layout says how a model is divided over devices: table `[parallel]`, see [Divide a model over ranks](do/parallel.md) and [Serve with replicas](do/replicas.md).
Whatever does not go together is refused when the engine starts, with this page's reason.

## Layouts

"""

_FEATURES = """
## Features

A number is a reason below the table; `—` is a layout that nothing here serves; `some` components do.
"""


def layouts_page() -> str:
    """Return the page."""
    served = {layout.name: _providers(layout) for layout in LAYOUTS}
    rows = [(f"`{one.name}`", one.summary, _status(one, served[one.name])) for one in LAYOUTS]
    reasons: list[str] = []
    names = [layout.name for layout in LAYOUTS]
    of_stages = [
        feature
        for one in Registry.discover(strict=True).stages
        if one.provenance.distribution == _OURS
        for feature in one.definition.layouts
    ]
    head = ("feature", "setting", "one process", *names)
    cells = [
        (
            feature.name,
            f"`{feature.setting}`" if feature.setting else "",
            "yes",
            *(_cell(feature, name, served[name] is not None, reasons) for name in names),
        )
        for feature in (*FEATURES, *of_stages, *OF_TORCH, *OF_GAUDI)
    ]
    notes = [f"{number}. {reason[:1].upper()}{reason[1:]}." for number, reason in enumerate(reasons, start=1)]
    return (
        "\n".join([_HEAD + table(("layout", "what it is", "served"), rows) + _FEATURES, table(head, cells), *notes])
        + "\n"
    )


def _providers(layout: Layout) -> list[str] | None:
    """Return the settings of built-in components that serve a layout, one for each capability; None if one is not provided."""
    found: list[str] = []
    registry = Registry.discover(strict=True)
    for capability in layout.capabilities:
        noun = capability.partition(".")[0]
        able = [f'`{noun}.name = "{name}"`' for name in _providing(registry, noun, capability)]
        if not able:
            return None
        found.append(" or ".join(able))
    return found


def _providing(registry: Registry, noun: str, capability: str) -> list[str]:
    """Return the names of built-in components that provide a capability."""
    return [
        name
        for name, item in registry.components(noun).items()
        if item.provenance.distribution == _OURS and capability in item.component.provides
    ]


def _status(layout: Layout, served: Sequence[str] | None) -> str:
    if served is None:
        needed = ", ".join(f"`{one}`" for one in layout.capabilities)
        return f"by no component of this distribution; needs {needed}"
    return f"with {' and '.join(served)}" if served else "always"


def _cell(feature: LayoutFeature, name: str, is_served: bool, reasons: list[str]) -> str:
    if not is_served:
        return "—"
    refusing = next((one for one in (name, *_ALSO.get(name, ())) if one in feature.refused), None)
    if refusing is None:
        return "yes"
    why, capability = feature.refused[refusing], feature.unless_provides.get(refusing)
    if capability:
        noun = feature.setting.partition(".")[0]
        able = _providing(Registry.discover(strict=True), noun, capability)
        why = f"{', '.join(f'`{one}`' for one in able)} do; any other is refused: {why}"
    if why not in reasons:
        reasons.append(why)
    return f"{'some' if capability else 'no'} ({reasons.index(why) + 1})"
