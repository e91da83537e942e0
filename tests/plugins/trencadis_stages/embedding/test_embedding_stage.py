from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest

from trencadis.engine.engine import Engine
from trencadis.errors import InvalidRequestError, PromptTooLongError
from trencadis.records import Embedding, EmbeddingRequest, FinishReason, Request, SamplingParams
from trencadis_testing.engines import drain, make_engine
from trencadis_testing.fakes import FakeBackend, fake_embedding

BAD = 13
"""A token that the backends below choke on."""


def text(name: str, num_tokens: int = 3, token: int = 5) -> EmbeddingRequest:
    return EmbeddingRequest(request_id=name, token_ids=[token] * num_tokens)


def request(name: str, num_tokens: int = 8) -> Request:
    params = SamplingParams(max_tokens=num_tokens)
    return Request(request_id=name, prompt_token_ids=range(1, 11), params=params)


def embed_all(engine: Engine, max_steps: int = 500) -> dict[str, Embedding]:
    found: dict[str, Embedding] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            return found
        found.update((one.request_id, one) for one in engine.step().embeddings)
    raise AssertionError(f"there is still work after {max_steps} steps")


def chokes(texts: Sequence[np.ndarray]) -> None:
    if any(BAD in one for one in texts):
        raise ValueError("a token of bad luck")


def test_every_text_gets_its_vector_and_its_number_of_tokens() -> None:
    engine = make_engine()
    requests = [EmbeddingRequest(request_id=str(n), token_ids=range(n)) for n in (1, 2, 40)]
    for one in requests:
        engine.take(one)
    found = embed_all(engine)
    for one in requests:
        np.testing.assert_allclose(found[one.request_id].vector, fake_embedding(one.token_ids), rtol=1e-6)
        assert (found[one.request_id].num_tokens, found[one.request_id].error) == (len(one.token_ids), "")
    assert not engine.has_work


def test_a_step_embeds_as_many_texts_as_the_token_budget_holds_in_their_order() -> None:
    backend = FakeBackend()
    engine = make_engine(backend=backend, max_num_batched_tokens=10)
    for index, length in enumerate([4, 6, 1, 25, 9, 2]):
        engine.take(text(str(index), length))
    order = [[one.request_id for one in engine.step().embeddings] for _ in range(5)]
    assert order == [["0", "1"], ["2"], ["3"], ["4"], ["5"]]
    assert backend.embedded == [[4, 6], [1], [25], [9], [2]]


def test_a_flood_of_texts_holds_no_generating_request_back() -> None:
    """A request takes as many steps as it takes alone."""

    def num_steps(num_texts: int) -> int:
        engine = make_engine(backend=FakeBackend(eos=-1), max_num_batched_tokens=16)
        for index in range(num_texts):
            engine.take(text(str(index), 16))
        engine.add(request("r"))
        for count in range(1, 100):
            if any(end.request_id == "r" for end in engine.step().finished):
                return count
        raise AssertionError("the request has not ended")

    assert num_steps(1000) == num_steps(0)


def test_a_flood_of_requests_holds_no_text_back() -> None:
    """Every step under full load embeds a quarter of a budget of texts."""
    engine = make_engine(backend=FakeBackend(eos=-1), max_num_batched_tokens=32, max_num_seqs=4)
    for index in range(200):
        engine.add(request(str(index)))
    engine.step()
    for index in range(12):
        engine.take(text(f"text {index}", 4))
    counts = [len(engine.step().embeddings) for _ in range(4)]
    assert min(counts) >= 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_micro_batch_is_a_quarter_of_the_budget_while_a_request_generates(overlap: bool) -> None:
    """However little of the budget the request takes: its next token waits for the whole micro-batch."""
    backend = FakeBackend(eos=-1)
    engine = make_engine(backend=backend, async_scheduling=overlap, max_num_batched_tokens=16)
    engine.add(request("r", num_tokens=6))
    engine.step()
    for index in range(60):
        engine.take(text(str(index), 1))
    embed_all(engine)
    sizes = list(map(len, backend.embedded))
    assert sizes[0] == 4
    assert sizes == sorted(sizes[:-1]) + sizes[-1:], "and the budget once the request has ended"
    assert sizes[-2] == 16
    assert set(sizes[:-1]) == {4, 16}


def test_a_text_that_fails_fails_alone() -> None:
    backend = FakeBackend(fails_to_embed=chokes)
    engine = make_engine(backend=backend)
    for index in range(4):
        engine.take(text(str(index), 2, token=BAD if index == 2 else 7))
    engine.add(request("r"))
    found: dict[str, Embedding] = {}
    ends = {}
    while engine.has_work:
        deltas = engine.step()
        found.update((one.request_id, one) for one in deltas.embeddings)
        ends.update((end.request_id, end.finish_reason) for end in deltas.finished)
    assert {name: one.error for name, one in found.items() if one.error} == {"2": "ValueError: a token of bad luck"}
    assert found["2"].vector.size == 0
    assert ends["r"] in {FinishReason.LENGTH, FinishReason.STOP}
    # Together, then each alone: nobody runs twice alone.
    assert backend.embedded == [[2, 2, 2, 2], [2], [2], [2], [2]]


