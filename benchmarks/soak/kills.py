"""Kills and stops of engine, server and clients at random moments under load: who is told, and when everything is back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from clients import Answer, Attempt, post
from processes import Server, Usage

__all__ = ["MOST_BACK_S", "MOST_SILENCE_S", "Kills", "kills_beside", "run_kills"]

MOST_SILENCE_S = 10.0
MOST_BACK_S = 15.0
_GIVE_UP_S = 90.0
_END_OF_ENGINE = re.compile(
    r" ERROR trencadis(\.server)?: (the engine's process (was killed by|hung:)|The engine is stalled: "
    r"|The engine (has ended|could not be started again): the engine's process )"
)
"""What a server logs of an engine that is killed."""

_PROMPTS = ("The ship sails", "Once upon a time", "In the morning", "A captain", "Wind and", "The mate")
_PROBE = {"model": "demo", "prompt": "The sea is", "max_tokens": 8, "temperature": 0}

_CLIENT = """
import json, socket, sys
held = []
for index in range(4):
    body = json.dumps({"model": "demo", "prompt": "The sea", "max_tokens": 300, "stream": True, "ignore_eos": True}).encode()
    one = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    one.sendall(b"POST /v1/completions HTTP/1.1\\r\\nhost: a\\r\\ncontent-type: application/json\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
    held.append(one)
print("on", flush=True)
while held:
    for one in list(held):
        if not one.recv(65536):
            held.remove(one)
"""


@dataclass
class Kills:
    """What came of a series of kills and stops.

    Attributes:
        events: How many of each kind.
        backs_s: Seconds until the server answered 200 again, by kind.
        silence_s: Longest time in which a client heard nothing at all.
        answers: How requests of the load ended.
        wrong: Texts that are not as undisturbed, and what else must not be.
        slow: Events after which something took too long.
        usages: What server and engine held when they were back after each event.
        num_ended: Engines that were ended.
        absences_s: When there was no engine because of that: from the kill until it was back, moments on the wall clock.
        server_stops_s: When the server itself was stopped and went on, monotonic.
    """

    events: Counter[str] = field(default_factory=Counter)
    backs_s: dict[str, list[float]] = field(default_factory=dict)
    silence_s: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    usages: list[dict[str, Usage | None]] = field(default_factory=list)
    num_ended: int = 0
    absences_s: list[tuple[float, float]] = field(default_factory=list)
    server_stops_s: list[float] = field(default_factory=list)

    def covers(self, begin_s: float, end_s: float) -> bool:
        """Return whether an engine was absent at some time between two moments of the wall clock."""
        return any(begin_s <= until_s and since_s <= end_s for since_s, until_s in self.absences_s)

    def excuses(self, attempt: Attempt) -> bool:
        """Return whether a request ended as it may if its engine is killed: the client knows of it, and that it may try again."""
        answer = attempt.answer
        is_told = answer.outcome == "error in stream" or (answer.status in {500, 503} and answer.has_retry_after)
        return is_told and self.covers(attempt.begin_s, attempt.end_s)

    def explains(self, line: str) -> bool:
        """Return whether a line of the log is about an engine that was killed."""
        return bool(self.num_ended and _END_OF_ENGINE.search(line))


class Load:
    """Clients that send whole and streamed requests one after the other, and never stop.

    Args:
        port: Of the server.
        result: Where they note what they see.
    """

    def __init__(self, port: int, result: Kills) -> None:
        self._port = port
        self._result = result
        self._texts: dict[str, str] = {}
        self.event = "the start"
        self.is_over = False

    async def run(self, num_clients: int) -> None:
        """Send until it is over."""
        await asyncio.gather(*(self._client(index) for index in range(num_clients)))

    async def _client(self, index: int) -> None:
        rng = random.Random(index)
        while not self.is_over:
            body = {
                "model": "demo",
                "prompt": rng.choice(_PROMPTS),
                "max_tokens": rng.choice((20, 100, 200)),
                "temperature": 0,
            }
            body |= {"ignore_eos": True, "stream": rng.random() < 0.6}
            outcome, text = await self._request(body)
            self._result.answers[outcome] += 1
            if outcome == "200":
                key = f"{body['prompt']} {body['max_tokens']}"
                if self._texts.setdefault(key, text) != text:
                    self._result.wrong.append(f"{key}: {text[:60]!r} instead of {self._texts[key][:60]!r}")
            else:
                await asyncio.sleep(0.2)

    async def _request(self, body: dict[str, Any]) -> tuple[str, str]:
        content = json.dumps(body).encode()
        lines = ["POST /v1/completions HTTP/1.1", "host: a", "content-type: application/json", "connection: close"]
        head = "\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode()
        data, last_s = bytearray(), time.monotonic()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            return "no connection", ""
        try:
            writer.write(head + content)
            while True:
                async with asyncio.timeout(_GIVE_UP_S):
                    part = await reader.read(65536)
                self._heard(last_s)
                last_s = time.monotonic()
                if not part:
                    break
                data += part
        except TimeoutError:
            self._heard(last_s)
            return "never answered", ""
        except OSError:
            return "cut off", ""
        finally:
            writer.transport.abort()
        return _ended(bytes(data), is_stream=body["stream"])

    def _heard(self, last_s: float) -> None:
        """Note how long a client heard nothing."""
        silence_s = time.monotonic() - last_s
        if silence_s > self._result.silence_s:
            self._result.silence_s = silence_s
        if silence_s > MOST_SILENCE_S:
            self._result.slow.append(f"a client heard nothing for {silence_s:.1f} s around {self.event}")


def _ended(data: bytes, *, is_stream: bool) -> tuple[str, str]:
    """Return how an answer ended and its text. Pure."""
    head, _, body = data.partition(b"\r\n\r\n")
    status = head[9:12].decode("latin1") or "cut off"
    if status != "200":
        is_clear = status < "500" or b"\r\nretry-after:" in head.lower()
        return status if is_clear else f"{status} without Retry-After", ""
    if not is_stream:
        with contextlib.suppress(ValueError):
            return status, json.loads(body)["choices"][0]["text"]
        return "cut off", ""
    text = ""
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                return "error in stream", ""
            text += event["choices"][0]["text"]
    return (status, text) if b"data: [DONE]" in body else ("cut off", "")


class _Killer:
    """Does what the series says, one event after the other."""

    def __init__(self, server: Server, seed: int, result: Kills, load: Load) -> None:
        self._server = server
        self._rng = random.Random(f"kills {seed}")
        self._result = result
        self._load = load
        self._kinds = {
            "SIGKILL of the engine": (self._signal_engine, signal.SIGKILL, 26),
            "SIGTERM of the engine": (self._signal_engine, signal.SIGTERM, 4),
            "SIGSEGV of the engine": (self._signal_engine, signal.SIGSEGV, 4),
            "SIGKILL while the engine starts": (self._kill_twice, None, 6),
            "SIGSTOP of the engine for good": (self._signal_engine, signal.SIGSTOP, 4),
            "SIGSTOP of the engine for a while": (self._stop_engine, None, 16),
            "SIGKILL of clients": (self._kill_clients, signal.SIGKILL, 16),
            "SIGSTOP of clients": (self._kill_clients, signal.SIGSTOP, 8),
            "cancel storm": (self._cancel_storm, None, 10),
            "SIGSTOP of the server for a while": (self._stop_server, None, 6),
        }

    async def run(self, count: int | None, every_s: float, is_over: threading.Event) -> None:
        """Do so many events, one every so many seconds in the middle; None: until it is over."""
        weights = [weight for _, _, weight in self._kinds.values()]
        for number in itertools.count() if count is None else range(count):
            await self._pause(2 * every_s * self._rng.random(), is_over)
            if is_over.is_set():
                break
            kind = self._rng.choices(list(self._kinds), weights)[0]
            call, argument, _ = self._kinds[kind]
            self._load.event = f"event {number}, {kind}"
            begin_s, since_s, num_ended = time.monotonic(), time.time(), self._result.num_ended
            await call(*([] if argument is None else [argument]))
            back_s = await self._until_back(begin_s)
            self._result.events[kind] += 1
            if self._result.num_ended > num_ended:
                self._result.absences_s.append((since_s, time.time()))
            self._result.backs_s.setdefault(kind, []).append(back_s)
            self._result.usages.append(await asyncio.to_thread(self._server.usage))
            print(f"  {number:4d} {kind}: back after {back_s:.1f} s", flush=True)
            if back_s > MOST_BACK_S:
                self._result.slow.append(f"event {number}, {kind}: back after {back_s:.1f} s")
            if back_s > _GIVE_UP_S:
                break

    async def _pause(self, seconds: float, is_over: threading.Event) -> None:
        end_s = time.monotonic() + seconds
        while not is_over.is_set() and (left_s := end_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, 0.2))

    async def _until_back(self, begin_s: float) -> float:
        """Return after how many seconds the server answered 200 by an engine that lives."""
        while time.monotonic() < begin_s + 2 * _GIVE_UP_S:
            answer: Answer = await post(self._server.port, "/v1/completions", _PROBE, patience_s=_GIVE_UP_S)
            if answer.status == 200:
                return time.monotonic() - begin_s
            await asyncio.sleep(0.05)
        return float("inf")

    async def _engine(self) -> int | None:
        for _ in range(2000):
            pid = await asyncio.to_thread(self._server.engine_pid)
            if pid is not None:
                return pid
            await asyncio.sleep(0.01)
        return None

    async def _signal_engine(self, number: int) -> None:
        pid = await self._engine()
        if pid is not None:
            self._result.num_ended += _send(pid, number)
            await self._gone(pid)

    async def _gone(self, pid: int) -> None:
        """Wait until a process has ended: an engine that is stopped for good is ended by the server's watch."""
        end_s = time.monotonic() + _GIVE_UP_S
        while time.monotonic() < end_s and os.path.exists(f"/proc/{pid}/stat"):
            await asyncio.sleep(0.01)

    async def _kill_twice(self) -> None:
        await self._signal_engine(signal.SIGKILL)
        pid = await self._engine()
        await asyncio.sleep(self._rng.random() * 2)
        if pid is not None:
            self._result.num_ended += _send(pid, signal.SIGKILL)

    async def _stop_engine(self) -> None:
        pid = await self._engine()
        if pid is not None:
            _send(pid, signal.SIGSTOP)
            await asyncio.sleep(self._rng.choice((0.05, 0.3, 1.0)))
            _send(pid, signal.SIGCONT)

    async def _stop_server(self) -> None:
        seconds = self._rng.choice((0.05, 0.3, 1.0))
        self._result.server_stops_s.append(time.monotonic())
        _send(self._server.pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        _send(self._server.pid, signal.SIGCONT)
        self._result.server_stops_s.append(time.monotonic())

    async def _kill_clients(self, number: int) -> None:
        client = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CLIENT, str(self._server.port)], stdout=subprocess.PIPE
        )
        try:
            assert client.stdout is not None
            await asyncio.to_thread(client.stdout.readline)
            await asyncio.sleep(self._rng.random() * 0.4)
            client.send_signal(number)
            if number == signal.SIGSTOP:
                await asyncio.sleep(self._rng.random())
        finally:
            client.kill()
            client.wait()
            assert client.stdout is not None
            client.stdout.close()

    async def _cancel_storm(self) -> None:
        content = json.dumps({**_PROBE, "max_tokens": 200, "ignore_eos": True, "n": 2}).encode()
        whole = (
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(content)
            + content
        )
        held = []
        for _ in range(40):
            with contextlib.suppress(OSError):
                one = socket.create_connection(("127.0.0.1", self._server.port))
                one.sendall(whole[: self._rng.choice((len(whole), len(whole), len(whole) - 1, 30))])
                held.append(one)
        await asyncio.sleep(self._rng.random() * 0.3)
        for one in held:
            if self._rng.random() < 0.5:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()


