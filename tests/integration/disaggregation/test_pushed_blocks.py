"""Blocks and first tokens that come along with a response, between engines in one process that are stepped by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.eventually import eventually
from support.kv.engine_pairs import Station, true_text
from support.kv.push_scene import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    PROMPT,
    check_nothing_is_left,
    decoder,
    firsts_of,
    port_of,
    serve,
)
from trencadis.engine.sampling.fingerprint import EngineFingerprint


@pytest.fixture(params=[True, False], ids=["any thread", "one thread"])
def prefiller(request: pytest.FixtureRequest) -> Iterator[Station]:
    with Station(any_thread=request.param) as one:
        yield one


def test_blocks_and_the_first_token_come_without_being_asked_for(prefiller: Station) -> None:
    with decoder(port_of(prefiller), any_thread=prefiller.pair.worker._node.pool.any_thread) as one:  # type: ignore[attr-defined]
        end = serve(one, prefiller)
        assert end.token_ids.tolist() == true_text(PROMPT, 6)
        assert one.num_found(end) == 4 * NUM_BLOCKS
        assert firsts_of(one) == {"taken": 1}
        assert one.count("prefill_responses", token="given") == 1
        assert prefiller.count("pushed_bytes", end="sent") == BLOCK_BYTES * NUM_BLOCKS
        assert one.count("tokens", direction="load") == 4 * NUM_BLOCKS
        eventually(lambda: one.count("pushed_bytes", end="received") == BLOCK_BYTES * NUM_BLOCKS)
        assert one.count("delegated_prefills", result="served") == 1
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
        assert (end.token_ids.tolist(), one.num_found(end)) == (true_text(PROMPT, 6), 4 * NUM_BLOCKS)
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
        assert (end.token_ids.tolist(), one.num_found(end)) == (true_text(PROMPT, 6), 4 * NUM_BLOCKS)
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
    rules = {"sampling_fingerprint": EngineFingerprint(b"another", lambda _: True)}
    untold = {"sampling_fingerprint": EngineFingerprint(b"fake", lambda _: False)}
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
        assert one.count("prefill_responses", token="none") == is_asked
        assert one.count("prefill_responses", token="unasked") == (not is_asked)
        check_nothing_is_left(one, other)


def test_token_stands_when_its_blocks_are_lost_and_nobody_else_is_asked_for_it(prefiller: Station) -> None:
    """The second engine computes the prompt again, for its blocks alone."""
    with Station() as first, decoder(port_of(first), port_of(prefiller), push=False) as one:
        for engine in one.node.prefill_pool.engines:
            engine.affinity = lambda _, port=engine.port: float(port == port_of(first))
        name = one.add(PROMPT, max_tokens=6)
        delegated = one.pair.scheduler._delegation._delegated  # type: ignore[attr-defined]

        def is_offered() -> bool:
            if not delegated:
                one.step()
            return any(one_delegated.prefill.prefix is not None for one_delegated in delegated.values())

        eventually(is_offered, of=(first,))
        (hold,) = first.node.holds._by_name
        first.node.holds.release(hold)
        eventually(lambda: name in one.ends, of=(one, first, prefiller))
        assert one.ends[name].token_ids.tolist() == true_text(PROMPT, 6)
        assert one.num_found(one.ends[name]) == 4 * NUM_BLOCKS
        assert (one.count("prefill_responses", token="given"), one.count("prefill_responses", token="unasked")) == (
            1,
            1,
        )
        assert firsts_of(one) == {"taken": 1}
        check_nothing_is_left(one, first, prefiller)


def test_request_that_ends_with_its_first_token_lets_everything_go(prefiller: Station) -> None:
    with decoder(port_of(prefiller)) as one:
        name = one.add(PROMPT, max_tokens=1)
        eventually(lambda: name in one.ends, of=(one, prefiller))
        assert one.ends[name].token_ids.tolist() == true_text(PROMPT, 1)
        assert one.count("tokens", direction="load") == prefiller.count("pushed_bytes", end="sent") == 0
        assert one.count("delegated_prefills", result="served") == 1
        check_nothing_is_left(one, prefiller)
        assert prefiller.node.holds.ends == {"released": 1}
