from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from trencadis.errors import ConfigError
from trencadis_kv.cluster import running
from trencadis_kv.cluster.plan import plan_cluster
from trencadis_kv.cluster.running import Cluster

HOST = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Scene:
    """A cluster that runs, and what it has said."""

    def __init__(self, command: tuple[str, str], *, num_prefill: int, num_decode: int, flags: tuple[str, ...]) -> None:
        self.port = free_port()
        self.members = plan_cluster(num_prefill=num_prefill, num_decode=num_decode, port=self.port, flags=flags)
        self.lines: list[str] = []
        self.news = asyncio.Event()
        self.cluster = Cluster(self.members, port=self.port, announce=self._announce, command=command)

    def _announce(self, line: str) -> None:
        self.lines.append(line)
        self.news.set()

    async def until(self, text: str, times: int = 1) -> None:
        while sum(text in line for line in self.lines) < times:
            self.news.clear()
            await self.news.wait()

    async def say(self, port: int, text: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(text)
        writer.write_eof()
        answer = await reader.read()
        writer.close()
        return answer


def run(
    command: tuple[str, str],
    use: Callable[[Scene], Awaitable[None]],
    *,
    num_prefill: int = 1,
    num_decode: int = 2,
    flags: tuple[str, ...] = (),
) -> tuple[int, list[str]]:
    async def main() -> tuple[int, list[str]]:
        scene = Scene(command, num_prefill=num_prefill, num_decode=num_decode, flags=flags)
        task = asyncio.create_task(scene.cluster.run())
        await use(scene)
        return await task, scene.lines

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_clients_reach_everybody_who_serves_them_and_the_end_is_in_order(quick_server: tuple[str, str]) -> None:
    async def use(scene: Scene) -> None:
        await scene.until("Cluster ready")
        said = {await scene.say(scene.port, b"hello") for _ in range(4)}
        assert said == {b"%d hello" % one.port for one in scene.members if one.role == "decode"}
        scene.cluster.stop()

    code, lines = run(quick_server, use)
    assert code == 0
    assert [line.partition(":")[0] for line in lines if ": pid " in line] == ["prefill 0", "decode 0", "decode 1"]
    assert not [line for line in lines if "has ended" in line]


def test_it_is_ready_once_everybody_who_generates_knows_who_computes_prompts(quick_server: tuple[str, str]) -> None:
    async def use(scene: Scene) -> None:
        await scene.until("Cluster ready")
        for one in scene.members:
            page = await scene.say(one.port, b"GET /metrics")
            assert page.startswith(b"asked 4\n" if one.role == "decode" else b"asked 1\n")
        scene.cluster.stop()

    code, lines = run(quick_server, use, flags=("--meets=3",))
    assert code == 0
    assert not [line for line in lines if "has found no engine" in line]


def test_it_is_ready_in_any_case_and_says_who_knows_nobody(
    quick_server: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_MEET_S", 0.25)

    async def use(scene: Scene) -> None:
        await scene.until("Cluster ready")
        scene.cluster.stop()

    code, lines = run(quick_server, use, flags=("--meets=1000",))
    assert code == 0
    said = "has found no engine that computes prompts within 0.25 s; until it finds one it computes them itself."
    assert [line for line in lines if "has found" in line] == [f"decode 0 {said}", f"decode 1 {said}"]


def test_who_computes_prompts_and_dies_is_started_again(
    quick_server: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_RESTART_S", 0.01)

    async def use(scene: Scene) -> None:
        await scene.until("Cluster ready")
        await scene.say(scene.members[0].port, b"die")
        await scene.until("serves again")
        assert await scene.say(scene.members[0].port, b"hello") == b"%d hello" % scene.members[0].port
        scene.cluster.stop()

    code, lines = run(quick_server, use)
    assert code == 0
    assert "prefill 0 has ended (signal 9); it is started again." in lines


def test_who_serves_clients_and_dies_is_reported_and_the_last_ends_the_cluster(quick_server: tuple[str, str]) -> None:
    async def use(scene: Scene) -> None:
        await scene.until("Cluster ready")
        first, second = [one for one in scene.members if one.role == "decode"]
        await scene.say(first.port, b"die")
        await scene.until("decode 0 has ended (signal 9)")
        assert {await scene.say(scene.port, b"hello") for _ in range(3)} == {b"%d hello" % second.port}
        await scene.say(second.port, b"die")

    code, lines = run(quick_server, use)
    assert code == 1
    assert lines[-1] == "Nobody is left who serves clients; the cluster ends."


def test_member_that_cannot_start_ends_the_cluster_in_words(quick_server: tuple[str, str]) -> None:
    async def use(scene: Scene) -> None:
        await scene.until("before it was ready")

    code, lines = run(quick_server, use, flags=("--fails=yes",))
    assert code == 1
    assert "[prefill 0] error: it cannot" in lines
    assert "prefill 0 ended before it was ready; the cluster ends." in lines


def test_port_in_use_is_an_error_that_names_it(quick_server: tuple[str, str]) -> None:
    async def main() -> None:
        scene = Scene(quick_server, num_prefill=0, num_decode=2, flags=())
        with socket.create_server((HOST, scene.port)), pytest.raises(ConfigError, match=f"port {scene.port}.*in use"):
            await scene.cluster.run()

    asyncio.run(main())
