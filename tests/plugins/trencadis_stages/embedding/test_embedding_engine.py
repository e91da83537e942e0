from __future__ import annotations

import numpy as np
import pytest

from trencadis.clock import SimulatedClock
from trencadis.config import Config
from trencadis.config.schema import EngineConfig
from trencadis.engine.build import compose_bare_engine
from trencadis.engine.parts import CommonParts
from trencadis.errors import InvalidRequestError, PluginError, PromptTooLongError, RanksLostError
from trencadis.interfaces import Observer
from trencadis.records import EmbeddingRequest, ModelSource, Request
from trencadis.registry import Registry
from trencadis_stages.embedding.engine import EmbeddingEngine
from trencadis_testing.fake_executor import FakeExecutor
from trencadis_testing.fakes import FakeBackend, fake_embedding


class Watches(Observer):
    is_closed = False

    def metrics(self) -> str:
        return "texts 1"

    def close(self) -> None:
        self.is_closed = True


def make(backend: FakeBackend | None = None, **parts: object) -> EmbeddingEngine:
    executor = FakeExecutor(backend or FakeBackend(generates=False, max_model_len=20))
    model = executor.start(make_backend=None, make_sampler=lambda rank: None, source=ModelSource(path="fake"))
    config = Config(engine=EngineConfig(max_num_batched_tokens=8))
    stages = Registry.discover(mentions=lambda _: False).stages
    common = CommonParts(**{"executor": executor, "model": model, "stages": stages, "plan_hash": "hash", **parts})
    return compose_bare_engine(config, common, clock=SimulatedClock())


def test_texts_are_embedded_in_micro_batches() -> None:
    engine = make()
    texts = {str(n): tuple(range(n)) for n in (5, 3, 20)}
    for name, tokens in texts.items():
        engine.take(EmbeddingRequest(request_id=name, token_ids=tokens))
    assert (engine.num_waiting, engine.num_running, engine.is_stalled) == (3, 0, False)
    steps = []
    while engine.has_work:
        steps.append(engine.step())
    assert [[one.request_id for one in step.embeddings] for step in steps] == [["5", "3"], ["20"]]
    for step in steps:
        assert step.slots.size == step.token_ids.size == 0
        for one in step.embeddings:
            np.testing.assert_allclose(one.vector, fake_embedding(texts[one.request_id]), rtol=1e-6)


def test_a_request_for_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="this model only embeds"):
        make().add(Request(request_id="r", prompt_token_ids=(1,)))


def test_a_text_over_the_limit_is_refused() -> None:
    engine = make()
    assert engine.max_model_len == 20
    with pytest.raises(PromptTooLongError, match="has 21 tokens; the limit is 20"):
        engine.take(EmbeddingRequest(request_id="long", token_ids=[1] * 21))


def test_an_aborted_text_is_forgotten() -> None:
    engine = make()
    engine.take(EmbeddingRequest(request_id="a", token_ids=(1,)))
    assert engine.abort("a") is None
    assert engine.stop("a") is None
    assert not engine.has_work


def test_closing_forgets_texts_tells_observers_and_closes_the_executor_once() -> None:
    backend, observer, calls = FakeBackend(generates=False), Watches(), []
    engine = make(backend, observers=(("watches", observer),), on_close=lambda: calls.append("closing"))
    engine.take(EmbeddingRequest(request_id="a", token_ids=(1,)))
    engine.close()
    engine.close()
    assert (calls, observer.is_closed, backend.is_closed, engine.has_work) == (["closing"], True, True, False)


def test_observers_have_metrics_without_any_step() -> None:
    engine = make(observers=(("watches", Watches()),))
    assert engine.metrics().startswith("texts 1\n")
    assert (engine.plan_hash, engine.totals.num_steps) == ("hash", 0)


def test_its_load_is_the_texts_that_wait_and_it_has_no_blocks() -> None:
    engine = make()
    engine.take(EmbeddingRequest(request_id="a", token_ids=(1, 2)))
    load = engine.load()
    assert (load.num_waiting, load.num_running, load.added, engine.hashing) == (1, 0, (), None)
    engine.close()


def test_lost_ranks_are_started_again_and_the_text_is_embedded() -> None:
    engine, losses = make(), [RanksLostError("rank 0 is gone")]
    executor = engine._parts.executor
    embed, restarts = executor.embed, []

    def loses(token_ids):
        if losses:
            raise losses.pop()
        return embed(token_ids)

    executor.embed, executor.restart = loses, lambda: restarts.append(1)
    engine.take(EmbeddingRequest(request_id="a", token_ids=(1, 2)))
    assert engine.step().embeddings == ()
    assert [one.request_id for one in engine.step().embeddings] == ["a"]
    assert restarts == [1]


def test_a_model_that_generates_nothing_needs_a_stage_that_serves_it() -> None:
    with pytest.raises(PluginError, match="Fake generates nothing, and no stage serves such a model"):
        make(stages=())
