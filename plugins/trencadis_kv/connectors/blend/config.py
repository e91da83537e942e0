"""Config table of the connector that blends chunks."""

from __future__ import annotations

import attrs
from attrs.validators import and_, ge, gt, in_, le

from trencadis.interfaces import setting

__all__ = ["BlendConfig"]


@attrs.frozen(kw_only=True)
class BlendConfig:
    """Table ``[kv_connector.blend]``: which chunks of prompts are kept, and how they are assembled for requests that opt in."""

    capacity_bytes: int = setting(4 << 30, "Host memory for chunks.", unit="bytes", validator=ge(1))
    eviction: str = setting(
        "lru", "Which chunks go first when it is full: a component of the noun eviction.", component="eviction"
    )
    saves: str = setting(
        "all",
        "Whose chunks are kept: ``all`` prompts', or those of requests that ask for blending: ``asked``.",
        validator=in_(("all", "asked")),
    )
    separator: str = setting(
        "",
        "Text at which prompts are cut, best one that is tokens of its own; empty: every chunk_tokens tokens.",
    )
    chunk_tokens: int = setting(256, "Longest chunk.", unit="tokens", validator=and_(ge(16), le(8192)))
    min_chunk_tokens: int = setting(
        64, "Shorter ones are neither kept nor found; at most chunk_tokens.", unit="tokens", validator=ge(8)
    )
    ratio: float = setting(
        0.15,
        "Share of the chunks' tokens that is computed anew, unless the request says another; 1 computes all, exactly.",
        validator=and_(ge(0), le(1)),
    )
    num_first_tokens: int = setting(
        4, "Of each chunk, so many first tokens are always computed anew.", unit="tokens", validator=ge(0)
    )
    min_found_ratio: float = setting(
        0.5,
        "A prompt of which chunks cover less than this, after its exact prefix, is computed.",
        validator=and_(ge(0), le(1)),
    )
    load_timeout_s: float = setting(
        10.0,
        "A prompt that is not put together by then is computed.",
        unit="s",
        validator=and_(gt(0), le(600)),
    )
    step_budget_s: float = setting(
        0.02,
        "Blending holds up a step of other requests for about so long, and goes on in the next; at least for one layer.",
        unit="s",
        validator=gt(0),
    )
    staging_bytes: int = setting(
        256 << 20, "Host memory for chunks that are not complete yet.", unit="bytes", validator=ge(1)
    )
    close_timeout_s: float = setting(
        2.0, "The longest that threads are waited for at the end.", unit="s", validator=and_(ge(0), le(60))
    )

    @min_chunk_tokens.validator
    def _fits(self, _: object, value: int) -> None:
        if value > self.chunk_tokens:
            raise ValueError(f"min_chunk_tokens = {value} is above chunk_tokens = {self.chunk_tokens}")