def _send(pid: int, number: int) -> bool:
    """Send a signal; returns whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def run_kills(server: Server, count: int, seed: int, *, num_clients: int = 6) -> Kills:
    """Kill and stop so many times under load; the server serves, or its time is up, when this returns."""
    result = Kills()
    asyncio.run(_run(server, seed, result, threading.Event(), count=count, every_s=0.3, num_clients=num_clients))
    return result


@contextmanager
def kills_beside(server: Server, seed: int, every_s: float) -> Iterator[Kills]:
    """Kill and stop beside the block, on a thread: one event every so many seconds in the middle. The server serves afterwards."""
    result, is_over = Kills(), threading.Event()
    running = _run(server, seed, result, is_over, count=None, every_s=every_s, num_clients=2)
    thread = threading.Thread(target=asyncio.run, args=(running,), name="kills")
    thread.start()
    try:
        yield result
    finally:
        is_over.set()
        thread.join()


async def _run(
    server: Server,
    seed: int,
    result: Kills,
    is_over: threading.Event,
    *,
    count: int | None,
    every_s: float,
    num_clients: int,
) -> None:
    load = Load(server.port, result)
    running = asyncio.ensure_future(load.run(num_clients))
    try:
        await asyncio.sleep(1.0)
        await _Killer(server, seed, result, load).run(count, every_s, is_over)
    finally:
        load.is_over = True
        await asyncio.wait({running}, timeout=_GIVE_UP_S)
