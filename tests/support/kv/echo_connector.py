"""A KV connector that loads and holds nothing, and answers with the parameters that it was given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trencadis.interfaces import ConnectorPair
from trencadis_testing.doubles import LoopConnector

__all__ = ["EchoConnector"]


class EchoConnector(LoopConnector):
    """Says of each request that carries parameters which they were.

    Attributes:
        rejected: Parameters of requests that were not served.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rejected: list[Mapping[str, Any]] = []
        self.scheduler.finished_params = _echo  # type: ignore[method-assign]
        self.scheduler.on_rejected = self.rejected.append  # type: ignore[method-assign]

    def __call__(self) -> ConnectorPair:
        """Return the pair, as a factory does."""
        return self.pair()


def _echo(request: Any) -> dict[str, Any] | None:
    if request.transfer_params is None:
        return None
    return {"asked": request.transfer_params, "prompt": list(request.prompt_token_ids)}
