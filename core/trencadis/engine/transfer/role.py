"""Requests accepted by an engine's role: prefill for other engines, decode, or both."""

from __future__ import annotations

import logging

from trencadis.engine.transfer.transfers import Transfers
from trencadis.errors import InvalidRequestError, WrongRoleError
from trencadis.records import Request

__all__ = ["ROLES", "EngineRole"]

logger = logging.getLogger("trencadis.engine")

ROLES = ("both", "prefill", "decode")


class EngineRole:
    """The role of one engine. A change between two steps affects new requests only.

    Args:
        name: ``both``, ``prefill`` or ``decode``.
        transfers: Whose connector is told.

    Attributes:
        name: The role in force.
    """

    def __init__(self, name: str, transfers: Transfers) -> None:
        self.name = name
        self._transfers = transfers
        transfers.role(name)

    def change(self, name: str) -> None:
        """Change the role.

        Raises:
            InvalidRequestError: There is no such role, or nothing that hands KV over.
        """
        if name not in ROLES:
            raise InvalidRequestError(f"role = {name!r} is impossible: it must be one of {', '.join(ROLES)}.")
        if name != "both" and not self._transfers.has_connector:
            raise InvalidRequestError(
                f"role = {name!r}: this engine has no KV connector, so that it can hand nothing over.",
                hint='Start it with kv_connector.name, such as "p2p".',
            )
        if name != self.name:
            logger.info("The engine's role is %s from now on; it was %s.", name, self.name)
        self.name = name
        self._transfers.role(name)

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
