"""Everything that can come instead of pushed blocks: it costs time, no text, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import attrs
import numpy as np
import pytest

from support.eventually import PATIENCE_S, eventually
from support.faultproxy import FaultProxy
from support.kv.engine_pairs import Station, prompt_of, true_text
from support.kv.push_scene import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    PROMPT,
    Decoder,
    check_nothing_is_left,
    decoder,
    firsts_of,
    port_of,
    serve,
)
from trencadis.errors import TransferError
from trencadis.records import KVLayout
from trencadis_kv.store.format import pack_header
from trencadis_kv.wire.handshake import Identity, accept
from trencadis_kv.wire.stream import FrameStream, block_head
from trencadis_kv.wire.stream_messages import (
    Abort,
    Ack,
    Commit,
    PrefillRequest,
    PrefillResponse,
    Pull,
    Release,
    State,
    Status,
    Token,
)


@pytest.mark.representatives(3)
@pytest.mark.parametrize("at", [200, 380, 700, 1500, 2300])
@pytest.mark.parametrize("fault", ["cut_at", "flip_at", "stall_at"])
def test_fault_on_the_way_costs_time_and_no_text(fault: str, at: int) -> None:
    """The first 150 bytes are greeting and response; each block is 232 bytes with its heads."""
    with (
        Station(lease_s=0.5) as prefiller,
        FaultProxy(port_of(prefiller)) as proxy,
        decoder(proxy.port, pull_timeout_s=0.5, connect_timeout_s=0.5, retry_s=0.0) as one,
    ):
        one.step_s = prefiller.step_s = 0.001
        proxy.to_client.set(**{fault: at})
        assert serve(one, prefiller).token_ids.tolist() == true_text(PROMPT, 6)
        assert proxy.to_client.happened.is_set()
        proxy.to_client.set()
        check_nothing_is_left(one, prefiller)
        assert firsts_of(one) in ({}, {"taken": 1})


def test_what_came_before_a_fault_is_used_and_the_rest_is_pulled() -> None:
    with Station() as prefiller, FaultProxy(port_of(prefiller)) as proxy, decoder(proxy.port) as one:
        proxy.to_client.set(flip_at=1500)
        end = serve(one, prefiller)
        assert (end.token_ids.tolist(), one.num_found(end)) == (true_text(PROMPT, 6), 4 * NUM_BLOCKS)
        assert one.count("transfer_failures", cause="corrupt") == 1
        assert firsts_of(one) == {"taken": 1}
        check_nothing_is_left(one, prefiller)


@contextlib.contextmanager
def count_delegated(
    on_request: Callable[[RogueProducer, FrameStream, PrefillRequest], None], **config: Any
) -> Iterator[tuple[Decoder, RogueProducer]]:
    """Have an engine whose only prefill engine does as a test says."""
    with Station() as like:
        identity, layout = attrs.evolve(like.node.identity, engine="rogue"), like.node.pool.layout
    with RogueProducer(identity, layout, on_request) as rogue, decoder(rogue.port, **config) as one:
        yield one, rogue


@pytest.mark.parametrize(
    ("num_pushed", "num_sent"),
    [(NUM_BLOCKS, NUM_BLOCKS), (1000, 0), (-1, 0), (None, 1)],
    ids=["others' blocks", "more than there is room for", "a negative number", "no response at all"],
)
@pytest.mark.representatives(4)
def test_producer_that_sends_what_nobody_wants_is_hung_up_on(num_pushed: int | None, num_sent: int) -> None:
    def on_request(rogue: RogueProducer, stream: FrameStream, request: PrefillRequest) -> None:
        if num_pushed is not None:
            stream.send(rogue.response(40, num_pushed))
        for index in range(num_sent):
            rogue.send_block(stream, bytes([index]) * 32)
        if num_pushed == num_sent:
            stream.send(Commit(num_blocks=num_sent))

    with count_delegated(on_request, max_pushed_bytes=20 * BLOCK_BYTES) as (one, _):
        assert serve(one).token_ids.tolist() == true_text(PROMPT, 6)
        assert one.count("transfer_failures", cause="corrupt") == 1
        assert one.count("pushed_bytes", end="received") == 0
        assert one.count("tokens", direction="load") == 0
        check_nothing_is_left(one)


def test_one_block_more_than_was_said_breaks_the_connection_and_those_before_count() -> None:
    """What is verified is what it says: these are the right blocks, with the entries that the model would have made."""
    with Station() as like:
        like.serve(PROMPT, max_tokens=1)
        sequence_hashes: list[bytes] = []
        state = like.engine._state
        state.hasher.extend(sequence_hashes, np.array(PROMPT, np.int32), num_blocks=NUM_BLOCKS, salt="")
        blocks = state.blocks.longest_hit(sequence_hashes)
        rows = np.empty((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        like.node.pool.read(blocks, rows, timeout_s=1.0)

    def on_request(rogue: RogueProducer, stream: FrameStream, request: PrefillRequest) -> None:
        stream.send(rogue.response(40, 3))
        for index in range(4):
            rogue.send_block(stream, sequence_hashes[index], rows[index].tobytes())
        stream.send(Commit(num_blocks=4))

    with count_delegated(on_request) as (one, rogue):
        end = serve(one)
        assert (end.token_ids.tolist(), one.num_found(end)) == (true_text(PROMPT, 6), 12)
        assert one.count("transfer_failures", cause="corrupt") == 1
        assert rogue.num_pulls == 1, "the rest is asked for"
        check_nothing_is_left(one)


@pytest.mark.parametrize("is_asked", [True, False])
def test_token_of_no_vocabulary_is_refused_and_one_that_nobody_asked_for_is_not_looked_at(is_asked: bool) -> None:
    def on_request(rogue: RogueProducer, stream: FrameStream, request: PrefillRequest) -> None:
        assert bool(request.sampling) is is_asked
        stream.send(rogue.response(40, 0, token=Token(token_id=1 << 40 if is_asked else 3)))

    with count_delegated(on_request, first_token=is_asked) as (one, _):
        assert serve(one).token_ids.tolist() == true_text(PROMPT, 6)
        assert firsts_of(one) == ({"vocabulary": 1} if is_asked else {})
        check_nothing_is_left(one)


@pytest.mark.parametrize("at", [250, 700, 2000])
def test_client_that_leaves_in_the_middle_leaves_nothing_behind(at: int) -> None:
    with (
        Station() as prefiller,
        FaultProxy(port_of(prefiller)) as proxy,
        decoder(proxy.port, pull_timeout_s=600.0) as one,
    ):
        one.step_s = 1e-5  # no deadline comes to help
        proxy.to_client.set(stall_at=at)
        name = one.add(PROMPT, max_tokens=6)
        eventually(proxy.to_client.happened.is_set, of=(one, prefiller))
        if at > 250:
            eventually(lambda: one.engine.stage("transfer").transfers.num_waiting_for_kv == 1, of=(one,))
        for _ in range(20):
            one.step()
        one.engine.abort(name)
        eventually(lambda: one.node.pushes.num_bytes == one.num_used_blocks == 0, of=(one,))
        proxy.to_client.set()
        check_nothing_is_left(one, prefiller)
        assert prefiller.node.holds.ends == {"released": 1}


def test_engine_that_closes_in_the_middle_does_not_hang() -> None:
    with Station() as prefiller, FaultProxy(port_of(prefiller)) as proxy:
        with decoder(proxy.port, pull_timeout_s=600.0) as one:
            proxy.to_client.set(stall_at=700)
            one.add(PROMPT, max_tokens=6)
            eventually(proxy.to_client.happened.is_set, of=(one, prefiller))
            eventually(lambda: one.engine.stage("transfer").transfers.num_waiting_for_kv == 1, of=(one,))
            closing = threading.Thread(target=one.engine.close, daemon=True)
            closing.start()
            closing.join(PATIENCE_S)
            assert not closing.is_alive()
        assert one.node.pushes.num_bytes == 0


@pytest.mark.representatives(1)
@pytest.mark.parametrize("seed", range(3))
def test_storm_of_faults_and_departures_changes_no_text_and_leaves_nothing(seed: int) -> None:
    """Requests come, leave and share beginnings in a cache of few blocks, while the way to the other engine breaks in every way."""
    rng = random.Random(seed)
    limits: dict[str, Any] = {"pull_timeout_s": 0.3, "connect_timeout_s": 0.3, "retry_s": 0.0, "heartbeat_s": 0.02}
    with (
        Station(lease_s=0.5, num_blocks=80) as prefiller,
        FaultProxy(port_of(prefiller)) as proxy,
        decoder(proxy.port, max_pushed_bytes=20 * BLOCK_BYTES, num_blocks=50, **limits) as one,
    ):
        one.step_s = prefiller.step_s = 0.001
        live: dict[str, tuple[tuple[int, ...], int]] = {}
        for _ in range(400):
            match rng.randrange(12):
                case 0 | 1 if len(live) < 8:
                    prompt = prompt_of(rng.randrange(5), rng.randrange(10, 60))
                    num = rng.randrange(1, 8)
                    live[one.add(prompt, max_tokens=num)] = (prompt, num)
                case 2 if live:
                    name = rng.choice(sorted(live))
                    end = one.engine.abort(name)
                    if end is not None:
                        one.said.pop(end.slot, None)
                    del live[name]
                case 3:
                    kind = rng.choice(["cut_at", "flip_at", "stall_at"])
                    proxy.to_client.set(**{kind: rng.randrange(3000)})
                case 4:
                    proxy.to_client.set()
                case 5:
                    threading.Event().wait(0.002)
                case _:
                    for station in (one, prefiller):
                        if station.engine.has_work:
                            station.step()
            for name in [name for name in live if name in one.ends]:
                prompt, num = live.pop(name)
                assert one.ends[name].token_ids.tolist() == true_text(prompt, num)
        proxy.to_client.set()
        eventually(lambda: all(name in one.ends for name in live), of=(one, prefiller))
        for name, (prompt, num) in live.items():
            assert one.ends[name].token_ids.tolist() == true_text(prompt, num)
        assert firsts_of(one).get("taken", 0) > 0
        assert set(firsts_of(one)) <= {"taken"}
        check_nothing_is_left(one, prefiller)


class RogueProducer:
    """Listens, lets everybody in, computes nothing; a context manager."""

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
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def response(self, num_tokens: int, num_pushed: int, **more: object) -> PrefillResponse:
        return PrefillResponse(hold_id="rogue", num_tokens=num_tokens, lease_s=30.0, num_pushed=num_pushed, **more)  # type: ignore[arg-type]

    def send_block(self, stream: FrameStream, block_hash: bytes, payload: bytes = b"") -> None:
        data = payload or bytes(self._layout.block_bytes)
        header = pack_header(self._layout, compat=self._identity.compat, block_hash=block_hash, payload=data)
        stream.send_pieces([block_head(header, len(data)), data])

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
                self._on_request(self, stream, request)
                return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for stream in self._streams:
            stream.cut()
        self._thread.join()
