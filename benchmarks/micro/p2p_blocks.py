"""KV blocks pulled from another process through the connector ``p2p``, against a bare copy of the same bytes over a socket.

``pull`` goes over the socket, as from another machine; ``shared`` through memory that both processes see.

    python benchmarks/micro/p2p_blocks.py --repeats 21 > p2p_blocks.json

All read from and write to preallocated memory over loopback. The pull also looks blocks up by their hashes, verifies header and
checksum of each, and copies them to the pool of the torch backend on the CPU, whose blocks are of two pieces. They take turns, and
``bare_again`` is the same code as ``bare``: the ratio of these two is the noise floor. CPU seconds are those of both processes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import numpy as np
import torch
from numpy.typing import NDArray

from trencadis.clock import SystemClock
from trencadis_kv.connectors.p2p.config import P2PConfig
from trencadis_kv.connectors.p2p.node import Node
from trencadis_kv.connectors.p2p.params import RemotePrefix
from trencadis_kv.connectors.p2p.peer import PeerConnection
from trencadis_kv.connectors.p2p.transport import shared_memory
from trencadis_kv.connectors.p2p.worker import TAKEN_BYTES
from trencadis_kv.store.pool_access import PoolAccess
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache

BLOCK_BYTES = 65536
BLOCK_SIZE = 16


def make_pool(num_blocks: int, seed: int) -> PagedKVCache:
    """Return the torch backend's blocks: keys and values of one layer, random numbers."""
    layer = AttentionLayer(index=0, num_kv_heads=8, key_dim=64, value_dim=64, window=0, dtype=torch.float32)
    pool = PagedKVCache((layer,), num_blocks=num_blocks, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for part in pool.parts:
        part.uniform_(generator=generator)
    return pool


def bytes_of(pool: PagedKVCache, num_blocks: int) -> NDArray[np.uint8]:
    """Return blocks, ``[num_blocks, BLOCK_BYTES]``."""
    rows = np.empty((num_blocks, BLOCK_BYTES), np.uint8)
    pool.read_blocks(range(num_blocks), rows)
    return rows


def make_node(pool: PagedKVCache) -> Node:
    """Return an engine's part of the connector, with a pool."""
    config = P2PConfig(secret="known to both processes", max_hold_s=3600.0, lease_s=3600.0)
    node = Node(config, clock=SystemClock(), model="benchmark", transport=shared_memory(1))
    node.pool = PoolAccess(pool)
    node.start(pool.layout)
    return node


def hashes_of(num_blocks: int) -> list[bytes]:
    """Return hashes as an engine's."""
    return [index.to_bytes(32, "little") for index in range(num_blocks)]


def produce(pipe: Connection, num_blocks: int) -> None:
    """Hold blocks for pulls, and send them barely to whoever connects to a second port, until told to end."""
    pool = make_pool(num_blocks, seed=0)
    rows = bytes_of(pool, num_blocks)
    node = make_node(pool)
    index = dict(zip(hashes_of(num_blocks), range(num_blocks), strict=True))
    node.holds.add(0, "benchmark", index, num_bytes=num_blocks * BLOCK_BYTES)
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((node.engine, node.server.port, listener.getsockname()[1]))
    threading.Thread(target=send_barely, args=(listener, rows), daemon=True).start()
    while pipe.recv() == "cpu":
        pipe.send(time.process_time())


def send_barely(listener: socket.socket, rows: NDArray[np.uint8]) -> None:
    """Send all blocks to whoever connects, and nothing else."""
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
            connection.recv(1)
            for row in rows:
                connection.sendall(row)


def bare(port: int, target: NDArray[np.uint8]) -> None:
    """Copy all blocks over a socket, and nothing else."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        connection.sendall(b"!")
        for row in target:
            view, first = row.data, 0
            while first < BLOCK_BYTES:
                first += connection.recv_into(view[first:])


def pull(node: Node, prefix: RemotePrefix, hashes: Sequence[bytes], *, is_shared: bool) -> None:
    """Pull all blocks as the worker side does."""
    assert node.identity is not None
    assert node.pool is not None
    assert node.transport is not None, "this system has no memory that processes can lend each other"
    pool, landing = node.pool, node.transport.landing() if is_shared else None
    with PeerConnection(prefix, node.identity, connect_timeout_s=5) as connection:

        def take(first: int, rows: NDArray[np.uint8]) -> None:
            pool.write(range(first, first + len(rows)), rows, timeout_s=60)

        connection.pull(hashes, take, num_rows=TAKEN_BYTES // BLOCK_BYTES, timeout_s=60, landing=landing)
    if landing is not None:
        landing.close()


def measure(repeats: int, num_blocks: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return seconds, and CPU seconds of both processes, by variant."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    producer = multiprocessing.get_context("spawn").Process(target=produce, args=(there, num_blocks), daemon=True)
    producer.start()
    engine, port, bare_port = here.recv()
    pool = make_pool(num_blocks, seed=1)
    node = make_node(pool)
    prefix = RemotePrefix(
        engine=engine, hold_id="benchmark", host="127.0.0.1", port=port, num_tokens=num_blocks * BLOCK_SIZE, lease_s=60
    )
    hashes, target = hashes_of(num_blocks), np.zeros((num_blocks, BLOCK_BYTES), np.uint8)
    variants: dict[str, Callable[[], None]] = {
        "bare": lambda: bare(bare_port, target),
        "pull": lambda: pull(node, prefix, hashes, is_shared=False),
        "shared": lambda: pull(node, prefix, hashes, is_shared=True),
        "bare_again": lambda: bare(bare_port, target),
    }

    def cpu_s() -> float:
        here.send("cpu")
        return float(here.recv()) + time.process_time()

    seconds: dict[str, list[float]] = {name: [] for name in variants}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, run in variants.items():
            start_cpu_s, start_s = cpu_s(), time.perf_counter()
            run()
            took_s = time.perf_counter() - start_s
            if repeat:  # the first warms up
                seconds[name].append(took_s)
                cpu_seconds[name].append(cpu_s() - start_cpu_s)
    if not np.array_equal(bytes_of(pool, num_blocks), target):
        raise SystemExit("what was pulled is not what was sent")
    here.send("end")
    producer.join()
    node.close()
    return seconds, cpu_seconds


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=1024)
    given = parser.parse_args()
    torch.set_num_threads(1)
    seconds, cpu_seconds = measure(given.repeats, given.blocks)
    gib = given.blocks * BLOCK_BYTES / 2**30
    ratios = {name: [a / b for a, b in zip(seconds["bare"], times, strict=True)] for name, times in seconds.items()}
    print(
        json.dumps(
            {
                "machine": platform.platform(),
                "bytes": given.blocks * BLOCK_BYTES,
                "gib_per_s": {name: round(gib / statistics.median(times), 3) for name, times in seconds.items()},
                "rate_to_bare_quartiles": {
                    name: [round(one, 3) for one in statistics.quantiles(of, n=4)] for name, of in ratios.items()
                },
                "cpu_ms_per_mib": {
                    name: round(statistics.median(times) / gib / 1.024, 3) for name, times in cpu_seconds.items()
                },
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
