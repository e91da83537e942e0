"""Runs a batch: as many lines at once as the engine takes, each answered or refused by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import attrs
import msgspec
from starlette.types import ASGIApp, Message

from trencadis.console import Advance
from trencadis.errors import EngineEndedError
from trencadis_server.batch.files import DUPLICATE, Done
from trencadis_server.batch.lines import BadLineError, OutputLine, line_id, read_line

__all__ = ["Answer", "BatchRunner", "Summary", "post"]

_BUSY = frozenset({429, 503})
_ENDED = frozenset({"engine_failed", "engine_closed"})
_MAX_RETRIES = 1000


@attrs.frozen(kw_only=True)
class Answer:
    """Response of the application.

    Attributes:
        status: HTTP status.
        headers: Headers by lower-case name.
        body: Whole body.
    """

    status: int
    headers: dict[str, str]
    body: bytes


async def post(app: ASGIApp, path: str, body: bytes) -> Answer:
    """Send a JSON body to an ASGI application in this process, without a socket, and return the whole response.

    Raises:
        BaseException: Any exception that the application raises instead of answering.
    """
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    outgoing: list[Message] = []
    never = asyncio.Event()

    async def receive() -> Message:
        if not incoming:
            await never.wait()  # the client stays connected; the call ends when the application returns
        return incoming.pop()

    async def send(message: Message) -> None:
        outgoing.append(message)

    await app(_scope(path, body), receive, send)
    start = outgoing[0]
    return Answer(
        status=start["status"],
        headers={name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start.get("headers", [])},
        body=b"".join(message.get("body", b"") for message in outgoing[1:]),
    )


def _scope(path: str, body: bytes) -> dict[str, object]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": ("localhost", 80),
        "state": {},
    }


@attrs.define(kw_only=True)
class Summary:
    """Counts of a run.

    Attributes:
        num_ok: Lines that were answered.
        num_failed: Lines that were refused, or answered with an error.
        num_skipped: Lines that an earlier run has done.
    """

    num_ok: int = 0
    num_failed: int = 0
    num_skipped: int = 0


class BatchRunner:
    """One run over one input.

    Args:
        app: The server's application.
        lines: Numbers and texts of the input's lines.
        done: Lines that an earlier run has answered.
        write: Called with each output line.
        num_workers: Number of lines at once, which is also how far the input is read ahead.
        advance: Called with the number of lines that are done.
        sleep: Waits for a number of seconds when the server is busy.
    """

    def __init__(
        self,
        app: ASGIApp,
        lines: Iterator[tuple[int, bytes]],
        *,
        done: Done,
        write: Callable[[OutputLine], None],
        num_workers: int,
        advance: Advance,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._app = app
        self._lines = lines
        self._done = done
        self._write = write
        self._num_workers = num_workers
        self._advance = advance
        self._sleep = sleep
        self._numbers: dict[str, int] = {}
        self._summary = Summary()

    async def run(self) -> Summary:
        """Run every line; returns the summary.

        Raises:
            EngineEndedError: The engine has ended; written lines stay, and another run continues after them.
        """
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self._num_workers):
                    workers.create_task(self._work())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from group
        return self._summary

    async def _work(self) -> None:
        summary = self._summary
        for number, text in self._lines:
            output = await self._run_line(number, text)
            if output is None:
                summary.num_skipped += 1
            else:
                self._write(output)
                summary.num_ok += output.is_ok
                summary.num_failed += not output.is_ok
            self._advance(summary.num_ok + summary.num_failed + summary.num_skipped)

    async def _run_line(self, number: int, text: bytes) -> OutputLine | None:
        """Return the output of a line; None: it was answered by an earlier run."""
        id_ = line_id(text, number)
        if id_ in self._done.ids:
            self._claim(text, number)
            return None
        try:
            line = read_line(text, number)
            self._claim_name(line.custom_id, number)
        except BadLineError as error:
            return OutputLine.refused(id_, error)
        if line.custom_id in self._done.custom_ids:
            return None
        answer = await self._ask(line.url, bytes(line.body))
        request_id = answer.headers.get("x-request-id", "")
        return OutputLine.answered(
            id_, line.custom_id, status=answer.status, request_id=request_id, body=_one_line(answer.body)
        )

    async def _ask(self, url: str, body: bytes) -> Answer:
        """Repeat a request until the server is not too busy to answer."""
        answer = await post(self._app, url, body)
        for _ in range(_MAX_RETRIES):
            if answer.status not in _BUSY:
                break
            error = _error(answer)
            if error.get("code") in _ENDED:
                message = str(error.get("message"))
                raise EngineEndedError(message, hint="Run the same command again to go on from here.")
            if "retry-after" not in answer.headers:
                break
            await self._sleep(float(answer.headers["retry-after"]))
            answer = await post(self._app, url, body)
        return answer

    def _claim(self, text: bytes, number: int) -> None:
        """Reserve the ``custom_id`` of an answered line, to detect duplicates."""
        try:
            self._numbers.setdefault(read_line(text, number).custom_id, number)
        except BadLineError:
            return

    def _claim_name(self, custom_id: str, number: int) -> None:
        first = self._numbers.setdefault(custom_id, number)
        if first != number:
            message = f"line {number}: custom_id {custom_id!r} is that of line {first}; each line needs its own."
            raise BadLineError(DUPLICATE, message, custom_id)


def _one_line(body: bytes) -> bytes:
    """Return JSON without line breaks. Pure."""
    return msgspec.json.format(body, indent=-1)


def _error(answer: Answer) -> dict[str, Any]:
    """Return the error message of an answer. Pure."""
    found: dict[str, Any] = msgspec.json.decode(answer.body, type=dict[str, Any])["error"]
    return found
