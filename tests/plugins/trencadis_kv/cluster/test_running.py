from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import pytest

from trencadis.errors import ConfigError
from trencadis_kv.cluster import running
from trencadis_kv.cluster.plan import Member, plan_cluster
from trencadis_kv.cluster.process import MemberProcess
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


def member(*flags: str) -> Member:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (one,) = plan_cluster(num_prefill=0, num_decode=1, port=port, flags=flags)
    return one


def test_it_is_heard_and_ends_in_order(quick_server: tuple[str, str]) -> None:
    async def main() -> None:
        lines: list[str] = []
        process = MemberProcess(member(), lines.append, command=quick_server)
        assert process.pid == 0
        await process.start()
        assert process.pid > 0
        assert await process.ready()
        assert lines == ["[both 0] Listening at somewhere", "[both 0] Ready: both"]
        await process.end()
        assert await process.ended() == 0

    asyncio.run(asyncio.wait_for(main(), 30))


PARENT = """
import asyncio, os, signal, sys
from trencadis_kv.cluster.plan import plan_cluster
from trencadis_kv.cluster.process import MemberProcess
async def main():
    (member,) = plan_cluster(num_prefill=0, num_decode=1, port=int(sys.argv[3]))
    process = MemberProcess(member, lambda _: None, command=sys.argv[1:3])
    await process.start()
    await process.ready()
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
def test_it_ends_with_a_cluster_that_is_killed(quick_server: tuple[str, str]) -> None:
    port = member().port
    subprocess.run([sys.executable, "-c", PARENT, *quick_server, str(port)], check=False, timeout=30)
    until_s = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        except ConnectionRefusedError:
            return
        assert time.monotonic() < until_s, "it lives on"


def flag(member: Member, name: str) -> str:
    (value,) = [one.partition("=")[2] for one in member.flags if one.startswith(f"--{name}=")]
    return value


def test_those_who_serve_clients_know_those_who_compute_prompts() -> None:
    members = plan_cluster(num_prefill=2, num_decode=2, port=8000, flags=["--cache.num-blocks=64"])
    assert [(one.name, one.role) for one in members] == [
        ("prefill 0", "prefill"),
        ("prefill 1", "prefill"),
        ("decode 0", "decode"),
        ("decode 1", "decode"),
    ]
    addresses = ",".join(f"127.0.0.1:{flag(one, 'kv-connector.p2p.port')}" for one in members[:2])
    assert {flag(one, "kv-connector.p2p.prefill-engines") for one in members[2:]} == {addresses}
    assert {flag(one, "engine.role") for one in members[:2]} == {"prefill"}
    assert all(flag(one, "cache.num-blocks") == "64" for one in members)
    assert all(flag(one, "server.port") == str(one.port) for one in members)
    assert len({one.port for one in members} | {8000}) == 5
    assert [flag(one, "kv-connector.p2p.prefill-engines") for one in members[:2]] == ["", ""]


def test_members_know_a_secret_that_no_other_cluster_has_and_no_command_line_shows() -> None:
    first, second = (plan_cluster(num_prefill=1, num_decode=2, port=8000) for _ in range(2))
    (secret,) = {one.environment["TRENCADIS_KV_CONNECTOR__P2P__SECRET"] for one in first}
    assert len(secret) == 64
    assert secret not in str(first)
    assert secret not in {one.environment["TRENCADIS_KV_CONNECTOR__P2P__SECRET"] for one in second}


def test_nobody_can_be_reached_from_other_machines() -> None:
    members = plan_cluster(num_prefill=1, num_decode=2, port=8000)
    assert {flag(one, "server.host") for one in members} == {"127.0.0.1"}
    assert {flag(one, "kv-connector.p2p.host") for one in members} == {"127.0.0.1"}
    assert {flag(one, "kv-connector.p2p.advertised-host") for one in members} == {"127.0.0.1"}


def test_port_that_a_file_names_is_not_that_of_all_members() -> None:
    members = plan_cluster(num_prefill=2, num_decode=2, port=8000)
    ports = [flag(one, "kv-connector.p2p.port") for one in members]
    assert "0" not in ports[:2], "others have to know it"
    assert ports[0] != ports[1]
    assert ports[2:] == ["0", "0"]


def test_one_that_serves_clients_alone_does_so_where_they_come() -> None:
    *_, decode = plan_cluster(num_prefill=1, num_decode=1, port=8123)
    assert (decode.name, decode.port) == ("decode 0", 8123)


def test_without_prefill_engines_the_others_do_both() -> None:
    (one,) = plan_cluster(num_prefill=0, num_decode=1, port=8123)
    assert (one.role, flag(one, "engine.role")) == ("both", "both")
    assert flag(one, "kv-connector.p2p.prefill-engines") == "", "also where a file names some"


@pytest.mark.parametrize(
    "given", ["--server.port=1", "--kv-connector.p2p.prefill-engines=a:1", "--kv_connector.name=redis", "--engine.role"]
)
def test_what_the_cluster_sets_itself_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="the cluster sets"):
        plan_cluster(num_prefill=1, num_decode=1, port=8000, flags=[given])
