from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from guest_connector import Host

from trencadis.clock import SimulatedClock
from trencadis.records import FinishReason, Request, SamplingParams, TokenDeltas
from trencadis.remote.messages import AddMessage, AliveMessage, MetricsMessage, WorkMessage, encode
from trencadis_testing.fakes import fake_text

PROMPT = (5, 6, 7)
EMPTY = np.empty(0, np.int32)


def request(name: str, num_tokens: int = 5, prompt: tuple[int, ...] = PROMPT) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(max_tokens=num_tokens))


def test_tokens_come_under_the_ticket_of_their_request(open_line: Callable[..., Any]) -> None:
    line = open_line()
    tickets = {line.client.add(request(name, prompt=(5, n))): (5, n) for n, name in enumerate("abc")}
    got: dict[int, list[int]] = {ticket: [] for ticket in tickets}
    for deltas in line.settle():
        start = 0
        for ticket, count in zip(deltas.slots, deltas.num_tokens, strict=True):
            got[ticket] += deltas.token_ids[start : start + count]
            start += count
    assert got == {ticket: fake_text(prompt, 5, vocab_size=4096, eos=-1) for ticket, prompt in tickets.items()}


def test_more_requests_than_the_table_of_slots_has_at_first(open_line: Callable[..., Any]) -> None:
    line = open_line()
    for number in range(300):
        line.client.add(request(str(number), 1))
    ended = {finished.request_id for deltas in line.settle() for finished in deltas.finished}
    assert ended == {str(number) for number in range(300)}


def test_an_impossible_request_is_refused_and_the_host_goes_on(open_line: Callable[..., Any]) -> None:
    line = open_line()
    # What a client of ours never sends: parameters that cannot be.
    line.link.send(
        AddMessage(
            ticket=7,
            request_id="bad",
            prompt_token_ids=b"\5\0\0\0",
            params={"top_p": 9.0},
            priority=0,
            tenant="",
            cache_salt="",
        )
    )
    line.client.add(request("good"))
    assert [end.finish_reason for deltas in line.settle() for end in deltas.finished] == [FinishReason.LENGTH]
    assert line.host.num_live == 0


def test_a_host_with_work_and_without_news_shows_that_it_is_alive(
    open_line: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimulatedClock()
    line = open_line(clock=clock)
    line.client.add(request("a", 200))
    nothing = TokenDeltas(slots=EMPTY, num_tokens=EMPTY, token_ids=EMPTY)
    monkeypatch.setattr(line.engine, "step", lambda: nothing)  # as if it waited for a connector
    assert line.far.wait(60) == []
    line.host.turn()
    for _ in range(4):
        clock.advance(0.6)
        line.host.turn()
    line.far.send(encode(MetricsMessage(text="last")))
    seen: list[Any] = []
    while MetricsMessage(text="last") not in seen:
        seen += line.link.receive(10, has_work=False)
    assert seen[:-1] == [AliveMessage()] * 2


def test_without_work_nothing_is_sent(open_line: Callable[..., Any]) -> None:
    clock = SimulatedClock()
    line = open_line(clock=clock)
    for _ in range(4):
        clock.advance(5)
        line.host.turn()
    assert line.link.receive(0.01, has_work=False) == []


def test_work_that_no_client_asked_for_is_announced_before_it_is_done(open_line: Callable[..., Any]) -> None:
    """A step that hangs says nothing any more."""
    host = Host()
    line = open_line(connector=host.pair())
    host.new = [request("guest", 3)]
    seen: list[Any] = []
    step = line.engine.step
    line.engine.step = lambda: (seen.extend(line.link.receive(10, has_work=False)), step())[1]
    line.host.turn()
    line.engine.step = step
    assert seen == [WorkMessage(has_work=True)]
    while line.engine.has_work:
        line.host.turn()
    assert line.link.receive(10, has_work=False) == [WorkMessage(has_work=False)]
    assert [name for name, _, _ in host.ends] == ["guest"]


def test_work_of_the_client_is_not_announced(open_line: Callable[..., Any]) -> None:
    line = open_line()
    seen: list[Any] = []
    receive = line.link.receive
    line.link.receive = lambda *args, **more: (seen.extend(one := receive(*args, **more)), one)[1]
    line.client.add(request("a"))
    line.settle()
    assert seen
    assert not any(isinstance(message, WorkMessage) for message in seen)
