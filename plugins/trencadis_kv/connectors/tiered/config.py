"""Config table of the connector over several others."""

from __future__ import annotations

import attrs
from attrs.validators import and_, deep_iterable, ge, gt, instance_of, le, min_len

from trencadis.interfaces import setting

__all__ = ["TieredConfig"]


def _all_differ(_: object, __: attrs.Attribute[tuple[str, ...]], names: tuple[str, ...]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"children must differ, {', '.join(twice)} is named twice")


@attrs.frozen(kw_only=True)
class TieredConfig:
    """Table ``[kv_connector.tiered]``: the children, and how they are guarded. Each child also has its own table."""

    children: tuple[str, ...] = setting(
        ("host_offload", "filesystem"),
        "Connectors to ask and to save to, the quickest first.",
        validator=and_(min_len(1), deep_iterable(instance_of(str)), _all_differ),
        component="kv_connector",
    )
    promote: bool = setting(True, "Offer what was loaded from one child to those before it.")
    lookup_timeout_s: float = setting(
        0.5,
        "A child that has not answered a look-up by then is left out of it.",
        unit="s",
        validator=and_(gt(0), le(60)),
    )
    release_timeout_s: float = setting(
        45.0,
        "A child that holds blocks for longer, after a load was given up or a sequence has ended, is closed; best less than "
        "cache.release_timeout_s, which closes all.",
        unit="s",
        validator=gt(0),
    )
    failure_limit: int = setting(
        5, "After so many failures a child is left alone for a while.", unit="failures", validator=ge(1)
    )
    failure_window_s: float = setting(30.0, "The failures must fall into a time this long.", unit="s", validator=gt(0))
    cooldown_s: float = setting(
        5.0, "A child that is left alone is asked again after so long.", unit="s", validator=gt(0)
    )
