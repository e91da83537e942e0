"""Clients of a server under attack: those who attack, and those who must not notice.

attackers ▶ bad requests and raw bytes, so many at once      witnesses ▶ streams, controls and a probe, in a process of their own
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any

from bad_requests import JSON, BadRequests, Case, dump
from processes import set_priority
from raw_http import MUST_ANSWER, RAW_CASES, RawResult, run_raw

__all__ = ["Answer", "Attack", "Attempt", "GoodRequests", "Witness", "post", "send", "witness_main"]

PATIENCE_S = 30.0
_NUM_WORST = 200
_LEAST_LAG_S = 0.005
_SAME_S = 0.005
_WITNESS_NICENESS = -10
_MOST_BYTES = 64 * 2**20
_MOST_OPENING_S = 3.0
"""Until a request's head is sent on a new connection; the server waits four seconds for it."""


@dataclass
class Answer:
    """How a request ended.

    Attributes:
        outcome: The status; ``error in stream``: 200 and an error event of the server's fault; ``closed``: no answer; ``late``:
            the same, and the client's own process was kept from sending in time; ``left``: the client's patience ended.
        status: 0 without an answer.
        body: Of the answer, at most a megabyte.
        seconds: From the first byte sent to the last received.
        has_retry_after: It says when to try again.
    """

    outcome: str
    status: int = 0
    body: bytes = b""
    seconds: float = 0.0
    has_retry_after: bool = False

    @property
    def is_server_fault(self) -> bool:
        """Whether it is the server that failed."""
        return self.status >= 500 or self.outcome in {"closed", "error in stream", "no openai error"}

    @property
    def error(self) -> dict[str, Any]:
        """The error in OpenAI's shape, empty if it is none."""
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
            found = json.loads(self.body)["error"]
            return found if isinstance(found, dict) else {}
        return {}


async def send(port: int, case: Case, *, patience_s: float = PATIENCE_S, opening: asyncio.Lock | None = None) -> Answer:
    """Send one request on a connection of its own and wait for all of its answer; ``opening`` is held until the head can be sent."""
    begin_s = time.monotonic()
    try:
        async with opening or asyncio.Lock():
            opened_s = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    except OSError:
        return Answer("closed")
    data = bytearray()
    try:
        writer.write(_head(case))
        is_late = time.monotonic() - opened_s > _MOST_OPENING_S
        async with asyncio.timeout(patience_s):
            feeding = asyncio.ensure_future(_feed(writer, case.body))
            with contextlib.suppress(OSError):
                while part := await reader.read(2**18):
                    if len(data) < _MOST_BYTES:
                        data += part
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        answer = _read(bytes(data))
        if is_late and answer.outcome == "closed":
            answer.outcome = "late"  # this process was kept from sending: the server may close such a connection
    except TimeoutError:
        answer = Answer("left")
    finally:
        writer.transport.abort()
    answer.seconds = time.monotonic() - begin_s
    return answer


def _head(case: Case) -> bytes:
    headers = {"host": "127.0.0.1", "content-length": str(len(case.body)), "connection": "close", **case.headers}
    lines = [f"{case.method} {case.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin1", "replace")


async def _feed(writer: asyncio.StreamWriter, body: bytes) -> None:
    with contextlib.suppress(OSError):
        for start in range(0, len(body), 2**18):
            writer.write(body[start : start + 2**18])
            await writer.drain()


def _read(data: bytes) -> Answer:
    """Return an answer from its bytes. Pure."""
    while data.startswith(b"HTTP/1.1 100"):
        data = data.partition(b"\r\n\r\n")[2]
    head, _, body = data.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1."):
        return Answer("closed")
    status = int(head[9:12])
    if b"transfer-encoding: chunked" in head.lower():
        body = _joined(body)
    answer = Answer(str(status), status, body[: 2**20], has_retry_after=b"\r\nretry-after:" in head.lower())
    if status == 200 and b'data: {"error"' in body:
        event = body[body.index(b'data: {"error"') + 6 :].split(b"\n\n")[0]
        with contextlib.suppress(ValueError):
            is_ours = json.loads(event)["error"]["type"] not in {"invalid_request_error", "rate_limit_error"}
            answer.outcome = "error in stream" if is_ours else "refused in stream"
        answer.body = event
    elif status >= 400 and b"content-length: 0" not in head.lower() and body and not answer.error:
        answer.outcome = "no openai error"
    return answer


def _joined(body: bytes) -> bytes:
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        with contextlib.suppress(ValueError):
            length = int(size.split(b";")[0], 16)
            parts.append(rest[:length])
            body = rest[length + 2 :]
            continue
        break
    return b"".join(parts)