def test_a_text_that_fails_alone_is_not_tried_again() -> None:
    backend = FakeBackend(fails_to_embed=chokes)
    engine = make_engine(backend=backend)
    engine.take(text("bad", token=BAD))
    assert [one.error for one in engine.step().embeddings] == ["ValueError: a token of bad luck"]
    assert len(backend.embedded) == 1


class GivesTooFew(FakeBackend):
    def embed(self, token_ids):
        return super().embed(token_ids)[:, 1:]


class GivesNothingFinite(FakeBackend):
    def embed(self, token_ids):
        vectors = super().embed(token_ids)
        vectors[0, 0] = np.nan
        return vectors


@pytest.mark.parametrize(
    ("backend", "complaint"),
    [
        (GivesTooFew, r"ContractError: embed\(\) returned float32 \(1, 7\), not float32 \(1, 8\)"),
        (GivesNothingFinite, "Fake gave a vector that is not finite"),
    ],
)
def test_no_client_is_given_a_vector_that_is_none(backend: type[FakeBackend], complaint: str) -> None:
    engine = make_engine(backend=backend())
    engine.take(text("a"))
    (found,) = engine.step().embeddings
    assert found.vector.size == 0
    assert re.search(complaint, found.error)
    if backend is GivesNothingFinite:  # the others get theirs
        for name in "bc":
            engine.take(text(name))
        assert [one.vector.size for one in engine.step().embeddings] == [0, 8]


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        ((), "has an empty text"),
        ((1, 97), "token id 97 is outside the vocabulary, 0 to 96"),
        ((-1, 2), "token id -1 is outside the vocabulary"),
    ],
)
def test_texts_that_cannot_be_embedded_are_refused_at_once(tokens: tuple[int, ...], complaint: str) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match=complaint):
        engine.take(EmbeddingRequest(request_id="bad", token_ids=tokens))
    assert not engine.has_work


def test_a_text_may_be_as_long_as_the_model_takes_and_not_longer() -> None:
    engine = make_engine(num_blocks=8, block_size=4)
    engine.take(text("longest", 32))
    with pytest.raises(PromptTooLongError, match=r"the text has 33 tokens; the limit is 32"):
        engine.take(text("longer", 33))
    assert [one.num_tokens for one in engine.step().embeddings] == [32]


def test_a_model_that_cannot_embed_says_so() -> None:
    engine = make_engine(backend=FakeBackend(embedding_size=0))
    with pytest.raises(InvalidRequestError, match="Fake cannot embed"):
        engine.take(text("a"))


def test_texts_and_requests_share_their_names() -> None:
    engine = make_engine()
    engine.take(text("a"))
    engine.add(request("b"))
    for again in (lambda: engine.take(text("a")), lambda: engine.take(text("b")), lambda: engine.add(request("a"))):
        with pytest.raises(InvalidRequestError, match="is live already"):
            again()
    drain(engine)
    engine.add(request("a"))
    engine.take(text("b"))


def test_an_aborted_text_is_forgotten_also_when_it_was_to_be_tried_again() -> None:
    backend = FakeBackend(fails_to_embed=chokes)
    engine = make_engine(backend=backend)
    for name in "abc":
        engine.take(text(name, token=BAD))
    assert engine.abort("a") is None
    engine.step()
    assert engine.abort("c") is None
    assert set(embed_all(engine)) == {"b"}
    assert backend.embedded == [[3, 3], [3]]


def test_an_engine_that_waits_for_a_connector_is_not_stalled_while_texts_wait() -> None:
    engine = make_engine()
    engine._scheduler.admission.num_pending = 1  # as if a sequence waited for an external lookup
    assert engine.is_stalled
    engine.take(text("a"))
    assert not engine.is_stalled


def test_without_texts_nothing_of_it_is_on_the_path_of_a_step() -> None:
    engine = make_engine()
    stage = engine.stage("embedding")
    for _ in range(2):
        assert stage.before_step not in engine._stages.before_step
        assert stage.after_step not in engine._stages.after_step
        engine.take(text("a"))
        assert engine._stages.before_step[-1] == stage.before_step, "last: it sees whether requests came"
        embed_all(engine)


def test_a_kind_of_request_that_no_stage_serves_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no stage of this engine serves a dict"):
        make_engine().take({})


def test_texts_are_embedded_while_the_engine_is_paused() -> None:
    engine = make_engine()
    engine.add(request("r"))
    engine.is_paused = True
    engine.take(text("a"))
    assert not engine.is_stalled
    assert [one.request_id for one in engine.step().embeddings] == ["a"]
    assert engine.is_stalled


def test_closing_forgets_texts_that_wait() -> None:
    backend = FakeBackend()
    engine = make_engine(backend=backend)
    engine.take(text("a"))
    engine.close()
    assert not engine.has_work
    assert backend.embedded == []
