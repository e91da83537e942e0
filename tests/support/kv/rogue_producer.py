"""A producer that answers remote prefill requests as a test says, over real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self

from trencadis.errors import TransferError
from trencadis.records import KVLayout
from trencadis_kv.store.format import pack_header
from trencadis_kv.wire.handshake import Identity, accept
from trencadis_kv.wire.stream import FrameStream, block_head
from trencadis_kv.wire.stream_messages import Abort, Ack, PrefillRequest, PrefillResponse, Pull, Release, State, Status

__all__ = ["RogueProducer"]


class RogueProducer:
    """Listens, lets everybody in, computes nothing; a context manager.

    Args:
        identity: What it says of itself.
        layout: Of the blocks that it sends.
        on_request: Answers a prefill request; the connection is closed afterwards.
    """

    def __init__(
        self,
        identity: Identity,
        layout: KVLayout,
        on_request: Callable[[RogueProducer, FrameStream, PrefillRequest], None],
    ) -> None:
        self._identity = identity
        self._layout = layout
        self._on_request = on_request
        self._streams: list[FrameStream] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_pulls = 0
        self.requests: list[PrefillRequest] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def response(self, num_tokens: int, num_pushed: int, **more: object) -> PrefillResponse:
        """Return a response of blocks that nobody holds."""
        return PrefillResponse(hold_id="rogue", num_tokens=num_tokens, lease_s=30.0, num_pushed=num_pushed, **more)  # type: ignore[arg-type]

    def send_block(self, stream: FrameStream, block_hash: bytes, payload: bytes = b"") -> None:
        """Send a block, well packed whatever is in it."""
        data = payload or bytes(self._layout.block_bytes)
        header = pack_header(self._layout, compat=self._identity.compat, block_hash=block_hash, payload=data)
        stream.send_pieces([block_head(header, len(data)), data])

    def vanish(self) -> None:
        """Be gone, as a process that was killed."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for stream in self._streams:
            stream.cut()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            stream = FrameStream(connection, timeout_s=30.0)
            self._streams.append(stream)
            threading.Thread(target=self._attend, args=(stream,), daemon=True).start()

    def _attend(self, stream: FrameStream) -> None:
        try:
            accept(stream, self._identity)
            while self._answer(stream):
                pass
        except TransferError:
            pass  # the other side has gone
        finally:
            stream.close()

    def _answer(self, stream: FrameStream) -> bool:
        match stream.receive():
            case Status():
                stream.send(State(accepts=True, num_remote_prefills=0, num_tokens=0, tokens_per_s=0.0))
            case Release():
                stream.send(Ack(known=True))
            case Pull():
                self.num_pulls += 1
                stream.send(Abort(cause="lost", reason="nothing is held here"))
            case PrefillRequest() as request:
                self.requests.append(request)
                self._on_request(self, stream, request)
                return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.vanish()
        self._thread.join()
