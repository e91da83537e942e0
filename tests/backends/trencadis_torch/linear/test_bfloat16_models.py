"""Models of which bfloat16 is asked for, against transformers' own modules whose linear layers round rows and weights to it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from support.backends import tiny_models
from support.backends.torch_backends import PLAN, PROMPTS
from support.devices import ON_CUDA
from trencadis.clock import SystemClock
from trencadis.records import ModelSource
from trencadis_testing.backend import ArgmaxSampler
from trencadis_testing.driver import BackendDriver
from trencadis_torch.backend import TorchBackend
from trencadis_torch.config import TorchConfig
from trencadis_torch.linear.held import Float8Weight, FloatWeight
from trencadis_torch.linear.holding import BFLOAT16, Holding
from trencadis_torch.linear.native import native
from trencadis_torch.loading.self_check import paged_logits

pytestmark = pytest.mark.skipif(
    ON_CUDA or native() is None, reason="there is no C++ compiler on this machine, or tests run on another device"
)
TOKENS = [torch.tensor(tiny_models.prompt(length)) for length in (26, 13)]


def load(path, dtype="bfloat16", **options):
    backend = TorchBackend(TorchConfig(device="cpu", num_threads=1, **options), clock=SystemClock())
    facts = backend.load(ModelSource(path=str(path), dtype=dtype), sampler=ArgmaxSampler())
    return backend, facts


def rounding(path):
    """Return the model of transformers, its linear layers with rows and weights rounded, products and sums in float64."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    embedding = model.get_input_embeddings()
    embedding.weight = nn.Parameter(embedding.weight.detach().bfloat16().float())

    def forward(layer, x):
        out = x.bfloat16().double() @ layer.weight.detach().bfloat16().double().T
        return (out if layer.bias is None else out + layer.bias).float()

    for layer in [part for part in model.modules() if type(part) is nn.Linear]:
        layer.forward = forward.__get__(layer)
    return model


@torch.inference_mode()
def logits(model):
    return torch.cat([model(input_ids=tokens[None]).logits[0] for tokens in TOKENS])


def distance(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3", "gpt_neox"])
def test_logits_are_those_of_rows_and_weights_that_are_rounded(model_path, kind):
    path = model_path(kind)
    backend, facts = load(path)
    assert facts.dtype == "bfloat16"
    assert "held as bfloat16, rows too" in facts.description
    assert facts.description.endswith("runs in one call")
    with torch.inference_mode():
        found = torch.cat(paged_logits(backend._model, backend._layers, TOKENS, "ragged", backend._kernel))
    expected, exact = (
        logits(rounding(path)),
        torch.cat([tiny_models.reference_logits(path, one.tolist()) for one in TOKENS]),
    )
    # A row that float32 sums in another order moves over the middle between two numbers of 8 bits has another one: few do.
    assert distance(found, expected) < 0.1 * distance(expected, exact)


def test_tokens_are_those_of_rounded_rows_whoever_shares_the_batch(model_path):
    path = model_path("llama")
    model, expected = rounding(path), {}
    for row, tokens in PROMPTS.items():
        made = model.generate(
            torch.tensor([tokens]),
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected[row] = made[0, len(tokens) :].tolist()
    backend, _ = load(path)
    backend.allocate(PLAN)
    assert {keys.dtype for keys in backend.kv_cache().keys} == {torch.float32}
    for chunk in (0, 7):
        assert BackendDriver(backend, PLAN, seed=chunk).generate(PROMPTS, 8, chunk=chunk) == expected


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_whatever_floats_files_have_take_two_bytes(tmp_path, stored):
    path = tiny_models.save_model("llama", tmp_path, dtype=stored)
    (asked, facts), (_, plain) = load(path), load(path, "float32")
    assert facts.weights_bytes < 0.6 * plain.weights_bytes
    assert facts.identity != plain.identity
    assert asked._replacement.kernels != _replacement_of(path, "auto")


def _replacement_of(path, dtype):
    return load(path, dtype)[0]._replacement.kernels


def test_experts_are_held_so_and_run_in_the_one_call(model_path):
    _, facts = load(model_path("mixtral"))
    assert "held as bfloat16, rows too" in facts.description
    assert facts.description.endswith("runs in one call")


def test_what_is_quantised_is_not_widened():
    weight = Float8Weight(torch.ones(4, 32).to(torch.float8_e4m3fn), torch.ones(4, 1))
    assert Holding(BFLOAT16).hold(weight) is weight
    held = Holding(BFLOAT16).hold(FloatWeight(torch.full((2, 2), 1 + 2.0**-9)))
    assert isinstance(held, FloatWeight)
    assert held.rounds_rows
    assert torch.equal(held.values, torch.ones(2, 2, dtype=torch.bfloat16))


def test_without_kernels_the_model_is_loaded_whole_and_the_log_says_why(model_path, monkeypatch, caplog):
    monkeypatch.setattr("trencadis_torch.linear.native.native", lambda: None)
    caplog.set_level(logging.INFO)
    backend, facts = load(model_path("llama"))
    assert "loaded whole: it computes in bfloat16" in facts.description
    assert "loaded whole: it computes in bfloat16" in caplog.text
    assert backend._model.dtype is torch.bfloat16
