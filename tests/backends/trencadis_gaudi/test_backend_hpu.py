"""The same promises on a Gaudi: ``pytest -m hpu`` runs these and nothing else. Where there is none, the emulated device stands for it.

The mode of a Gaudi is set once for a process, by ``PT_HPU_LAZY_MODE``: tests of other modes are skipped, in words.
"""

from __future__ import annotations

import importlib.util
import logging
import os

import numpy as np
import pytest
import torch

from support.backends import gaudi_engines
from trencadis.clock import SystemClock
from trencadis.interfaces import SamplingContext
from trencadis.records import ModelSource, RowStart, SamplingParams
from trencadis_gaudi.backend import GaudiBackend
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.fused.agreement import drawn, why_wrong
from trencadis_gaudi.fused.meanings import rotary_pairwise
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.model import load_model
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.standard import StandardSampler
from trencadis_testing.backend import ArgmaxSampler, BackendConformance

ON_A_GAUDI = importlib.util.find_spec("habana_frameworks") is not None
DEVICE = "hpu" if ON_A_GAUDI else "emulated"
MODES = ("lazy", "compile", "eager")

pytestmark = [pytest.mark.hpu, pytest.mark.slow]
if not ON_A_GAUDI:  # by day the emulated device is tested by the other files
    pytestmark.append(pytest.mark.nightly)


@pytest.fixture(autouse=True)
def one_mode(request):
    """Skip a test of a mode that this process cannot have."""
    mode = request.node.callspec.params.get("mode") if hasattr(request.node, "callspec") else None
    mode = mode or getattr(request.instance, "mode", None)
    needed = "1" if mode == "lazy" else "0"
    if ON_A_GAUDI and mode is not None and os.environ.get("PT_HPU_LAZY_MODE", "0") != needed:
        pytest.skip(f"set PT_HPU_LAZY_MODE={needed} to run the tests of {mode} mode")


class OnAGaudi(BackendConformance):
    """Tokens are compared with the backend's own, one sequence at a time: bfloat16 rounds otherwise than float32."""

    block_size = 16
    mode = "lazy"

    @pytest.fixture(autouse=True)
    def _model(self, model_path):
        self.source = ModelSource(path=str(model_path("llama")))

    def make(self):
        return GaudiBackend(GaudiConfig(device=DEVICE, mode=self.mode, max_prefill_batch_size=2), clock=SystemClock())


class TestLazyOnAGaudi(OnAGaudi):
    """HPU graphs."""


class TestEagerOnAGaudi(OnAGaudi):
    mode = "eager"


@pytest.mark.parametrize("way", [{}, {"contiguous": True, "defragmenter": {"threshold": 0}}], ids=["by-id", "by-range"])
@pytest.mark.parametrize("mode", ["lazy", "compile"])
def test_after_the_warm_up_a_random_workload_compiles_nothing_on_a_gaudi(model_path, mode, way):
    served = {}
    for backend, options in (("gaudi", {"device": DEVICE, "mode": mode, **way}), ("torch", {"device": "cpu"})):
        engine = gaudi_engines.open_engine(model_path("llama"), backend=backend, max_num_seqs=2, **options)
        served[backend] = gaudi_engines.serve(engine, 3)
        if backend == "gaudi":
            assert engine.totals.num_compilations == 0
        engine.close()
    texts = [*map(gaudi_engines.tokens, served.values())]
    assert ON_A_GAUDI or texts[0] == texts[1]  # a Gaudi computes in bfloat16


PATHS = (
    {"temperature": 0.7},
    {"temperature": 1.2, "top_k": 40},
    {"top_k": 300, "top_p": 0.95},
    {"temperature": 1.1, "top_p": 0.8},
    {"min_p": 0.02},
    {"presence_penalty": 0.7, "repetition_penalty": 1.2},
)


@pytest.mark.parametrize("mode", MODES)
def test_draws_on_a_gaudi_are_those_of_a_cpu(mode):
    """Of the same logits; a token differs where the first two of a draw are nearer than float32 tells, once in a million draws."""
    habana = load_habana(GaudiConfig(device=DEVICE, mode=mode), clock=SystemClock())
    num_rows, vocab_size = 6 * len(PATHS), 1000
    logits = torch.randn((num_rows, vocab_size), generator=torch.Generator().manual_seed(5)) * 2
    drawn = []
    for device in (torch.device("cpu"), habana.device):
        sampler = StandardSampler(standard_chain("vllm"))
        sampler.use_static_shapes()
        with habana.active():
            sampler.allocate(num_rows=num_rows, vocab_size=vocab_size, device=device)
            history = torch.full((num_rows, 8), 7, dtype=torch.int32).to(device)
            for row in range(num_rows):
                params = SamplingParams(**PATHS[row % len(PATHS)])
                tokens = np.full(4, 7, np.int32)
                seed = 2**63 + 1000 * row
                sampler.start_row(RowStart(row=row, token_ids=tokens, num_prompt_tokens=2, params=params, seed=seed))
            rounds = []
            for position in range(3, 7):
                context = SamplingContext(rows=tuple(range(num_rows)), positions=(position,) * num_rows, tokens=history)
                found = sampler.sample(logits.to(device), context).token_ids
                habana.mark_step()
                rounds.append(found.cpu())
            drawn.append(torch.stack(rounds))
    assert (drawn[0] == drawn[1]).double().mean() > 0.99
    assert len(drawn[0].unique()) > 30


def test_profile_run_measures_something_on_a_gaudi(model_path):
    backend = GaudiBackend(GaudiConfig(device=DEVICE), clock=SystemClock())
    backend.load(ModelSource(path=str(model_path("llama"))), sampler=ArgmaxSampler())
    report = backend.memory(max_num_batched_tokens=256, max_num_seqs=4)
    assert 0 < report.activation_bytes < report.free_bytes
    assert 0 < report.cache_bytes < report.free_bytes


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_kernels_compute_their_published_meanings_and_serve_models(model_path, mode, caplog):
    habana = load_habana(GaudiConfig(device=DEVICE, mode=mode), clock=SystemClock())
    with habana.active(), caplog.at_level(logging.WARNING, "trencadis.gaudi"):
        for kind in ("gemma3", "mixtral"):
            load_model(ModelSource(path=str(model_path(kind)), dtype="bfloat16"), habana, check=False)
        x, angles = drawn(7, 1, 2, 128, dtype=torch.bfloat16), drawn(7, 1, 1, 64, seed=1).repeat_interleave(2, -1)
        trial = (x, angles.cos().bfloat16(), angles.sin().bfloat16())
        assert why_wrong(habana.kernels.rotary["PAIRWISE"], rotary_pairwise, [trial], habana.device) is None
    assert caplog.messages == []
