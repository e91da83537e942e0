from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest

from trencadis_kv.cluster import discovery
from trencadis_kv.cluster.discovery import knows_prefill

HOST = "127.0.0.1"
OTHERS = b'# TYPE trencadis_kv_prefill_engines gauge\ntrencadis_kv_delegated_prefills_running{connector="p2p"} 7.0\n'
NOBODY = OTHERS + b'trencadis_kv_prefill_engines{connector="p2p"} 0.0\n'
SOMEBODY = OTHERS + b'trencadis_kv_prefill_engines{connector="p2p"} 2.0\n'


def asked(pages: Sequence[bytes], *, timeout_s: float = 20.0) -> tuple[bool, bytes]:
    """Return what is found where one page after the other is answered, the last one ever again; and the last question."""
    questions: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        questions.append(await reader.readuntil(b"\r\n\r\n"))
        page = pages[min(len(questions), len(pages)) - 1]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page) + page)
        await writer.drain()
        writer.close()

    async def main() -> bool:
        async with await asyncio.start_server(answer, HOST, 0) as server:
            return await knows_prefill(HOST, server.sockets[0].getsockname()[1], timeout_s=timeout_s)

    return asyncio.run(main()), questions[-1]


def test_it_asks_until_the_engine_knows_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_PAUSE_S", 0.01)
    knows, question = asked([OTHERS, NOBODY, SOMEBODY])
    assert knows
    assert question.startswith(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:")


def test_it_does_not_ask_for_ever() -> None:
    assert not asked([NOBODY], timeout_s=0.3)[0]


def test_engine_that_does_not_answer_knows_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "_ASK_S", 0.05)
    with socket.create_server((HOST, 0)) as silent:
        port = silent.getsockname()[1]
        assert not asyncio.run(knows_prefill(HOST, port, timeout_s=0.3))
    assert not asyncio.run(knows_prefill(HOST, port, timeout_s=0.3)), "nobody listens there any more"
