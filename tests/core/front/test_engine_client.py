from __future__ import annotations

import pytest

from trencadis.front.engine_client import EngineClient


def test_a_client_that_lacks_a_method_fails_when_it_is_made() -> None:
    class Half(EngineClient):
        def close(self) -> None: ...

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]


def test_who_refuses_at_once_has_nothing_to_refuse_later() -> None:
    assert EngineClient.take_refused(object()) == []  # type: ignore[arg-type]
