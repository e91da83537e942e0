"""The same promises on a Gaudi: ``pytest -m hpu`` runs these and nothing else. Skipped, in words, where there is none."""

from __future__ import annotations

import importlib.util

import pytest

from support.backends import gaudi_engines
from trencadis.clock import SystemClock
from trencadis.records import ModelSource
from trencadis_gaudi.backend import GaudiBackend
from trencadis_gaudi.config import GaudiConfig
from trencadis_testing.backend import ArgmaxSampler, BackendConformance

if importlib.util.find_spec("habana_frameworks") is None:
    pytest.skip(
        "needs an Intel Gaudi: the Gaudi software (habana_frameworks) is not installed here", allow_module_level=True
    )

pytestmark = [pytest.mark.hpu, pytest.mark.slow]


class OnAGaudi(BackendConformance):
    """Tokens are compared with the backend's own, one sequence at a time: bfloat16 rounds otherwise than float32."""

    block_size = 16
    mode = "lazy"

    @pytest.fixture(autouse=True)
    def _model(self, model_path):
        self.source = ModelSource(path=str(model_path("llama")))

    def make(self):
        return GaudiBackend(GaudiConfig(device="hpu", mode=self.mode, max_prefill_batch_size=2), clock=SystemClock())


class TestLazyOnAGaudi(OnAGaudi):
    """HPU graphs."""


class TestEagerOnAGaudi(OnAGaudi):
    """Needs a process of its own: the mode is set once, before the software is imported."""

    mode = "eager"

    @pytest.fixture(autouse=True)
    def _one_mode(self):
        import os

        if os.environ.get("PT_HPU_LAZY_MODE", "1") != "0":
            pytest.skip("set PT_HPU_LAZY_MODE=0 to run the tests of the modes without HPU graphs")


@pytest.mark.parametrize("way", [{}, {"contiguous": True, "defragmenter": {"threshold": 0}}])
def test_after_the_warm_up_a_random_workload_compiles_nothing_on_a_gaudi(model_path, way):
    engine = gaudi_engines.open_engine(model_path("llama"), device="hpu", **way)
    served = gaudi_engines.serve(engine, 3)
    compiled = engine.totals.num_compilations
    engine.close()
    assert not {one.error for one in served.values()} - {""}
    assert compiled == 0


def test_profile_run_measures_something_on_a_gaudi(model_path):
    backend = GaudiBackend(GaudiConfig(device="hpu"), clock=SystemClock())
    backend.load(ModelSource(path=str(model_path("llama"))), sampler=ArgmaxSampler())
    report = backend.memory(max_num_batched_tokens=256, max_num_seqs=4)
    assert 0 < report.activation_bytes < report.free_bytes
    assert 0 < report.cache_bytes < report.free_bytes
