"""Bounds of a flight record: a received file may say anything, so that it is checked before anything is allocated for it.

They are checked while a file is decoded; ``flight_record.py`` then checks what lies between values.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

__all__: list[str] = []  # for flight_record.py alone

MAX_BYTES = 128 * 2**20
"""Largest record, decompressed."""

MAX_CHANGE_BYTES = 2**16
"""Largest table of a change."""

Number = Annotated[int, Meta(ge=-(2**31), le=2**31)]
Count = Annotated[int, Meta(ge=0, le=2**31)]
Size = Annotated[int, Meta(ge=1, le=2**31)]
Seconds = Annotated[float, Meta(ge=-1e12, le=1e12)]
Ratio = Annotated[float, Meta(gt=0, le=1e12)]
Target = Annotated[float, Meta(ge=0)]
Text = Annotated[str, Meta(max_length=2**16)]
Bytes = Annotated[bytes, Meta(max_length=2**22)]
Numbers = Annotated[tuple[int, ...], Meta(max_length=2**16)]
