from __future__ import annotations

import logging
from importlib import import_module

import pytest
import torch
from torch import nn

from support.backends import tiny_models
from trencadis_gaudi.fused.meanings import rms_norm
from trencadis_gaudi.fused.norm import FusedNorm, fuse_norms

CPU = torch.device("cpu")
SERVED = [
    ("apertus", "ApertusRMSNorm", False),
    ("gemma", "GemmaRMSNorm", True),
    ("gemma2", "Gemma2RMSNorm", True),
    ("gemma3", "Gemma3RMSNorm", True),
    ("glm4", "Glm4RMSNorm", False),
    ("gpt_oss", "GptOssRMSNorm", False),
    ("helium", "HeliumRMSNorm", False),
    ("llama", "LlamaRMSNorm", False),
    ("mistral", "MistralRMSNorm", False),
    ("olmo2", "Olmo2RMSNorm", False),
    ("qwen3", "Qwen3RMSNorm", False),
    ("qwen3_next", "Qwen3NextRMSNorm", True),
]
OTHERS = [
    ("cohere2", "Cohere2LayerNorm"),
    ("nemotron", "NemotronLayerNorm1P"),
    ("olmo", "OlmoLayerNorm"),
    ("qwen3_next", "Qwen3NextRMSNormGated"),
]


class Model(nn.Module):
    """Two places of one norm."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.same = norm
        self.dtype = next((one.dtype for one in norm.parameters()), torch.float32)


def norm_of(family, name, size=24):
    norm = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), name)(size)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(size, generator=torch.Generator().manual_seed(3)))
    return norm


def inputs(dtype=torch.float32):
    return torch.randn(1, 7, 24, generator=torch.Generator().manual_seed(5)).to(dtype) * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "name", "adds_one"), SERVED)
@torch.no_grad()
def test_norm_runs_in_the_kernel_and_computes_the_same(family, name, adds_one, dtype):
    model, x = Model(norm_of(family, name).to(dtype)), inputs(dtype)
    expected, calls = model.norm(x), []

    def kernel(*args):
        calls.append(args)
        return rms_norm(*args)

    assert fuse_norms(model, kernel, CPU) == {name: 1}
    assert model.norm is model.same
    calls.clear()
    found = model.norm(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)
    ((_, gamma, _),) = calls
    assert gamma.dtype == (torch.float32 if adds_one else dtype)


@pytest.mark.parametrize(("family", "name"), OTHERS)
def test_norm_of_another_meaning_stays(family, name):
    model = Model(norm_of(family, name))

    def never(*_):
        raise AssertionError("there is no norm for it")

    assert not fuse_norms(model, never, CPU)
    assert type(model.norm).__name__ == name


class Twisted(nn.Module):
    """A norm that looks like Llama's."""

    def __init__(self, twist):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))
        self.variance_epsilon = 1e-6
        self.twist = twist

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        if self.twist == "epsilon":
            return self.weight * x / (variance.sqrt() + self.variance_epsilon)
        if self.twist == "mean":
            x = x - x.mean(-1, keepdim=True)
        if self.twist == "scale":
            return 1.001 * self.weight * x * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * x * torch.rsqrt(variance + self.variance_epsilon)


@pytest.mark.parametrize(("twist", "served"), [("none", 1), ("epsilon", 0), ("mean", 0), ("scale", 0)])
def test_norm_is_recognised_by_its_numbers_and_not_by_its_name(twist, served):
    assert fuse_norms(Model(Twisted(twist)), rms_norm, CPU).total() == served


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (lambda x, gamma, eps: rms_norm(x, gamma, 0.0), "it does not compute its published meaning"),
        (lambda x, gamma, eps: rms_norm(x, gamma + 1, eps), "it does not compute its published meaning"),
        (lambda x, gamma, eps: rms_norm(x, gamma, eps).double(), "it does not compute its published meaning"),
        (lambda x, gamma: x, "a trial of it ends with TypeError"),
    ],
)
def test_kernel_that_is_wrong_is_not_used_and_said_once(fault, why, caplog):
    model = tiny_models.make_model("llama")
    with caplog.at_level(logging.WARNING, "trencadis.gaudi"):
        assert not fuse_norms(model, fault, CPU)
    assert not any(isinstance(part, FusedNorm) for part in model.modules())
    assert len(caplog.messages) == 1
    assert f"HPU FusedRMSNorm kernel is not used: {why}" in caplog.text
    assert "Norms use plain operations." in caplog.text
