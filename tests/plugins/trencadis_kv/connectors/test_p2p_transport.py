"""What a transport and the connection beside it do for each other, with one that copies within this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.kv.engine_pairs import Station, prompt_of, true_text
from support.kv.memory_transport import MemoryTransport
from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.connectors.p2p.transport import ReceiveBuffer
from trencadis_kv.wire.stream import FrameStream
from trencadis_kv.wire.stream_messages import Taken

PROMPT = prompt_of(1, 41)
NUM_BLOCKS = 10


class Two:
    """A producer and a consumer."""

    def __init__(self, producer: Station, consumer: Station, ways: tuple[MemoryTransport, MemoryTransport]) -> None:
        self.producer, self.consumer = producer, consumer
        self.sends, self.lends = ways

    def pulled(self) -> Any:
        params = self.producer.prefill(PROMPT)
        name = self.consumer.add(PROMPT, max_tokens=12, params=params)

        def is_done() -> bool:
            self.producer.step()
            return name in self.consumer.ends

        self.consumer.until(is_done)
        end = self.consumer.ends[name]
        assert end.token_ids.tolist() == true_text(PROMPT, 12)
        self.producer.until(lambda: self.sends.num_flights == 0)
        return end


@pytest.fixture(params=[True, False], ids=["any thread", "one thread"])
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    ways = MemoryTransport(), MemoryTransport()
    with (
        Station(any_thread=request.param, make=ways[0].make) as producer,
        Station(any_thread=request.param, make=ways[1].make) as consumer,
    ):
        yield Two(producer, consumer, ways)


def test_blocks_land_piece_by_piece_and_the_producer_says_when_it_is_done(two: Two) -> None:
    assert two.consumer.num_found(two.pulled()) == 4 * NUM_BLOCKS
    assert two.sends.written == [2] * 5
    assert two.lends.quiet == [True]
    assert two.producer.node.holds.ends == {"released": 1}


@pytest.mark.parametrize("lack", ["has_landings", "has_flights"])
def test_without_memory_to_spare_bytes_go_over_the_connection(two: Two, lack: str) -> None:
    setattr(two.lends if lack == "has_landings" else two.sends, lack, False)
    assert two.consumer.num_found(two.pulled()) == 4 * NUM_BLOCKS
    assert two.sends.written == []
    assert all(two.lends.quiet)


def test_wrong_bytes_are_refused_and_their_memory_is_not_quiet(two: Two) -> None:
    def spoil(rows: Any) -> None:
        if len(two.sends.written) == 2:
            rows[1, 3] ^= 1

    two.sends.on_write = spoil
    assert two.consumer.num_found(two.pulled()) == 4 * 5, "two pieces and the first block of the third are right"
    assert two.consumer.count("transfer_failures", cause="corrupt") == 1
    assert two.lends.quiet == [False]


def test_write_that_fails_leaves_memory_that_is_not_quiet(two: Two) -> None:
    def fail(_: Any) -> None:
        if len(two.sends.written) == 1:
            raise TransferError("The library took too long.", cause=TransferCause.DEADLINE)

    two.sends.on_write = fail
    assert two.consumer.num_found(two.pulled()) == 4 * 2
    assert two.lends.quiet == [False]


def test_who_gives_back_what_was_not_lent_is_hung_up_on(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    send = FrameStream.send

    def wrong(self: FrameStream, message: Any) -> None:
        send(self, Taken(index=-1) if isinstance(message, Taken) else message)

    monkeypatch.setattr(FrameStream, "send", wrong)
    assert two.consumer.num_found(two.pulled()) == 4 * 4, "what was placed before is used"
    assert two.sends.written == [2, 2], "it went on writing"
    assert two.consumer.count("transfer_failures", cause="unreachable") == 1
    assert two.lends.quiet == [False]


def test_landing_is_not_quiet_before_somebody_says_so() -> None:
    assert ReceiveBuffer.is_quiet is False
