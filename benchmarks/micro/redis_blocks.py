"""KV blocks through a Redis server: our data path against redis-py and against a bare socket that copies as many bytes.

    python benchmarks/micro/redis_blocks.py --repeats 15 > redis_blocks.json

Starts ``redis-server`` on a free loopback port unless ``--url`` names one. Ways run one after the other within each repeat, so that a
noisy machine disturbs all alike; ``ours_again`` is the same code as ``ours``: the ratio of the two is the noise floor. ``socket`` is
another process that sends or takes the same bytes over a loopback connection: no protocol and no store, what nobody can beat.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import platform
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from trencadis_kv.connectors.redis.config import RedisConfig
from trencadis_kv.connectors.redis.connector import redis_stores

HEADER_BYTES = 128
GIB = 2**30


class Scene:
    """Blocks to put, and where they are got back to."""

    def __init__(self, *, num_blocks: int, block_bytes: int) -> None:
        self.num_bytes = num_blocks * (block_bytes + HEADER_BYTES)
        self.blocks = np.random.default_rng(0).integers(0, 256, (num_blocks, block_bytes), np.uint8)
        header = memoryview(bytes(HEADER_BYTES))
        self.keys = [f"kv1/default/{'0' * 32}/0.0.0-8/{number:064x}" for number in range(num_blocks)]
        self.objects = [[header, memoryview(block)] for block in self.blocks]
        self.found = np.zeros((num_blocks, block_bytes + HEADER_BYTES), np.uint8)
        self.targets = [memoryview(row) for row in self.found]

    def check(self) -> None:
        """Raise if what was got is not what was put."""
        if not np.array_equal(self.found[:, HEADER_BYTES:], self.blocks):
            raise SystemExit("what was got is not what was put")
        self.found[:] = 0


class Ours:
    """The store of the connector."""

    def __init__(self, url: str, scene: Scene) -> None:
        self._scene = scene
        self._store = redis_stores(RedisConfig(url=url))()

    def put(self) -> None:
        if self._store.put(self._scene.keys, self._scene.objects) != len(self._scene.keys):
            raise SystemExit("the server did not keep every block; it needs more maxmemory")

    def get(self) -> None:
        self._store.get(self._scene.keys, self._scene.targets)


class RedisPy:
    """The client library, as one would use it: a pipeline of SETs, and an MGET copied to where the blocks belong."""

    def __init__(self, url: str, scene: Scene) -> None:
        self._scene = scene
        self._client = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0))

    def put(self) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key, pieces in zip(self._scene.keys, self._scene.objects, strict=True):
            pipeline.set(key, b"".join(pieces))
        pipeline.execute()

    def get(self) -> None:
        for target, value in zip(self._scene.targets, self._client.mget(self._scene.keys), strict=True):
            target[:] = value


class BareSocket:
    """Another process at the other end of a loopback connection."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        ours, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        self._connection = socket.create_connection(("127.0.0.1", ours.recv()))

    def put(self) -> None:
        self._connection.sendall(b"p" + self._scene.num_bytes.to_bytes(8, "little"))
        for pieces in self._scene.objects:
            self._connection.sendmsg(pieces)
        self._connection.recv(1)

    def get(self) -> None:
        self._connection.sendall(b"g" + self._scene.num_bytes.to_bytes(8, "little"))
        rest = memoryview(self._scene.found.reshape(-1))
        while rest:
            rest = rest[self._connection.recv_into(rest) :]

    def close(self) -> None:
        self._connection.close()
        self._process.join()


def _serve(pipe: Connection) -> None:
    """Take or send as many bytes as is asked for, again and again."""
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send(listener.getsockname()[1])
    there, _ = listener.accept()
    buffer = bytearray(2**20)
    while order := there.recv(9, socket.MSG_WAITALL):
        left = int.from_bytes(order[1:], "little")
        if order[:1] == b"g":
            there.sendall(bytes(left))
            continue
        while left:
            left -= there.recv_into(buffer, min(left, len(buffer)))
        there.sendall(b".")


@contextlib.contextmanager
def server(url: str) -> Iterator[dict[str, str]]:
    """Yield URLs over TCP and a unix socket; those of a server of our own unless one is named."""
    if url:
        yield {"tcp": url}
        return
    if shutil.which("redis-server") is None:
        raise SystemExit("redis-server is not installed: apt-get install redis-server, or name one with --url")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = f"/tmp/redis-blocks-{port}.sock"
    options = ["--save", "", "--appendonly", "no", "--maxmemory", "2gb", "--maxmemory-policy", "allkeys-lfu"]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", path, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if not any("Ready to accept connections" in line for line in process.stdout):
            raise SystemExit("redis-server does not start")
        yield {"tcp": f"redis://127.0.0.1:{port}", "unix": f"unix://{path}"}
    finally:
        process.terminate()
        process.wait()


def measure(
    ways: dict[str, Callable[[], None]], *, repeats: int, check: Callable[[str], None]
) -> dict[str, list[float]]:
    """Return seconds of each way, measured in turns; one turn before is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, run in ways.items():
            start_s = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start_s)
            check(name)
    return {name: found[1:] for name, found in seconds.items()}


def table(seconds: dict[str, list[float]], num_bytes: int) -> dict[str, dict[str, float]]:
    """Return median, best and rate of each way."""
    return {
        name: {
            "median_ms": round(statistics.median(found) * 1e3, 2),
            "best_ms": round(min(found) * 1e3, 2),
            "median_gib_per_s": round(num_bytes / statistics.median(found) / GIB, 3),
        }
        for name, found in seconds.items()
    }


def ratio(seconds: dict[str, list[float]], one: str, other: str) -> float:
    """Return the median over repeats of the time of one way over that of another."""
    return round(statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True)), 3)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--num-blocks", type=int, default=1024)
    parser.add_argument("--block-bytes", type=int, default=65536)
    parser.add_argument("--url", default="", help="of a server that runs")
    args = parser.parse_args(arguments)
    scene = Scene(num_blocks=args.num_blocks, block_bytes=args.block_bytes)
    bare = BareSocket(scene)
    with server(args.url) as urls:
        ways = {"ours": Ours(urls["tcp"], scene), "redis_py": RedisPy(urls["tcp"], scene), "socket": bare}
        ways["ours_again"] = ways["ours"]
        if "unix" in urls:
            ways["ours_unix"] = Ours(urls["unix"], scene)
        puts = measure({name: way.put for name, way in ways.items()}, repeats=args.repeats, check=lambda _: None)
        gets = measure(
            {name: way.get for name, way in ways.items()},
            repeats=args.repeats,
            check=lambda name: None if name == "socket" else scene.check(),
        )
    bare.close()
    result = {
        "machine": {"platform": platform.platform(), "python": platform.python_version()},
        "num_blocks": args.num_blocks,
        "block_bytes": args.block_bytes,
        "repeats": args.repeats,
        "put": table(puts, scene.num_bytes),
        "get": table(gets, scene.num_bytes),
        "put_ratio": {other: ratio(puts, "ours", other) for other in puts if other != "ours"},
        "get_ratio": {other: ratio(gets, "ours", other) for other in gets if other != "ours"},
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
