"""A connector over a dictionary that brings requests of its own, as a test says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trencadis.interfaces import SupportsRemotePrefill
from trencadis.records import FirstToken, Request
from trencadis_testing.doubles import LoopConnector

__all__ = ["Host"]


class Host(LoopConnector):
    """Brings requests, and remembers their ends."""

    def __init__(self) -> None:
        super().__init__()
        self._new: list[Request] = []
        self._withdrawn: list[str] = []
        self.ends: list[tuple[str, bool, str]] = []
        self.wakers: list[Any] = []
        self.backlogs: list[int] = []
        self.firsts: list[tuple[str, FirstToken]] = []
        self.order: list[str] = []
        side = self.scheduler
        host = self

        class Side(type(side), SupportsRemotePrefill):  # type: ignore[misc]
            def take_requests(self) -> list[Request]:
                new, host._new = host._new, []
                return new

            def take_withdrawn(self) -> list[str]:
                withdrawn, host._withdrawn = host._withdrawn, []
                return withdrawn

            def on_request_ended(
                self, request_id: str, *, transfer_params: Mapping[str, Any] | None, error: str
            ) -> None:
                host.order.append(f"end of {request_id}")
                host.ends.append((request_id, transfer_params is not None, error))

            def on_request_token(self, request_id: str, first: FirstToken) -> None:
                host.order.append(f"token of {request_id}")
                host.firsts.append((request_id, first))

            def finished_params(self, request: Request) -> Mapping[str, Any] | None:
                return {"of": request.request_id}

            def on_waker(self, wake: Any) -> None:
                host.wakers.append(wake)

            def on_backlog(self, num_tokens: int) -> None:
                host.backlogs.append(num_tokens)

        side.__class__ = Side

    @property
    def new(self) -> list[Request]:
        """Requests that the engine is to run; when they are set, it is woken."""
        return self._new

    @new.setter
    def new(self, requests: list[Request]) -> None:
        self._new = requests
        self._wake()

    @property
    def withdrawn(self) -> list[str]:
        """Ids of those that are no longer wanted; when they are set, it is woken."""
        return self._withdrawn

    @withdrawn.setter
    def withdrawn(self, request_ids: list[str]) -> None:
        self._withdrawn = request_ids
        self._wake()

    def _wake(self) -> None:
        for wake in self.wakers:
            wake()
