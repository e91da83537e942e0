"""API keys and the callers that they belong to.

A key is compared with the digests of all keys each time, so that the time of a refusal reveals nothing.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from trencadis.errors import ConfigValueError
from trencadis_server.errors import ApiError
from trencadis_server.middleware.drain_guard import DOCUMENT_PATHS, OPEN_PATHS
from trencadis_server.middleware.failures import refuse

__all__ = ["ApiKeys", "AuthMiddleware"]


class ApiKeys:
    """The configured keys, as digests.

    Args:
        entries: Entries, each ``key`` or ``name:key``.

    Raises:
        ConfigValueError: An entry has no key, or a key occurs twice.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._callers: dict[bytes, str] = {}
        for number, entry in enumerate(entries, start=1):
            name, colon, rest = entry.partition(":")
            key = (rest if colon else name).strip()
            if not key:
                raise ConfigValueError(
                    f"[server] api_keys: entry {number} has no key.", hint='Write "key" or "name:key".'
                )
            digest = _digest(key.encode())
            if digest in self._callers:
                raise ConfigValueError(f"[server] api_keys: entry {number} repeats an earlier key.", hint="Remove it.")
            self._callers[digest] = name.strip() if colon and name.strip() else f"key-{digest.hex()[:8]}"

    def __bool__(self) -> bool:
        """True if keys are required."""
        return bool(self._callers)

    @property
    def callers(self) -> frozenset[str]:
        """Names of all callers."""
        return frozenset(self._callers.values())

    def caller_of(self, key: bytes) -> str | None:
        """Return the caller's name for a key, or None. Takes the same time for every key. Pure."""
        given = _digest(key)
        found = None
        for digest, caller in self._callers.items():
            if hmac.compare_digest(digest, given):
                found = caller
        return found


class AuthMiddleware:
    """Answers 401 unless the request has a valid key; sets ``request.state.caller``.

    Args:
        app: The application that it wraps.
        keys: Valid keys; if there are none, every client may call.
    """

    def __init__(self, app: ASGIApp, *, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http" and self._keys and not _needs_no_key(scope["path"]):
            try:
                scope.setdefault("state", {})["caller"] = self._caller(Headers(scope=scope))
            except ApiError as error:
                await refuse(scope, receive, send, error)
                return
        await self._app(scope, receive, send)

    def _caller(self, headers: Headers) -> str:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key.strip(" \t")  # nothing else is a blank: read as Latin-1, the bytes of a letter may look like one
        if scheme.lower() != "bearer" or not key:
            raise _refusal("No API key was given. Send the header Authorization: Bearer KEY.")
        caller = self._keys.caller_of(key.encode("latin-1"))
        if caller is None:
            raise _refusal("The API key is not known to this server.")
        return caller


def _needs_no_key(path: str) -> bool:
    return path in OPEN_PATHS or path in DOCUMENT_PATHS or path.startswith("/docs/")


def _refusal(message: str) -> ApiError:
    return ApiError(401, message, param=None, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
