"""Requests of the KV connector run like everybody's, and nobody else hears of them."""

from __future__ import annotations

from typing import Any

import pytest

from support.core.invariants import broken_invariants
from support.kv.prefill_connector import Host
from trencadis.engine.engine import Engine
from trencadis.interfaces import ConnectorPair
from trencadis.records import Request, SamplingParams
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend, fake_text


def engine_of(pair: ConnectorPair, **options: Any) -> Engine:
    return make_engine(connector=pair, backend=FakeBackend(eos=-1, max_model_len=64), **options)


def request(name: str, start: int, *, max_tokens: int = 1, logprobs: int | None = None) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(range(start, start + 9)),
        params=SamplingParams(max_tokens=max_tokens, logprobs=logprobs),
    )


def run(engine: Engine) -> dict[int, list[int]]:
    """Return the tokens that came, by slot."""
    said: dict[int, list[int]] = {}
    for _ in range(100):
        if not engine.has_work:
            return said
        deltas = engine.step()
        tokens = iter(deltas.token_ids.tolist())
        for slot, num in zip(deltas.slots.tolist(), deltas.num_tokens.tolist(), strict=True):
            said.setdefault(slot, []).extend(next(tokens) for _ in range(num))
        assert not list(tokens), "tokens that belong to nobody"
        assert all(entry.index < len(deltas.slots) for entry in deltas.logprobs)
        assert not [one for one in deltas.finished if one.request_id.startswith("remote")]
        assert broken_invariants(engine) == []
    raise AssertionError("it does not come to rest")


def test_guests_run_beside_clients_who_get_their_own_tokens_only() -> None:
    host = Host()
    engine = engine_of(host.pair())
    host.new = [request("remote 1", 5), request("remote 2", 20, max_tokens=6)]
    slots = [engine.add(request(f"r{i}", 30 + i, max_tokens=4)) for i in range(2)]
    said = run(engine)
    assert said == {slot: fake_text(list(range(30 + i, 39 + i)), 4, eos=-1) for i, slot in enumerate(slots)}
    assert host.ends == [("remote 1", True, ""), ("remote 2", True, "")]
    assert engine.totals.num_finished == 4


def test_engine_that_rests_has_work_once_a_guest_is_there() -> None:
    host = Host()
    engine = engine_of(host.pair())
    woken: list[bool] = []
    engine.wake_by(lambda: woken.append(engine.has_work))
    assert not engine.has_work
    host.new = [request("remote", 5)]
    assert woken == [True]
    assert run(engine) == {}
    assert host.ends == [("remote", True, "")]


def test_guest_that_is_refused_ends_with_the_reason() -> None:
    host = Host()
    engine = engine_of(host.pair())
    host.new = [Request(request_id="remote", prompt_token_ids=tuple(range(1, 80)))]
    run(engine)
    ((name, has_params, error),) = host.ends
    assert (name, has_params) == ("remote", False)
    assert "remote" in error


@pytest.mark.parametrize("num_steps", [0, 2])
def test_guest_that_is_withdrawn_ends_at_once_and_frees_its_blocks(num_steps: int) -> None:
    host = Host()
    engine = engine_of(host.pair())
    host.new = [request("remote", 5, max_tokens=30)]
    for _ in range(num_steps):
        engine.step()
    host.withdrawn = ["remote", "never seen"]
    run(engine)
    assert host.ends == [("remote", False, "it was withdrawn")]
    assert engine.inspect().blocks.num_used == 0


def test_log_probabilities_stay_with_their_sequence() -> None:
    host = Host()
    backend = FakeBackend(eos=-1, max_model_len=64)
    engine = make_engine(connector=host.pair(), backend=backend)
    host.new = [request("remote", 5, max_tokens=6)]
    slot = engine.add(request("mine", 30, max_tokens=4, logprobs=1))
    for _ in range(20):
        deltas = engine.step()
        for entry in deltas.logprobs:
            assert deltas.slots[entry.index] == slot
            assert entry.token_id == deltas.token_ids[entry.index]


def test_connector_is_told_what_waits_of_everybody_and_when_nothing_does() -> None:
    host = Host()
    engine = engine_of(host.pair(), max_num_seqs=2, max_num_batched_tokens=16)
    assert host.backlogs == []
    engine.step()
    assert host.backlogs == [], "nothing has changed"
    for number in range(3):
        engine.add(Request(request_id=str(number), prompt_token_ids=range(1, 21), params=SamplingParams(max_tokens=1)))
    host.new = [Request(request_id="remote", prompt_token_ids=range(1, 11), params=SamplingParams(max_tokens=1))]
    engine.step()
    assert host.backlogs[0] == 3 * 20 + 10
    while engine.has_work:
        engine.step()
    assert host.backlogs[-1] == 0
    assert all(after != before for before, after in zip(host.backlogs, host.backlogs[1:], strict=False))
    assert host.backlogs == sorted(host.backlogs, reverse=True), "nobody came, so it became less"


def test_connector_is_told_the_first_token_of_each_of_its_requests_once_and_before_its_end() -> None:
    host = Host()
    engine = engine_of(host.pair(), max_num_batched_tokens=16)
    host.new = [request("remote 1", 5, logprobs=2), request("remote 2", 20, max_tokens=6), request("remote 3", 40)]
    engine.add(request("client", 30, max_tokens=4, logprobs=1))
    run(engine)
    assert {name: first.token_id for name, first in host.firsts} == {
        f"remote {i}": fake_text(list(range(start, start + 9)), 1, eos=-1)[0] for i, start in ((1, 5), (2, 20), (3, 40))
    }
    assert len(host.firsts) == 3
    entries = {name: first.logprobs for name, first in host.firsts}
    assert (entries["remote 2"], entries["remote 3"]) == (None, None)
    entry = entries["remote 1"]
    assert entry is not None
    assert (entry.token_id, entry.position, len(entry.top_token_ids)) == (dict(host.firsts)["remote 1"].token_id, 9, 2)
    assert host.order.index("token of remote 1") < host.order.index("end of remote 1")


def test_guest_in_the_slot_of_one_that_was_withdrawn_has_its_own_token() -> None:
    host = Host()
    engine = engine_of(host.pair())
    host.new = [request("remote 1", 5)]
    engine.stage("transfer").before_step()
    host.withdrawn, host.new = ["remote 1"], [request("remote 2", 20)]
    run(engine)
    ((name, first),) = host.firsts
    assert (name, first.token_id) == ("remote 2", fake_text(list(range(20, 29)), 1, eos=-1)[0])
