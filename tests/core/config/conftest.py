from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
from attrs.validators import ge, in_


class Shape(enum.Enum):
    SQUARE = "square"
    ROUND = "round"


@attrs.frozen(kw_only=True)
class Inner:
    depth: int = 1


@attrs.frozen(kw_only=True)
class TilesConfig:
    """Table ``[bucketing.tiles]``: how tiles are cut."""

    limit: int = attrs.field(default=0, validator=ge(0), metadata={"help": "Most tiles.", "unit": "tiles"})
    ratio: float = 0.5
    shape: Shape = Shape.SQUARE
    mode: Literal["fast", "slow"] = "fast"
    colours: tuple[str, ...] = ("blue", "white")
    file: Path | None = None
    weights: Mapping[str, float] = attrs.field(factory=dict)
    inner: Inner = attrs.field(factory=Inner)


@attrs.frozen(kw_only=True)
class StoreConfig:
    """Table ``[kv_connector.store]``: where blocks go."""

    url: str = attrs.field(metadata={"help": "Where.", "secret": True})
    tries: int = attrs.field(default=3, metadata={"aliases": "OTHER_TRIES"})
    policy: str = attrs.field(default="lazy", validator=in_(["lazy", "eager"]))

    @tries.validator
    def _check_tries(self, _: object, tries: int) -> None:
        if tries > 3 and self.policy == "lazy":
            raise ValueError("more than 3 tries need policy eager")


@pytest.fixture
def components() -> dict[str, dict[str, type[Any]]]:
    """Config classes as a registry hands them over."""
    return {"bucketing": {"tiles": TilesConfig}, "kv_connector": {"store": StoreConfig}}
