"""Capability negotiation: what chosen components require, chosen components must provide; checked before anything is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trencadis.config.messages import spot
from trencadis.errors import CapabilityError
from trencadis.registry.collect import RegisteredComponent

__all__ = ["negotiate"]


def negotiate(
    chosen: Iterable[tuple[str, RegisteredComponent]],
    *,
    offers: Iterable[RegisteredComponent] = (),
    sources: Mapping[str, str] | None = None,
) -> None:
    """Check that every requirement of the chosen components is met by one of them. Pure.

    Args:
        chosen: Dotted path of the setting that names the component, such as ``backend.name``, and the component.
        offers: Every registered component, to say who could provide what is missing.
        sources: Who set each path, for the message.

    Raises:
        CapabilityError: A requirement that no component meets; names both sides.
    """
    pairs = list(chosen)
    provided = frozenset[str]().union(*(item.component.provides for _, item in pairs))
    for path, item in pairs:
        missing = sorted(item.component.requires - provided)
        if missing:
            where = spot(path, item.name, (sources or {}).get(path, ""))
            raise CapabilityError(
                f'{where}: requires the capability "{missing[0]}", which {_other_side(missing[0], pairs)}.',
                hint=_who_could(missing[0], offers),
            )


def _other_side(capability: str, pairs: Iterable[tuple[str, RegisteredComponent]]) -> str:
    """Return, in words, that the component whose noun starts the capability's name does not provide it."""
    noun = capability.partition(".")[0]
    sides = [spot(path, item.name, "") for path, item in pairs if item.noun == noun and not path.endswith(".fallback")]
    return f"{sides[0]} does not provide" if sides else "no chosen component provides"


def _who_could(capability: str, offers: Iterable[RegisteredComponent]) -> str:
    able = [f'[{item.noun}] "{item.name}"' for item in offers if capability in item.component.provides]
    if not able:
        return "No installed component provides it; choose another component."
    return f"Change one of the two; it is provided by: {', '.join(able)}."
