"""Whole models with fused kernels on the emulated device, against transformers; engines against the backend ``torch`` are elsewhere."""

from __future__ import annotations

import logging

import pytest
import torch

from support.backends import tiny_models
from support.backends.gaudi_ranks import drive, generate, load_gaudi
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, Phase
from trencadis_gaudi.emulated import hpex

PLAN = AllocationPlan(num_blocks=24, block_size=16, num_rows=2, max_model_len=96, max_num_batched_tokens=64)
BUCKETS = (Bucket(1, 32, 0), Bucket(2, 1, 8, Phase.DECODE))
NORMS = {"llama": 7, "qwen3": 13, "gemma3": 19, "gpt_neox": 0, "gpt_oss": 7, "mixtral": 7}
CASES = [(kind, mode) for kind in NORMS for mode in ("lazy", "compile", "eager")]


def generated(path, *, num_tokens=3, **options):
    """A backend after its warm-up, tokens it generates, and the graphs compiled meanwhile."""
    backend = load_gaudi(path, PLAN, **options)
    backend.warm_up(BUCKETS)
    before = backend.habana.emulated.num_compilations
    tokens = generate(drive(backend, PLAN, BUCKETS, tiny_models.prompt(20)), num_tokens)
    return backend, tokens, backend.habana.emulated.num_compilations - before


@pytest.mark.representatives(2, ci=5)
@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_model_generates_what_transformers_does(model_path, caplog, kind, mode):
    """Experts of mixtral run in their kernel, those of gpt-oss do not."""
    if mode == "compile":
        torch._dynamo.reset()
    path = model_path(kind)
    with caplog.at_level(logging.INFO, "trencadis.gaudi"):
        backend, tokens, num_later = generated(path, mode=mode)
    assert tokens == tiny_models.greedy_reference(path, tiny_models.prompt(20), 3)
    (line,) = [message for message in caplog.messages if message.startswith("HPU kernels: ")]
    assert (f"FusedRMSNorm for {NORMS[kind]} " in line) == bool(NORMS[kind])
    assert "apply_rotary_pos_emb (BLOCKWISE) for 3 " in line
    assert ("mixture_of_experts for 3 " in line) == (kind == "mixtral")
    assert not any("kernel is not used" in message for message in caplog.messages)
    if mode != "eager":
        assert num_later == 0
        assert (backend.habana.dynamo.num_graph_breaks, backend.habana.dynamo.num_limit_hits) == (0, 0)


@pytest.mark.nightly
def test_torch_compile_makes_as_many_graphs_as_without_kernels(model_path):
    """One for each kind of layer and each bucket: two of both."""
    found = []
    for fused in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        generated(model_path("gemma3"), mode="compile", fused_kernels=fused)
        found.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert found == [4, 4]


def test_kernel_that_is_wrong_on_the_device_is_refused_and_the_tokens_stay_right(model_path, monkeypatch, caplog):
    right = hpex.FusedRMSNorm.forward
    monkeypatch.setattr(hpex.FusedRMSNorm, "forward", lambda ctx, x, gamma, eps: right(ctx, x, gamma, 2 * eps + 0.1))
    modes = hpex.emulated_hpex().kernels.RotaryPosEmbeddingMode
    monkeypatch.setattr(
        hpex.emulated_hpex().kernels,
        "RotaryPosEmbeddingMode",
        {"BLOCKWISE": modes.PAIRWISE, "PAIRWISE": modes.BLOCKWISE},
    )
    _, tokens, _ = generated(model_path("llama"), mode="lazy", num_tokens=2)
    assert tokens == tiny_models.greedy_reference(model_path("llama"), tiny_models.prompt(20), 2)
    assert "HPU FusedRMSNorm kernel is not used: it does not compute its published meaning" in caplog.text
    assert "apply_rotary_pos_emb kernel is not used: in the mode BLOCKWISE it does not compute" in caplog.text
    assert caplog.text.count("kernel is not used") == 2
