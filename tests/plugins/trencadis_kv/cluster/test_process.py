from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time

import pytest

from trencadis_kv.cluster.plan import Member, plan_cluster
from trencadis_kv.cluster.process import MemberProcess


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
