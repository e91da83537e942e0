"""The backend over unified passes; whole engines are in ``test_invariants.py``."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends import tiny_models
from support.backends.paged_scene import make_pass
from trencadis.clock import SystemClock
from trencadis.engine.batching.passes import unified_shape
from trencadis.records import Bucket, ModelSource
from trencadis_gaudi.backend import GaudiBackend
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.passes.unified import unified_batch
from trencadis_testing.backend import BackendConformance


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
        return WithDrafts(
            GaudiConfig(device="emulated", mode="lazy", layout="unified", check_model=False), clock=SystemClock()
        )

    def reference(self, prompt, num_tokens):
        return tiny_models.greedy_reference(self.path, prompt, num_tokens)


@settings(max_examples=80, phases=(Stage.explicit, Stage.generate))
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