async def post(port: int, path: str, body: Any, *, patience_s: float = PATIENCE_S) -> Answer:
    """Send JSON."""
    return await send(port, Case(path, "POST", path, JSON, dump(body)), patience_s=patience_s)


# The attack -------------------------------------------------------------------------------------------------------------


@dataclass
class Attempt:
    """One bad request as it went: what, when on the wall clock, and how it ended."""

    name: str
    begin_s: float
    end_s: float
    answer: Answer


class GoodRequests:
    """Requests with nothing wrong, for the same competition for cores as an attack: prompts of up to 300 tokens, some with a structure.

    Args:
        seed: Of the series.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def case(self, index: int) -> Case:
        """Return a case of the series. Pure."""
        rng = random.Random(f"{self.seed}:{index}:good")
        prompt = [rng.randrange(10, 4000) for _ in range(rng.choice((4, 20, 80, 300)))]
        body: dict[str, Any] = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": rng.choice((1, 8, 32, 64)),
            "temperature": rng.choice((0, 1)),
            "seed": index,
            "n": rng.choice((1, 1, 1, 4)),
            "stream": rng.random() < 0.5,
        }
        if rng.random() < 0.15:
            body["guided_regex"] = "[a-z]{3,8}( [a-z]{3,8}){1,4}"
        return Case(f"{self.seed}:{index} good", "POST", "/v1/completions", JSON, dump(body))


@dataclass
class Attack:
    """Bad requests of a seed, several at once, until the time or the series ends.

    Args:
        generator: Makes the requests.
        port: Of the server.
        admin_port: Of its administration; 0: it has none, and such cases are left out.
        at_once: Attackers.
        raw_share: Share of raw HTTP cases.
        cancel_share: Share of requests that the client leaves at a random moment.

    Attributes:
        outcomes: How many ended in which way.
        attempts: All, but for bodies of harmless answers.
        is_excused: Whether something else than the attack was the cause.
    """

    generator: BadRequests | GoodRequests
    port: int
    admin_port: int = 0
    at_once: int = 8
    raw_share: float = 0.1
    cancel_share: float = 0.05
    outcomes: Counter[str] = field(default_factory=Counter)
    raw_outcomes: Counter[str] = field(default_factory=Counter)
    attempts: list[Attempt] = field(default_factory=list)
    next_index: int = 0
    is_excused: Callable[[Attempt], bool] = lambda _: False
    # To make a case may take seconds of this thread, and a connection that is open says something at once.
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, *, num_cases: int = 0, seconds: float = 0.0) -> None:
        """Attack until so many cases are through, or for so long."""
        end_s = time.monotonic() + seconds if seconds else float("inf")
        last = self.next_index + num_cases if num_cases else float("inf")

        async def attacker() -> None:
            while time.monotonic() < end_s and self.next_index < last:
                index, self.next_index = self.next_index, self.next_index + 1
                await self.attempt(index)

        await asyncio.gather(*(attacker() for _ in range(self.at_once)))

    async def attempt(self, index: int, *, patience_s: float = PATIENCE_S) -> Attempt | None:
        """Play the case with this index; None: it was left out."""
        rng = random.Random(f"{self.generator.seed}:{index}:how")
        begin_s = time.time()
        if rng.random() < self.raw_share:
            name = rng.choice(RAW_CASES)
            try:
                result = await run_raw(self.port, name, rng, self.opening)
            except OSError:
                result = RawResult("refused connection", 0)
            is_missed = name in MUST_ANSWER and result.outcome != "200"
            answer = Answer(
                f"raw {result.outcome}" + (" missed" if is_missed else ""),
                _status(result.outcome),
                has_retry_after=result.has_retry_after,
            )
            name = f"{self.generator.seed}:{index} raw {name}"
            self.raw_outcomes[answer.outcome] += 1
        else:
            async with self.opening:
                case = self.generator.case(index)
            if case.is_admin and not self.admin_port:
                return None
            cancels = rng.random() < self.cancel_share
            patience_s = rng.choice((0.0, 0.01, 0.1, 1.0)) if cancels else patience_s
            port = self.admin_port if case.is_admin else self.port
            answer = await send(port, case, patience_s=patience_s, opening=self.opening)
            name = case.name
            self.outcomes["cancelled" if cancels and answer.outcome == "left" else answer.outcome] += 1
            if cancels and answer.outcome == "left":
                answer.outcome = "cancelled"
            elif case.must_refuse and answer.status == 200:
                answer.outcome = "accepted"
        attempt = Attempt(name, begin_s, time.time(), answer)
        if not answer.is_server_fault:
            answer.body = answer.body[:300]
        self.attempts.append(attempt)
        return attempt

    def faults(self) -> list[Attempt]:
        """Return the attempts in which the server failed, without those that are excused."""
        failed = (one for one in self.attempts if one.answer.is_server_fault or one.answer.outcome.endswith("missed"))
        return [one for one in failed if not self.is_excused(one)]

    def unanswered(self) -> list[Attempt]:
        """Return the attempts that the attacker gave up."""
        return [one for one in self.attempts if one.answer.outcome in {"left", "raw open"}]

    def during(self, moment_s: float, *, before_s: float = 0.0) -> list[str]:
        """Return the names of the attempts that were on at a moment of the wall clock, or shortly before."""
        return [one.name for one in self.attempts if one.begin_s <= moment_s and one.end_s >= moment_s - before_s]


def _status(outcome: str) -> int:
    return int(outcome) if outcome.isdecimal() else 0


# The witnesses ----------------------------------------------------------------------------------------------------------

STREAMS: tuple[Any, ...] = tuple(
    {"model": "demo", "prompt": prompt, "max_tokens": 150, "temperature": 0, "ignore_eos": True, "stream": True}
    for prompt in ("The ship sails", "Once upon a time", "In the morning", "A captain")
)

CONTROLS: tuple[tuple[str, Any], ...] = (
    ("/v1/completions", {"prompt": "The sea is", "max_tokens": 24, "temperature": 0}),
    ("/v1/completions", {"prompt": [5, 6, 7, 8], "max_tokens": 24, "temperature": 1, "seed": 7, "ignore_eos": True}),
    ("/v1/completions", {"prompt": "Wind and", "max_tokens": 16, "temperature": 0.8, "seed": 3, "top_p": 0.9, "n": 2}),
    ("/v1/completions", {"prompt": "The mate", "max_tokens": 12, "guided_regex": "[a-z]{3,8}", "temperature": 0}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Who sails?"}], "max_tokens": 16, "temperature": 0},
    ),
    ("/tokenize", {"prompt": "The ship sails at seven."}),
    ("/v1/embeddings", {"input": "The ship"}),
)


TOLD = "told: "
"""Before a text that is an error which the client can act on: an error event, or a status with ``Retry-After``."""


def text_of(path: str, answer: Answer) -> str:
    """Return the part of an answer that must not change."""
    if answer.status != 200:
        told = TOLD if answer.status == 503 and answer.has_retry_after else ""
        return f"{told}{answer.outcome} {answer.error.get('code')}"
    found = json.loads(answer.body)
    if "embeddings" in path:
        # Matrix products of other sizes round otherwise.
        return json.dumps([round(one, 3) for one in found["data"][0]["embedding"][:16]])
    if "tokenize" in path:
        return json.dumps(found["tokens"])
    return json.dumps([choice.get("text") or choice["message"]["content"] for choice in found["choices"]])


@dataclass
class Witness:
    """What the well-behaved clients saw.

    Attributes:
        gaps_s: Time between two events of one stream, seconds.
        worst: The largest gaps with their moments on the wall clock: ``(seconds, moment, kind)``; kinds are ``stream`` and ``probe``.
        pings_s: Time of the probe's requests, seconds.
        lags: By how much this process itself was late, where that was over 5 ms: ``(seconds, moment)``; the machine's noise.
        num_texts: Streams and controls that were compared.
        wrong: What differed from the undisturbed text.
        told: Requests that were told that the engine is absent or has ended: ``(begin, end, text)``, moments on the wall clock.
    """

    gaps_s: list[float] = field(default_factory=list)
    worst: list[tuple[float, float, str]] = field(default_factory=list)
    pings_s: list[float] = field(default_factory=list)
    lags: list[tuple[float, float]] = field(default_factory=list)
    num_texts: int = 0
    wrong: list[str] = field(default_factory=list)
    told: list[tuple[float, float, str]] = field(default_factory=list)

    def note(self, seconds: float, kind: str) -> None:
        """Note a gap that has just ended."""
        (self.gaps_s if kind == "stream" else self.pings_s).append(seconds)
        if len(self.worst) < _NUM_WORST or seconds > self.worst[-1][0]:
            self.worst = sorted([*self.worst, (seconds, time.time(), kind)], reverse=True)[:_NUM_WORST]

    def faults(self, is_excused: Callable[[float, float], bool] = lambda *_: False) -> list[str]:
        """Return what must not have been.

        Args:
            is_excused: Whether the engine was absent for a reason between two moments of the wall clock.
        """
        return [*self.wrong, *(text for begin_s, end_s, text in self.told if not is_excused(begin_s, end_s))]

    def own_lag_s(self) -> float:
        """Return by how much this process itself was late at most."""
        return max((lag_s for lag_s, _ in self.lags), default=0.0)

    def largest_s(self, kind: str) -> float:
        """Return the largest gap of a kind, without what this process itself was late in it."""
        return max((self._beyond_lag(*one) for one in self.worst if one[2] == kind), default=0.0)

    def _beyond_lag(self, seconds: float, moment_s: float, _: str) -> float:
        # A lag is noted in the same turn of the loop as the gap that it made longer.
        within = (
            lag_s for lag_s, end_s in self.lags if end_s > moment_s - seconds and end_s - lag_s < moment_s + _SAME_S
        )
        return max(seconds - max(within, default=0.0), 0.0)

    def median_gap_s(self) -> float:
        """Return the median time between two events of a stream."""
        return statistics.median(self.gaps_s) if self.gaps_s else 0.0


class _Watch:
    """The well-behaved clients, for as long as they are to run."""

    def __init__(self, port: int, texts: dict[str, str]) -> None:
        self.port = port
        self.texts = texts
        self.saw = Witness()
        self.is_over = False

    async def run(self, seconds: float | None, pipe: Pipe) -> None:
        end_s = time.monotonic() + seconds if seconds else None
        tasks = [asyncio.ensure_future(self._stream(one)) for one in range(len(STREAMS))]
        tasks += [asyncio.ensure_future(one) for one in (self._control(), self._probe(), self._own_lag())]
        while not pipe.poll() and (end_s is None or time.monotonic() < end_s):
            await asyncio.sleep(0.05)
            for task in tasks:
                if task.done() and not self.is_over:
                    task.result()
        self.is_over = True
        await asyncio.gather(*tasks)

    def _compare(self, key: str, text: str, begin_s: float) -> None:
        self.saw.num_texts += 1
        if text.startswith(TOLD):
            self.saw.told.append((begin_s, time.time(), f"{key}: {text[:200]}"))
        elif self.texts.setdefault(key, text) != text:
            self.saw.wrong.append(f"{key}: {text[:100]!r} instead of {self.texts[key][:60]!r}")

    async def _stream(self, index: int) -> None:
        while not self.is_over:
            begin_s = time.time()
            text = await self._stream_once(STREAMS[index])
            self._compare(f"stream {index}", text, begin_s)
            if text != self.texts.get(f"stream {index}"):
                await asyncio.sleep(0.2)

    async def _stream_once(self, body: Any) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        content = dump(body)
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        text, last_s, status = "", 0.0, b""
        try:
            async for line in reader:
                status = status or line[9:12]
                if status != b"200" and line.lower().startswith(b"retry-after:"):
                    return f"{TOLD}status {status.decode('latin1')}"
                if not line.startswith(b"data: "):
                    continue
                now_s = time.monotonic()
                if last_s:
                    self.saw.note(now_s - last_s, "stream")
                last_s = now_s
                if line.startswith(b"data: [DONE]"):
                    break
                event = json.loads(line[6:])
                if "error" in event:
                    return f"{TOLD}{event['error']['message']}"
                text += event["choices"][0]["text"]
        except OSError as error:
            return f"{type(error).__name__} after {text!r}"
        finally:
            writer.transport.abort()
        return text or "no answer"

    async def _control(self) -> None:
        while not self.is_over:
            for index, (path, body) in enumerate(CONTROLS):
                begin_s = time.time()
                answer = await post(self.port, path, {"model": "demo", **body})
                self._compare(f"control {index} {path}", text_of(path, answer), begin_s)
                await asyncio.sleep(0.05)

    async def _probe(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        while not self.is_over:
            begin_s = time.monotonic()
            writer.write(b"GET /version HTTP/1.1\r\nhost: a\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            self.saw.note(time.monotonic() - begin_s, "probe")
            await asyncio.sleep(0.01)
        writer.close()

    async def _own_lag(self) -> None:
        while not self.is_over:
            begin_s = time.monotonic()
            await asyncio.sleep(0.005)
            lag_s = time.monotonic() - begin_s - 0.005
            if lag_s > _LEAST_LAG_S:
                self.saw.lags.append((lag_s, time.time()))


def witness_main(port: int, texts: dict[str, str], seconds: float | None, pipe: Pipe) -> None:
    """Run the well-behaved clients in this process until ``seconds`` are over or the pipe says so; sends what they saw."""
    gc.disable()
    os.setsid()  # cores are shared among sessions: it has none with the attackers
    set_priority(_WITNESS_NICENESS)
    watch = _Watch(port, texts)
    try:
        asyncio.run(watch.run(seconds, pipe))
    except Exception as error:
        watch.saw.wrong.append(f"the witness itself ended: {error!r}")
    pipe.send((watch.saw, watch.texts))
