from __future__ import annotations

from collections.abc import Iterator

import pytest

from trencadis.client.beam_request import BeamRounds
from trencadis.client.client_request import ClientRequest
from trencadis.client.engine_client import LocalEngineClient
from trencadis.client.frontend import Frontend
from trencadis.errors import InvalidRequestError, PromptTooLongError, RequestRefusedError
from trencadis.interfaces import SchedulingPolicy
from trencadis.records import DEFAULT_TERMS, BeamSearchParams, FinishReason, Request, RequestOutput, RequestTerms
from trencadis.text import Tokenizer
from trencadis_testing.engines import make_engine
from trencadis_testing.fakes import FakeBackend

THREE = BeamSearchParams(beam_width=3, max_tokens=3, ignore_eos=True)
# The fake backend offers tokens 0, 1, 2 ... each with log-probability -1: among equals the first beams and tokens win.
THE_FIRST = [(0, 0, 0), (0, 0, 1), (0, 0, 2)]


class Notes(SchedulingPolicy):
    """Remembers what came, and refuses beyond a number of requests."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.most = 1000

    def admit(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        return "" if len(self.requests) < self.most else "that is enough"

    def on_added(self, *, slot: int, request: Request) -> None:
        self.requests.append(request)


@pytest.fixture
def policy() -> Notes:
    return Notes()


@pytest.fixture
def frontend(tokenizer: Tokenizer, policy: Notes) -> Iterator[Frontend]:
    backend = FakeBackend(vocab_size=4096, eos=-1, max_model_len=128)
    made = Frontend(LocalEngineClient(make_engine(backend=backend, policy=policy)), tokenizer)
    yield made
    made.close()


def search(
    frontend: Frontend, *prompts: tuple[int, ...], params: BeamSearchParams = THREE, terms: RequestTerms = DEFAULT_TERMS
) -> list[RequestOutput]:
    def run(clients: list[ClientRequest]) -> None:
        while not all(client.is_finished for client in clients):
            frontend.step()

    return BeamRounds(frontend).search(prompts, [params] * len(prompts), terms=terms, run=run)


def test_every_prompt_gets_its_beams_in_order(frontend: Frontend) -> None:
    outputs = search(frontend, (5, 6), (7,))
    assert [output.prompt_token_ids for output in outputs] == [(5, 6), (7,)]
    for output in outputs:
        assert [one.token_ids for one in output.outputs] == THE_FIRST
        assert [one.score for one in output.outputs] == [-1.0] * 3
    assert frontend.live == ()


def test_a_round_asks_for_one_token_of_each_live_beam_of_each_prompt(frontend: Frontend, policy: Notes) -> None:
    search(frontend, (5,), (7,), terms=RequestTerms(tenant="acme", priority=3))
    asked = [request.prompt_token_ids for request in policy.requests]
    assert asked[:2] == [(5,), (7,)]
    assert asked[2:8] == [(5, 0), (5, 1), (5, 2), (7, 0), (7, 1), (7, 2)]
    assert len(asked) == 2 + 6 + 6
    assert {(one.tenant, one.priority, one.params.max_tokens) for one in policy.requests} == {("acme", 3, 1)}
    assert len({one.request_id for one in policy.requests}) == len(asked)


def test_a_prompt_that_is_at_fault_is_named_among_several_and_leaves_nothing(frontend: Frontend) -> None:
    with pytest.raises(PromptTooLongError, match=r"^prompts\[1\]: "):
        search(frontend, (5,), (6,) * 128)
    assert not frontend.live
    with pytest.raises(PromptTooLongError, match=r"^request"):
        search(frontend, (6,) * 128)


def test_parameters_that_cannot_be_are_named_before_anything_runs(frontend: Frontend, policy: Notes) -> None:
    wide = BeamSearchParams(beam_width=49, stop_token_ids=(1, 2))
    with pytest.raises(InvalidRequestError, match=r"prompts\[0\]: beam_width = 49"):
        search(frontend, (5,), (6,), params=wide)
    assert policy.requests == []


def test_a_refusal_in_a_later_round_ends_every_beam(frontend: Frontend, policy: Notes) -> None:
    policy.most = 3
    with pytest.raises(RequestRefusedError, match="that is enough"):
        search(frontend, (5,))
    assert not frontend.live
    assert not frontend.has_work


def test_a_beam_that_fails_ends_its_search_and_no_other(tokenizer: Tokenizer) -> None:
    def fails(batch: object, one: object) -> None:
        if 5 in one.query_lens:  # type: ignore[attr-defined]
            raise RuntimeError("too many numbers")

    backend = FakeBackend(vocab_size=4096, eos=-1, max_model_len=128, fails=fails)
    frontend = Frontend(LocalEngineClient(make_engine(backend=backend)), tokenizer)
    bad, good = search(frontend, (1, 2, 3, 4, 5), (7,))
    frontend.close()
    assert bad.outputs[0].finish_reason is FinishReason.ERROR
    assert "too many numbers" in bad.error
    assert [one.token_ids for one in good.outputs] == THE_FIRST
