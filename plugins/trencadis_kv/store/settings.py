"""Settings common to all connectors over a store."""

from __future__ import annotations

import attrs
from attrs.validators import and_, deep_iterable, ge, gt, in_, instance_of, le

from trencadis.interfaces import setting
from trencadis_kv.store.identity import is_namespace

__all__ = ["SharedStoreSettings", "StoreSettings"]


def _is_namespace(_: object, attribute: attrs.Attribute[str], name: str) -> None:
    if not is_namespace(name):
        raise ValueError(f"{attribute.name} must be 1 to 64 of A-Za-z0-9._- with no dot in front, got {name!r}")


@attrs.frozen(kw_only=True)
class StoreSettings:
    """Settings of a connector over a store; the config class of a connector inherits from it."""

    namespace: str = setting(
        "default",
        "Whose objects these are: engines share blocks within a namespace. Letters, digits and ``._-``.",
        validator=_is_namespace,
    )
    numerics: str = setting(
        "exact",
        "``exact``: share with engines on the same kind of device only, whose low bits agree; ``any``: with all.",
        validator=in_(("exact", "any")),
    )
    required: bool = setting(False, "Refuse to start if the store cannot be used; else serving goes on without it.")
    loads: bool = setting(True, "Load what the store has.")
    saves: bool = setting(True, "Save what is computed here.")
    layerwise_saves: bool = setting(
        False,
        "Copy blocks out while the next step is computed, each layer before it is written, not before the step begins. "
        "Needs a backend whose steps wait, which ``torch`` is; with others, and as a tier, it has no effect.",
    )
    lookup_timeout_s: float = setting(
        0.25, "A look-up that takes longer is a miss.", unit="s", validator=and_(gt(0), le(60))
    )
    load_timeout_s: float = setting(
        10.0, "A load that takes longer is given up; its tokens are computed.", unit="s", validator=and_(gt(0), le(600))
    )
    start_timeout_s: float = setting(
        5.0, "The longest that the store is tried at start-up.", unit="s", validator=and_(gt(0), le(600))
    )
    close_timeout_s: float = setting(
        2.0,
        "The longest that blocks not saved yet are still written at the end.",
        unit="s",
        validator=and_(ge(0), le(60)),
    )
    num_load_threads: int = setting(2, "Loads that run side by side.", unit="threads", validator=and_(ge(1), le(64)))
    load_share: float = setting(
        0.025,
        "The part of the time that a load works while the engine computes, so that no request waits longer for a token; it rests for the "
        "others, but never beyond three quarters of the time that computing would take. 1: it does not rest, nor "
        "does it where steps are computed on a device.",
        unit="ratio",
        validator=and_(gt(0), le(1)),
    )
    num_save_threads: int = setting(1, "Writers side by side.", unit="threads", validator=and_(ge(1), le(64)))
    staging_bytes: int = setting(
        256 << 20,
        "Host memory for blocks that wait to be saved; when it is full, the oldest are dropped.",
        unit="bytes",
        validator=ge(1),
    )
    max_load_bytes_per_step: int = setting(
        32 << 20,
        "Most loaded bytes that a step copies to a device that only its own thread may write to.",
        unit="bytes",
        validator=ge(1),
    )
    failure_limit: int = setting(
        5, "After so many failures the store is left alone for a while.", unit="failures", validator=ge(1)
    )
    failure_window_s: float = setting(30.0, "The failures must fall into a time this long.", unit="s", validator=gt(0))
    cooldown_s: float = setting(
        5.0,
        "A store that is left alone is tried again after so long, with one small object.",
        unit="s",
        validator=gt(0),
    )


@attrs.frozen(kw_only=True)
class SharedStoreSettings(StoreSettings):
    """Settings of a connector over a store that all ranks of an engine reach, and those of other engines."""

    head_groups: int = setting(
        0,
        "Objects hold one of so many equal ranges of KV heads, at most one range a head, so that engines whose ``[parallel] tensor`` "
        "differs share blocks: set it alike on all, to the largest of their tensors, and they share although ranks sum in another order, "
        "on which low bits depend. 0: as this engine's ranks hold them, shared with engines of the same tensor only.",
        unit="ranges",
        validator=ge(0),
    )
    layer_starts: tuple[int, ...] = setting(
        (),
        "Layers at which another object begins, so that engines whose ``[parallel] pipeline`` differs share blocks: set it alike on all, "
        "to where the stages of all begin; an engine that is given others says where its own do. Empty: as this engine's stages hold them.",
        validator=deep_iterable(and_(instance_of(int), ge(0))),
    )
