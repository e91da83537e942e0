"""Another process with a NIXL agent: lends memory and says where, or writes to memory that is lent to it.

python -m support.kv.nixl_peer lend BLOCK_BYTES    prints a target in hex, then for each line read the sum of the first row of piece 0
python -m support.kv.nixl_peer write BLOCK_BYTES   for each line read, a target in hex: writes ones to piece 0, and prints what became of it
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

__all__ = ["NixlPeer", "small_config"]


def small_config(**changes: Any) -> Any:
    from support.kv.p2p_ends import LOOPBACK_PEERS, SECRET
    from trencadis_kv.connectors.nixl.config import NixlConfig

    return NixlConfig(secret=SECRET, peers=LOOPBACK_PEERS, transports="tcp", devices="lo", num_pieces=8, **changes)


class NixlPeer:
    """A running one; a context manager that kills it."""

    def __init__(self, role: str, block_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.kv.nixl_peer", role, str(block_bytes)],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line: str = "") -> None:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)

    def stand_still(self) -> None:
        """Stop it, and wait until all its threads have stopped: one that waits for a processor sees the signal only then."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        """Let a stopped one run again."""
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def _main(role: str, block_bytes: int) -> None:
    from trencadis.errors import TransferError
    from trencadis_kv.connectors.nixl.connector import NixlTransport

    transport = NixlTransport(small_config(piece_bytes=block_bytes))
    transport.open(block_bytes)
    if role == "lend":
        receive_buffer = transport.receive_buffer()
        assert receive_buffer is not None
        _say(receive_buffer.target.hex())
    for line in sys.stdin:
        if role == "lend":
            _say(str(receive_buffer.rows(0)[0].sum()))
            continue
        flight = transport.flight(bytes.fromhex(line.strip()))
        assert flight is not None
        flight.rows(0)[:] = 1
        try:
            with flight:
                flight.write(0, 1, timeout_s=5.0, is_gone=lambda: False)
            _say("done")
        except TransferError as error:
            _say(str(error.cause))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
