from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.core.lines import LineOpener
from support.core.replicas import Fleet
from trencadis.interfaces import Router
from trencadis_remote.replicas.guarded_router import LeastLive


@pytest.fixture
def fleet() -> Iterator[Callable[..., Fleet]]:
    opener, made = LineOpener(), []

    def make(
        count: int = 2,
        router: Router | None = None,
        parts: Callable[[], dict[str, Any]] = dict,
        limits: dict[str, Any] | None = None,
        **options: Any,
    ) -> Fleet:
        made.append(Fleet(opener, count, router or LeastLive(), parts, limits or {}, **options))
        return made[-1]

    yield make
    for one in made:
        for line in one.lines:
            if line is not None:
                line.peer.end()
        one.client.close()
        one.client.close()
    opener.close()
