from __future__ import annotations

import pytest

from trencadis.client.engine_client import EngineClient


def test_a_client_that_lacks_a_method_fails_when_it_is_made() -> None:
    class Half(EngineClient):
        def close(self) -> None: ...

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]
