"""Whether a serving engine has found a prefill engine, read from its metrics."""

from __future__ import annotations

import asyncio
from typing import Final

__all__ = ["knows_prefill"]

_ASK_S: Final = 3.0
_PAUSE_S: Final = 0.1
_GAUGE: Final = b"trencadis_kv_prefill_engines{"


async def knows_prefill(host: str, port: int, *, timeout_s: float) -> bool:
    """Wait until an engine has a prefill engine; False on timeout, or if it does not respond.

    Args:
        host: Host name or address of the engine's HTTP server.
        port: Port of the engine's HTTP server.
        timeout_s: Longest wait, seconds.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not await _knows_now(host, port):
                await asyncio.sleep(_PAUSE_S)
    except TimeoutError:
        return False
    return True


async def _knows_now(host: str, port: int) -> bool:
    try:
        page = await asyncio.wait_for(_metrics(host, port), _ASK_S)
    except OSError:  # TimeoutError is one
        return False
    return any(float(line.rpartition(b" ")[2]) > 0 for line in page.splitlines() if line.startswith(_GAUGE))


async def _metrics(host: str, port: int) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET /metrics HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        return await reader.read()
    finally:
        writer.close()
