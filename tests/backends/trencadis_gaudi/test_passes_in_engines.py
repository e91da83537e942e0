"""Whole engines over unified passes on the emulated device: the torch backend's tokens, from one pass of prefills and decodes."""

from __future__ import annotations

import attrs
import gaudi_engines
import numpy as np
import pytest
import tiny_models
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_scene import make_pass

from trencadis.clock import SystemClock
from trencadis.engine.unified_shape import unified_shape
from trencadis.records import Bucket, ModelSource
from trencadis_gaudi.backend import GaudiBackend
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.unified_batch import unified_batch
from trencadis_testing.backend import BackendConformance

NUM_SEQS = 4


@pytest.fixture
def open_unified(model_path):
    def make(kind, strategy="unified", **options):
        return gaudi_engines.open_engine(
            model_path(kind), strategy=strategy, layout="unified", max_num_seqs=NUM_SEQS, **options
        )

    return make


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_greedy_tokens_are_those_of_the_torch_backend_and_nothing_is_compiled_after_the_warm_up(
    open_unified, model_path, kind
):
    engine = open_unified(kind, emulated_frozen=True)
    served = gaudi_engines.serve(engine, 1, greedy=True)
    assert engine.totals.num_compilations == 0
    assert engine.totals.num_failed_steps == 0
    engine.close()
    torch_engine = gaudi_engines.open_engine(model_path(kind), backend="torch", strategy="exact", device="cpu")
    expected = gaudi_engines.serve(torch_engine, 1, greedy=True)
    torch_engine.close()
    whole = [name for name, one in served.items() if one.finish_reason.value != "abort"]
    assert len(whole) >= 10
    assert {name: served[name].token_ids.tolist() for name in whole} == {
        name: expected[name].token_ids.tolist() for name in whole
    }


class WithDrafts(GaudiBackend):
    """As an engine with a speculator allocates it."""

    def allocate(self, plan):
        super().allocate(attrs.evolve(plan, max_draft_tokens=3))


class TestUnified(BackendConformance):
    block_size = 16

    @pytest.fixture(autouse=True)
    def _model(self, model_path):
        self.path = model_path("qwen3")
        self.source = ModelSource(path=str(self.path))

    def make(self):
        return WithDrafts(GaudiConfig(device="emulated", layout="unified", check_model=False), clock=SystemClock())

    def reference(self, prompt, num_tokens):
        return tiny_models.greedy_reference(self.path, prompt, num_tokens)


@settings(max_examples=80, deadline=None, phases=(Stage.explicit, Stage.generate))
@given(st.data())
def test_backend_and_engine_agree_on_the_shape_of_a_pass(data):
    sequences = data.draw(
        st.lists(st.tuples(st.integers(0, 12), st.sampled_from([1, 1, 2, 5])), min_size=1, max_size=5)
    )
    size = data.draw(st.sampled_from([1, 3, 4]))
    pool = st.permutations(range(24))
    tables = np.array([data.draw(pool)[:18] for _ in sequences], np.int32)
    starts, lengths = zip(*sequences, strict=True)
    one = make_pass(Bucket(1, 1, 0), range(len(sequences)), starts, lengths)
    found = unified_batch(one, tables, block_size=size).shape
    assert unified_shape(one.starts, one.query_lens, tables, block_size=size) == found
