"""HEAD: what GET would answer, without its body; asked by load balancers and monitors."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["HeadMiddleware"]


class HeadMiddleware:
    """Lets routes answer HEAD as they answer GET.

    Source: RFC 9110, section 9.1: every general-purpose server supports both.

    Args:
        app: What is behind; it sees GET.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        seen: Scope = {**scope, "method": "GET"}
        try:
            await self._app(seen, receive, send_head)
        finally:
            if "route" in seen:  # by which the request is counted
                scope["route"] = seen["route"]
