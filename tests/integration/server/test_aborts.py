"""Clients that leave at every moment: afterwards nothing is live, every block is free, and the others got what was theirs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule, run_state_machine_as_test

from support.core.paced_backend import VOCAB_SIZE, num_used_blocks, opener
from support.server.live_server import LiveServer, running
from support.server.raw_client import RawClient, body_of, status_of
from trencadis_testing.fakes import fake_text

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MAX_MODEL_LEN = 60_000
AT_REST_S = 30
"""A request of as many tokens as the model takes would run for longer."""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with running(opener(step_s=0.001, max_model_len=MAX_MODEL_LEN, num_blocks=MAX_MODEL_LEN)) as running_server:
        yield running_server


def make_machine(server: LiveServer) -> type[RuleBasedStateMachine]:
    class Clients(RuleBasedStateMachine):
        asked = Bundle("asked")
        endless = Bundle("endless")

        def __init__(self) -> None:
            super().__init__()
            self.clients: list[RawClient] = []

        def connect(self) -> RawClient:
            self.clients.append(RawClient(server.port))
            return self.clients[-1]

        @rule(
            target=asked,
            prompt=st.lists(st.integers(1, VOCAB_SIZE - 1), min_size=1, max_size=20),
            num_tokens=st.integers(1, 120),
            n=st.sampled_from([1, 1, 3]),
            streams=st.booleans(),
        )
        def ask_to_continue(self, prompt: list[int], num_tokens: int, n: int, streams: bool) -> object:
            client = self.connect()
            body = {"prompt": prompt, "max_tokens": num_tokens, "n": n, "stream": streams, "return_token_ids": True}
            client.post(COMPLETIONS, {"model": "demo", "temperature": 0, **body})
            return client, prompt, num_tokens, n, streams

        @rule(target=asked, num_tokens=st.integers(1, 60), streams=st.booleans())
        def ask_to_chat(self, num_tokens: int, streams: bool) -> object:
            client = self.connect()
            messages = [{"role": "user", "content": "hi"}]
            client.post(CHAT, {"model": "demo", "messages": messages, "max_tokens": num_tokens, "stream": streams})
            return client, None, num_tokens, 1, streams

        @rule(
            target=endless, n=st.sampled_from([1, 2]), streams=st.booleans(), path=st.sampled_from([CHAT, COMPLETIONS])
        )
        def ask_for_more_than_anybody_waits_for(self, n: int, streams: bool, path: str) -> RawClient:
            client = self.connect()
            text = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": [5, 6]}
            client.post(path, {"model": "demo", "n": n, "stream": streams, "max_tokens": MAX_MODEL_LEN - 100, **text})
            return client

        @rule(client=endless, num_bytes=st.integers(1, 3000))
        def read_some_of_that(self, client: RawClient, num_bytes: int) -> None:
            client.socket.settimeout(0.01)
            with contextlib.suppress(TimeoutError):
                client.read(num_bytes)

        @rule(client=consumes(endless), rudely=st.booleans())
        def leave_that(self, client: RawClient, rudely: bool) -> None:
            client.leave(rudely=rudely)

        @rule(path=st.sampled_from([CHAT, COMPLETIONS, "/v1/embeddings"]), num_bytes=st.integers(0, 150))
        def leave_before_the_request_is_whole(self, path: str, num_bytes: int) -> None:
            client = self.connect()
            client.post(path, {"model": "demo", "prompt": "x", "input": "x"}, num_bytes=num_bytes)
            client.leave(rudely=bool(num_bytes % 2))

        @rule(one=asked, num_bytes=st.integers(1, 3000))
        def read_some(self, one: tuple[RawClient, ...], num_bytes: int) -> None:
            one[0].read(num_bytes)

        @rule(one=consumes(asked), rudely=st.booleans())
        def leave(self, one: tuple[RawClient, ...], rudely: bool) -> None:
            one[0].leave(rudely=rudely)

        @rule(one=consumes(asked))
        def read_to_the_end(self, one: tuple[RawClient, list[int] | None, int, int, bool]) -> None:
            client, prompt, num_tokens, n, streams = one
            answer = client.read_all()
            assert status_of(answer) == 200, answer
            choices = (_streamed if streams else _whole)(body_of(answer), n)
            if prompt is not None:
                expected = fake_text(prompt, num_tokens, vocab_size=VOCAB_SIZE)
                assert choices == [expected] * n

        def teardown(self) -> None:
            for client in self.clients:
                client.leave()
            # All at once: what the last client sent may come in after one of them was looked at.
            server.wait_until(lambda: not any(held(server)), timeout_s=AT_REST_S)

    return Clients


def held(server: LiveServer) -> tuple[int, ...]:
    """Return what a server holds for its clients: nothing, once they have left."""
    llm, admission = server.supervisor.llm, server.admission
    return (
        server.gate.num_inside,
        llm.num_live,
        num_used_blocks(llm),
        admission.num_requests,
        admission.num_waiting_tokens,
    )


def _whole(body: bytes, n: int) -> list[list[int]]:
    choices = json.loads(body)["choices"]
    assert [choice["index"] for choice in choices] == list(range(n))
    return [choice.get("token_ids") or [] for choice in choices]


def _streamed(body: bytes, n: int) -> list[list[int]]:
    *events, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    tokens: list[list[int]] = [[] for _ in range(n)]
    for event in events:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            tokens[choice["index"]] += choice.get("token_ids") or []
    return tokens


@pytest.mark.slow
def test_clients_may_leave_at_every_moment(server: LiveServer) -> None:
    run_state_machine_as_test(
        make_machine(server),
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_server_that_was_left_so_often_still_serves(server: LiveServer) -> None:
    with RawClient(server.port) as client:
        client.post(COMPLETIONS, {"model": "demo", "prompt": [5, 6], "max_tokens": 4, "return_token_ids": True})
        answer = client.read_all()
    assert status_of(answer) == 200
    assert _whole(body_of(answer), 1) == [fake_text([5, 6], 4, vocab_size=VOCAB_SIZE)]
