"""Requests accepted by an engine's role: prefill for other engines, decode, or both."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trencadis.engine.stage import EngineParts, Makings, Stage
from trencadis.errors import InvalidRequestError, WrongRoleError
from trencadis.records import Request

__all__ = ["ROLES", "EngineRole", "Unconnected"]

logger = logging.getLogger("trencadis.engine")

ROLES = ("both", "prefill", "decode")


class EngineRole:
    """The role of one engine. A change between two steps affects new requests only.

    Args:
        name: ``both``, ``prefill`` or ``decode``.
        tell: Tells the KV connector of the role; None: there is no connector.
        num_live: Returns the number of live requests.

    Attributes:
        name: The role in force.
        answers: Answers to the questions ``role`` and ``set_role``.
    """

    def __init__(self, name: str, tell: Callable[[str], None] | None, num_live: Callable[[], int]) -> None:
        self.name = name
        self._tell = tell
        self._num_live = num_live
        self.answers: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "role": lambda _: self._report(),
            "set_role": self._set,
        }
        if tell is not None:
            tell(name)

    def _report(self) -> dict[str, Any]:
        return {"role": self.name, "num_live": self._num_live()}

    def _set(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        previous = self.name
        self.change(str(arguments["role"]))
        return {**self._report(), "previous": previous}

    def change(self, name: str) -> None:
        """Change the role.

        Raises:
            InvalidRequestError: There is no such role, or nothing that hands KV over.
        """
        if name not in ROLES:
            raise InvalidRequestError(f"role = {name!r} is impossible: it must be one of {', '.join(ROLES)}.")
        if name != "both" and self._tell is None:
            raise InvalidRequestError(
                f"role = {name!r}: this engine has no KV connector, so that it can hand nothing over.",
                hint='Start it with kv_connector.name, such as "p2p".',
            )
        if name != self.name:
            logger.info("The engine's role is %s from now on; it was %s.", name, self.name)
        self.name = name
        if self._tell is not None:
            self._tell(name)

    def check(self, request: Request) -> None:
        """Raise unless the role accepts the request.

        Raises:
            WrongRoleError: This engine computes prompts for others only, and the request asks for a text.
        """
        params = request.transfer_params
        if self.name == "prefill" and (params is None or params.get("do_remote_decode") is not True):
            raise WrongRoleError(
                f"request {request.request_id!r} was refused: the role of this engine is prefill. It computes prompts for other engines, "
                "and the request does not ask for that.",
                hint="Send it to an engine of role decode or both, or with kv_transfer_params {do_remote_decode: true}.",
            )


_HANDOVERS = ("do_remote_decode", "do_remote_prefill")
"""Transfer parameters by which a request asks for what only a KV connector can do."""


class Unconnected(Stage):
    """Stands in an engine without a KV connector: its role is ``both``, and requests that want KV handed over are served without."""

    def __init__(self, makings: Makings) -> None:
        self._warned: set[str] = set()

    def bind(self, engine: EngineParts) -> None:
        """Answer for the role."""
        role = EngineRole("both", None, lambda: len(engine.state.slot_of))
        self.answers = {"reject_transfer": lambda _: {}, **role.answers}  # nothing is held for a request

    def accept(self, request: Request) -> Request:
        """Say, once for each name, that nothing here hands KV over."""
        params = request.transfer_params
        for name in _HANDOVERS if params else ():
            if params is not None and params.get(name) is True and name not in self._warned:
                self._warned.add(name)
                logger.warning(
                    "Requests come with kv_transfer_params %s, which has no effect: this engine has no KV connector. "
                    'Start it with kv_connector.name, such as "p2p". Said once.',
                    name,
                )
        return request
