"""Blocks that are sent along with an offer: memory for them, and everything that can come instead of them."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from faultproxy import FaultProxy
from kv_pairs import Station, prompt_of, true_text
from rogue_producer import RogueProducer

from trencadis.engine.first_token_terms import SamplingTerms
from trencadis.errors import TransferError
from trencadis.interfaces import ConnectorPair
from trencadis.kv.stream import FrameStream
from trencadis.kv.stream_messages import Commit, Invite, Token
from trencadis.records import FinishedSequence, TransferCause
from trencadis_plugins.kv_connector.p2p_push import Push, Pushes
from trencadis_testing.kv_watch import TicketBooks, watched

BLOCK_BYTES = 96
PROMPT = prompt_of(1, 41)
NUM_BLOCKS = 10
HASHES = [bytes([i]) * 32 for i in range(6)]
PATIENCE_S = 60.0


def eventually(condition: Callable[[], bool], *, of: Sequence[Station] = ()) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s, "it never happens"
        for station in of:
            if station.engine.has_work:
                station.step()
        threading.Event().wait(0.001)


# ------------------------------------------------------------------------------------------------------- memory


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def test_memory_is_set_aside_up_to_the_limit_and_comes_back_once() -> None:
    pushes = Pushes(5 * BLOCK_BYTES)
    first = pushes.open(HASHES[:4], block_bytes=BLOCK_BYTES)
    second = pushes.open(HASHES[:4], block_bytes=BLOCK_BYTES)
    assert first is not None
    assert second is not None
    assert (len(first.hashes), len(second.hashes)) == (4, 1)
    assert pushes.num_bytes == first.num_bytes + second.num_bytes == 5 * BLOCK_BYTES
    assert pushes.open(HASHES, block_bytes=BLOCK_BYTES) is None
    assert pushes.open([], block_bytes=BLOCK_BYTES) is None
    for _ in range(2):
        first.close()
        first.end()
    assert pushes.num_bytes == BLOCK_BYTES


def test_memory_is_free_only_when_neither_side_uses_it() -> None:
    pushes = Pushes(BLOCK_BYTES)
    for close_first in (True, False):
        push = pushes.open(HASHES, block_bytes=BLOCK_BYTES)
        assert push is not None
        steps = [push.close, push.end] if close_first else [push.end, push.close]
        steps[0]()
        assert pushes.num_bytes == BLOCK_BYTES, "the other may still touch it"
        steps[1]()
        assert pushes.num_bytes == 0


def push_of(num_blocks: int) -> Push:
    push = Pushes(1 << 20).open(HASHES[:num_blocks], block_bytes=BLOCK_BYTES)
    assert push is not None
    return push


def test_blocks_are_taken_as_they_come() -> None:
    push = push_of(3)
    push.begin(3, lambda: None)
    for index in range(3):
        push.row(index)[:] = index
        push.came()
        assert push.wait(index, until_s=soon())[:, 0].tolist() == list(range(index + 1))
    assert len(push.wait(3, until_s=soon())) == 3, "no more are due, although nobody has said the end"


@pytest.mark.parametrize("how", ["end", "close", "fewer", "time"])
def test_nobody_waits_for_what_does_not_come(how: str) -> None:
    push = push_of(3)
    push.begin(3, lambda: None)
    push.came()
    found: list[int] = []
    until_s = time.monotonic() + 0.05 if how == "time" else soon()
    waiter = threading.Thread(target=lambda: found.append(len(push.wait(1, until_s=until_s))))
    waiter.start()
    if how == "end":
        push.end(TransferError("broken", cause=TransferCause.UNREACHABLE))
    elif how == "close":
        push.close()
    elif how == "fewer":
        push.begin(1, lambda: None)
    waiter.join(PATIENCE_S)
    assert found == [0 if how == "close" else 1]


def test_closing_cuts_what_comes_unless_all_is_there() -> None:
    cuts: list[str] = []
    for name, num_there in (("some", 1), ("all", 2)):
        push = push_of(2)
        push.begin(2, lambda name=name: cuts.append(name))  # type: ignore[misc]
        for _ in range(num_there):
            push.came()
        push.close()
        with pytest.raises(TransferError):
            push.row(0)
    late = push_of(2)
    late.close()
    late.begin(2, lambda: cuts.append("late"))
    assert cuts == ["some", "late"]


def test_push_is_taken_by_its_ticket_once_and_what_is_left_is_closed() -> None:
    pushes = Pushes(1 << 20)
    one, two = (pushes.open(HASHES, block_bytes=BLOCK_BYTES) for _ in range(2))
    assert one is not None
    assert two is not None
    pushes.name("a", one)
    pushes.name("b", two)
    assert pushes.take("a") is one
    assert pushes.take("a") is None
    pushes.close()
    assert (one.is_closed, two.is_closed) == (False, True)


# ------------------------------------------------------------------------------------------------------ engines


@contextlib.contextmanager
def decoder(*ports: int, **config: Any) -> Iterator[Station]:
    """Have an engine that lets engines at these ports compute its prompts; it knows all of them."""
    names = tuple(f"127.0.0.1:{port}" for port in ports)
    books: list[TicketBooks] = []

    def watch(pair: ConnectorPair) -> ConnectorPair:
        pair, found = watched(pair)
        books.append(found)
        return pair

    given = {"min_remote_tokens": 8, "heartbeat_s": 60.0, "wrap": watch, **config}
    with Station(prefill_engines=names, **given) as one:
        one.books = books[0]  # type: ignore[attr-defined]
        eventually(lambda: len(one.node.registry.ready()) == len(ports))
        yield one


def port_of(station: Station) -> int:
    port: int = station.node.server.port
    return port


def serve(one: Station, *others: Station, prompt: tuple[int, ...] = PROMPT) -> FinishedSequence:
    name = one.add(prompt, max_tokens=6)
    eventually(lambda: name in one.ends, of=(one, *others))
    return one.ends[name]


def firsts_of(one: Station) -> dict[str, int]:
    return dict(one.engine._state.transfers.first_tokens.results)


def check_nothing_is_left(one: Station, *others: Station) -> None:
    eventually(lambda: one.node.pushes.num_bytes == 0, of=(one, *others))
    assert one.node.pushes._by_name == {}
    eventually(lambda: not one.engine.has_work, of=(one, *others))
    assert one.books.faults() == []  # type: ignore[attr-defined]
    eventually(lambda: not any(s.num_used_blocks for s in (one, *others)), of=(one, *others))
    for station in (one, *others):
        assert station.engine._state.blocks.num_used == 0
        assert station.node.holds.num_holds == 0


@pytest.fixture(params=[True, False], ids=["any thread", "one thread"])
def prefiller(request: pytest.FixtureRequest) -> Iterator[Station]:
    with Station(any_thread=request.param) as one:
        yield one


def test_blocks_and_the_first_token_come_without_being_asked_for(prefiller: Station) -> None:
    with decoder(port_of(prefiller), any_thread=prefiller.pair.worker._node.pool.any_thread) as one:  # type: ignore[attr-defined]
        end = serve(one, prefiller)
        assert end.token_ids.tolist() == true_text(PROMPT, 6)
        assert end.num_cached_tokens == 4 * NUM_BLOCKS
        assert firsts_of(one) == {"taken": 1}
        assert one.count("offered_tokens", token="given") == 1
        assert prefiller.count("pushed_bytes", end="sent") == BLOCK_BYTES * NUM_BLOCKS
        assert one.count("tokens", direction="load") == 4 * NUM_BLOCKS
        eventually(lambda: one.count("pushed_bytes", end="received") == BLOCK_BYTES * NUM_BLOCKS)
        assert one.count("invites", result="served") == 1
        check_nothing_is_left(one, prefiller)
        assert prefiller.node.holds.ends == {"released": 1}


def test_only_what_is_not_here_is_sent(prefiller: Station) -> None:
    with decoder(port_of(prefiller)) as one:
        serve(one, prefiller, prompt=PROMPT[:18])
        eventually(lambda: prefiller.count("pushed_bytes", end="sent") == BLOCK_BYTES * 4)
        sent = BLOCK_BYTES * 4
        assert serve(one, prefiller).token_ids.tolist() == true_text(PROMPT, 6)
        eventually(lambda: prefiller.count("pushed_bytes", end="sent") - sent == BLOCK_BYTES * (NUM_BLOCKS - 4))
        check_nothing_is_left(one, prefiller)


@pytest.mark.parametrize("num_blocks", [0, 1, 4, 9])
def test_what_there_is_no_memory_for_is_pulled(prefiller: Station, num_blocks: int) -> None:
    with decoder(port_of(prefiller), max_pushed_bytes=num_blocks * BLOCK_BYTES + 5) as one:
        end = serve(one, prefiller)
        assert (end.token_ids.tolist(), end.num_cached_tokens) == (true_text(PROMPT, 6), 4 * NUM_BLOCKS)
        assert prefiller.count("pushed_bytes", end="sent") == num_blocks * BLOCK_BYTES
        assert prefiller.count("tokens", direction="send") == 4 * NUM_BLOCKS, "each once"
        check_nothing_is_left(one, prefiller)


@pytest.mark.parametrize("switched_off", ["here", "there"])
def test_who_does_not_push_is_pulled_from(prefiller: Station, switched_off: str) -> None:
    with (
        Station(push=switched_off != "there") as other,
        decoder(port_of(other), push=switched_off != "here") as one,
    ):
        end = serve(one, other)
        assert (end.token_ids.tolist(), end.num_cached_tokens) == (true_text(PROMPT, 6), 4 * NUM_BLOCKS)
        assert other.count("pushed_bytes", end="sent") == 0
        assert firsts_of(one) == {"taken": 1}
        check_nothing_is_left(one, other)


def test_prefix_by_layer_is_pulled_and_its_token_is_taken(prefiller: Station) -> None:
    with decoder(port_of(prefiller), layerwise=True) as one:
        assert serve(one, prefiller).token_ids.tolist() == true_text(PROMPT, 6)
        assert prefiller.count("pushed_bytes", end="sent") == 0
        check_nothing_is_left(one, prefiller)


# ---------------------------------------------------------------------------------------------------- the token


@pytest.mark.parametrize("switched_off", ["here", "there", "other rules", "cannot be told"])
def test_token_that_cannot_be_chosen_there_is_chosen_here(switched_off: str) -> None:
    rules = {"first_token_terms": SamplingTerms(b"another", lambda _: True)}
    untold = {"first_token_terms": SamplingTerms(b"fake", lambda _: False)}
    with (
        Station(first_token=switched_off != "there", engine=rules if switched_off == "other rules" else {}) as other,
        decoder(
            port_of(other),
            first_token=switched_off != "here",
            engine=untold if switched_off == "cannot be told" else {},
        ) as one,
    ):
        assert serve(one, other).token_ids.tolist() == true_text(PROMPT, 6)
        assert firsts_of(one) == {}
        is_asked = switched_off in ("there", "other rules")
        assert one.count("offered_tokens", token="none") == is_asked
        assert one.count("offered_tokens", token="unasked") == (not is_asked)
        check_nothing_is_left(one, other)


def test_token_stands_when_its_blocks_are_lost_and_nobody_else_is_asked_for_it(prefiller: Station) -> None:
    """The second engine computes the prompt again, for its blocks alone."""
    with Station() as first, decoder(port_of(first), port_of(prefiller), push=False) as one:
        for engine in one.node.registry.engines:
            engine.affinity = lambda _, port=engine.port: float(port == port_of(first))
        name = one.add(PROMPT, max_tokens=6)
        errands = one.pair.scheduler._delegation._errands  # type: ignore[attr-defined]

        def is_offered() -> bool:
            if not errands:
                one.step()
            return any(errand.invitation.prefix is not None for errand in errands.values())

        eventually(is_offered, of=(first,))
        (hold,) = first.node.holds._by_name
        first.node.holds.release(hold)
        eventually(lambda: name in one.ends, of=(one, first, prefiller))
        assert one.ends[name].token_ids.tolist() == true_text(PROMPT, 6)
        assert one.ends[name].num_cached_tokens == 4 * NUM_BLOCKS
        assert (one.count("offered_tokens", token="given"), one.count("offered_tokens", token="unasked")) == (1, 1)
        assert firsts_of(one) == {"taken": 1}
        check_nothing_is_left(one, first, prefiller)


def test_request_that_ends_with_its_first_token_lets_everything_go(prefiller: Station) -> None:
    with decoder(port_of(prefiller)) as one:
        name = one.add(PROMPT, max_tokens=1)
        eventually(lambda: name in one.ends, of=(one, prefiller))
        assert one.ends[name].token_ids.tolist() == true_text(PROMPT, 1)
        assert one.count("tokens", direction="load") == prefiller.count("pushed_bytes", end="sent") == 0
        assert one.count("invites", result="served") == 1
        check_nothing_is_left(one, prefiller)
        assert prefiller.node.holds.ends == {"released": 1}


# ------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("at", [200, 380, 700, 1500, 2300])
@pytest.mark.parametrize("fault", ["cut_at", "flip_at", "stall_at"])
def test_fault_on_the_way_costs_time_and_no_text(fault: str, at: int) -> None:
    """The first 150 bytes are greeting and offer; each block is 232 bytes with its heads."""
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
        assert (end.token_ids.tolist(), end.num_cached_tokens) == (true_text(PROMPT, 6), 4 * NUM_BLOCKS)
        assert one.count("transfer_failures", cause="corrupt") == 1
        assert firsts_of(one) == {"taken": 1}
        check_nothing_is_left(one, prefiller)


@contextlib.contextmanager
def invited(
    on_invite: Callable[[RogueProducer, FrameStream, Invite], None], **config: Any
) -> Iterator[tuple[Station, RogueProducer]]:
    """Have an engine whose only prefill engine does as a test says."""
    with Station() as like:
        identity, layout = attrs.evolve(like.node.identity, engine="rogue"), like.node.pool.layout
    with RogueProducer(identity, layout, on_invite) as rogue, decoder(rogue.port, **config) as one:
        yield one, rogue


def _others_blocks(rogue: RogueProducer, stream: FrameStream, invite: Invite) -> None:
    stream.send(rogue.offer(40, NUM_BLOCKS))
    for index in range(NUM_BLOCKS):
        rogue.send_block(stream, bytes([index]) * 32)
    stream.send(Commit(num_blocks=NUM_BLOCKS))


def _more_than_there_is_room_for(rogue: RogueProducer, stream: FrameStream, invite: Invite) -> None:
    stream.send(rogue.offer(40, 1 + invite.push_bytes // BLOCK_BYTES))


def _no_offer_at_all(rogue: RogueProducer, stream: FrameStream, invite: Invite) -> None:
    rogue.send_block(stream, bytes(32))


def _a_negative_number(rogue: RogueProducer, stream: FrameStream, invite: Invite) -> None:
    stream.send(rogue.offer(40, -1))


@pytest.mark.parametrize(
    "on_invite", [_others_blocks, _more_than_there_is_room_for, _no_offer_at_all, _a_negative_number]
)
def test_producer_that_sends_what_nobody_wants_is_hung_up_on(
    on_invite: Callable[[RogueProducer, FrameStream, Invite], None],
) -> None:
    with invited(on_invite) as (one, _):
        assert serve(one).token_ids.tolist() == true_text(PROMPT, 6)
        assert one.count("transfer_failures", cause="corrupt") == 1
        assert one.count("pushed_bytes", end="received") == 0
        assert one.count("tokens", direction="load") == 0
        check_nothing_is_left(one)


def test_blocks_that_nobody_has_room_for_are_refused_before_one_is_read() -> None:
    with invited(_others_blocks, push=False) as (one, rogue):
        assert serve(one).token_ids.tolist() == true_text(PROMPT, 6)
        assert [invite.push_bytes for invite in rogue.invites] == [0]
        assert one.count("transfer_failures", cause="corrupt") == 1


def test_one_block_more_than_was_said_breaks_the_connection_and_those_before_count() -> None:
    """What is verified is what it says: these are the right blocks, with the entries that the model would have made."""
    prompt = PROMPT

    with Station() as like:
        like.serve(prompt, max_tokens=1)
        sequence_hashes: list[bytes] = []
        state = like.engine._state
        state.hasher.extend(sequence_hashes, np.array(prompt, np.int32), num_blocks=NUM_BLOCKS, salt="", adapter="")
        blocks = state.blocks.longest_hit(sequence_hashes)
        rows = np.empty((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
        like.node.pool.read(blocks, rows, timeout_s=1.0)

    def on_invite(rogue: RogueProducer, stream: FrameStream, invite: Invite) -> None:
        stream.send(rogue.offer(40, 3))
        for index in range(4):
            rogue.send_block(stream, sequence_hashes[index], rows[index].tobytes())
        stream.send(Commit(num_blocks=4))

    with invited(on_invite) as (one, rogue):
        end = serve(one)
        assert (end.token_ids.tolist(), end.num_cached_tokens) == (true_text(PROMPT, 6), 12)
        assert one.count("transfer_failures", cause="corrupt") == 1
        assert rogue.num_pulls == 1, "the rest is asked for"
        check_nothing_is_left(one)


def test_producer_that_dies_while_it_sends_costs_no_text() -> None:
    def on_invite(rogue: RogueProducer, stream: FrameStream, invite: Invite) -> None:
        stream.send(rogue.offer(40, NUM_BLOCKS, token=Token(token_id=true_text(PROMPT, 1)[0])))
        rogue.vanish()

    with invited(on_invite) as (one, _):
        assert serve(one).token_ids.tolist() == true_text(PROMPT, 6)
        assert firsts_of(one) == {"taken": 1}
        check_nothing_is_left(one)


def test_token_of_no_vocabulary_is_refused() -> None:
    def on_invite(rogue: RogueProducer, stream: FrameStream, invite: Invite) -> None:
        stream.send(rogue.offer(40, 0, token=Token(token_id=1 << 40)))

    with invited(on_invite) as (one, _):
        assert serve(one).token_ids.tolist() == true_text(PROMPT, 6)
        assert firsts_of(one) == {"vocabulary": 1}
        check_nothing_is_left(one)


def test_token_that_nobody_asked_for_is_not_looked_at() -> None:
    def on_invite(rogue: RogueProducer, stream: FrameStream, invite: Invite) -> None:
        assert invite.terms == b""
        stream.send(rogue.offer(40, 0, token=Token(token_id=3)))

    with invited(on_invite, first_token=False) as (one, _):
        assert serve(one).token_ids.tolist() == true_text(PROMPT, 6)
        assert firsts_of(one) == {}


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
            eventually(lambda: one.engine._state.transfers.num_parked == 1, of=(one,))
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
            eventually(lambda: one.engine._state.transfers.num_parked == 1, of=(one,))
            closing = threading.Thread(target=one.engine.close, daemon=True)
            closing.start()
            closing.join(PATIENCE_S)
            assert not closing.is_alive()
        assert one.node.pushes.num_bytes == 0


def test_many_at_once_share_the_memory_and_say_what_they_say_alone() -> None:
    prompts = [prompt_of(seed, 41) for seed in range(2, 10)]
    with (
        Station(num_blocks=120) as prefiller,
        decoder(port_of(prefiller), max_pushed_bytes=25 * BLOCK_BYTES, num_blocks=120) as one,
    ):
        names = [one.add(prompt, max_tokens=4) for prompt in prompts]

        def are_done() -> bool:
            assert one.node.pushes.num_bytes <= 25 * BLOCK_BYTES
            return all(name in one.ends for name in names)

        eventually(are_done, of=(one, prefiller))
        assert [one.ends[name].token_ids.tolist() for name in names] == [true_text(prompt, 4) for prompt in prompts]
        check_nothing_is_left(one, prefiller)


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
