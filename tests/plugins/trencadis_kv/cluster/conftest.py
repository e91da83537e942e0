"""Members that serve at once: what a cluster does with processes does not depend on what they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, socket, sys
flags = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[1:])
print("Listening at somewhere", flush=True)
if flags.get("fails"):
    print("error: it cannot", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
listener = socket.create_server(("127.0.0.1", int(flags["server.port"])))
num_asked = 0
print("Ready: " + flags["engine.role"], flush=True)
while True:
    connection, _ = listener.accept()
    with connection:
        while data := connection.recv(65536):
            if data == b"die":
                os.kill(os.getpid(), signal.SIGKILL)
            if data.startswith(b"GET /metrics"):
                num_asked += 1
                known = int(num_asked >= int(flags.get("meets", 1)))
                page = "asked %d\\ntrencadis_kv_prefill_engines{connector=\\"p2p\\"} %d.0\\n" % (num_asked, known)
                connection.sendall(page.encode())
                break
            connection.sendall(flags["server.port"].encode() + b" " + data)
"""


@pytest.fixture
def quick_server(tmp_path: Path) -> tuple[str, str]:
    """Command of a server that prefixes what it is sent with its port, and dies when told to; asked ``--meets`` times, it knows who computes
    prompts."""
    path = tmp_path / "member.py"
    path.write_text(SCRIPT)
    return sys.executable, str(path)
