from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence

import pytest

from trencadis_kv.cluster import discovery
from trencadis_kv.cluster.discovery import knows_prefill
from trencadis_kv.cluster.forwarder import Forwarder

HOST = "127.0.0.1"


def forwarding(use: Callable[[int, list[asyncio.Server]], Awaitable[None]], *, num_servers: int) -> None:
    """Have servers that answer each line with their number, behind a forwarder."""

    async def main() -> None:
        servers = []
        for number in range(num_servers):

            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int = number) -> None:
                while line := await reader.readline():
                    writer.write(b"%d: %s" % (number, line))
                    await writer.drain()
                writer.write(b"bye\n")
                writer.close()

            servers.append(await asyncio.start_server(serve, HOST, 0, limit=1 << 20))
        forwarder = Forwarder(HOST, [one.sockets[0].getsockname()[1] for one in servers])
        port = await forwarder.start(0)
        await asyncio.wait_for(use(port, servers), 20)
        await forwarder.close()
        for server in servers:
            server.close()

    asyncio.run(main())


async def say(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], line: bytes) -> bytes:
    connection[1].write(line + b"\n")
    return (await connection[0].readline()).rstrip()


def test_connections_take_turns_and_each_stays_where_it_is() -> None:
    async def use(port: int, _: list[asyncio.Server]) -> None:
        connections = [await asyncio.open_connection(HOST, port) for _ in range(4)]
        first = [await say(one, b"a") for one in connections]
        assert first == [b"0: a", b"1: a", b"0: a", b"1: a"]
        assert [await say(one, b"b") for one in connections] == [line[:2] + b" b" for line in first]
        for one in connections:
            one[1].close()

    forwarding(use, num_servers=2)


def test_end_of_one_direction_is_passed_on_and_the_other_still_works() -> None:
    async def use(port: int, _: list[asyncio.Server]) -> None:
        reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
        writer.write(b"x" * 300_000 + b"\n")
        writer.write_eof()
        assert len(await reader.readline()) == 300_004
        assert await reader.read() == b"bye\n"
        writer.close()

    forwarding(use, num_servers=1)


def test_server_that_is_gone_is_passed_over_and_without_any_the_connection_ends() -> None:
    async def use(port: int, servers: list[asyncio.Server]) -> None:
        servers[0].close()
        for _ in range(3):
            connection = await asyncio.open_connection(HOST, port)
            assert await say(connection, b"a") == b"1: a"
            connection[1].close()
        servers[1].close()
        reader, writer = await asyncio.open_connection(HOST, port)
        assert await reader.read() == b""
        writer.close()

    forwarding(use, num_servers=2)


def test_server_that_dies_while_it_answers_ends_the_connection() -> None:
    async def main() -> None:
        listener = socket.create_server((HOST, 0))
        forwarder = Forwarder(HOST, [listener.getsockname()[1]])
        port = await forwarder.start(0)
        reader, writer = await asyncio.open_connection(HOST, port)
        far, _ = await asyncio.to_thread(listener.accept)
        far.sendall(b"half an ans")
        far.close()
        assert await asyncio.wait_for(reader.read(), 20) == b"half an ans"
        writer.close()
        listener.close()
        await forwarder.close()

    asyncio.run(main())


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
