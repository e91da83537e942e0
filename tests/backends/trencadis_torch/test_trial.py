from __future__ import annotations

import pytest
import tiny_models

from trencadis_torch import bridge, trial
from trencadis_torch.inspection import attention_layers, model_facts
from trencadis_torch.trial import measure_memory


@pytest.fixture(scope="module")
def model():
    bridge.register()
    made = tiny_models.make_model("llama")
    layers = attention_layers(made)
    bridge.switch(made, bridge.PAGED)
    return made, layers, model_facts(made, layers)


@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("num_tokens", [5, 300, 600])
def test_report_adds_up(model, layout, num_tokens):
    report = measure_memory(*model, layout=layout, max_num_batched_tokens=num_tokens, max_num_seqs=8)
    assert 0 < report.free_bytes <= report.total_bytes
    assert report.activation_bytes >= 4 * 4 * 8 * 131


def test_trial_of_fewer_tokens_is_scaled_up(model, monkeypatch):
    class Peak:
        def bytes_since_start(self):
            return 1000

    monkeypatch.setattr(trial, "_HostPeak", Peak)
    monkeypatch.setattr(trial, "MAX_CPU_TOKENS", 64)
    report = measure_memory(*model, layout="ragged", max_num_batched_tokens=640, max_num_seqs=1)
    assert report.activation_bytes == 10 * 1000 + 4 * 4 * 131


def test_large_model_is_tried_with_fewer_tokens(model, monkeypatch):
    made, layers, facts = model
    tried = []
    monkeypatch.setattr(trial, "_run", lambda *_, num_tokens, **__: tried.append(num_tokens) or num_tokens)
    for operations in (1e15, 2 * 100 * facts.num_parameters, 1):
        monkeypatch.setattr(trial, "MAX_CPU_OPERATIONS", operations)
        measure_memory(made, layers, facts, layout="ragged", max_num_batched_tokens=8192, max_num_seqs=1)
    assert tried == [2048, 100, 16]
