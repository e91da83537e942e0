from __future__ import annotations

import logging

import pytest
import torch

from support.backends import gaudi_engines, tiny_models
from trencadis.errors import ModelLoadError
from trencadis_gaudi.experts import dense_experts, kernel_experts, use_experts
from trencadis_gaudi.fused.meanings import mixture_of_experts

KINDS = ("mixtral", "qwen3_moe", "gpt_oss")
CPU = torch.device("cpu")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def experts_of(kind, num_experts=4):
    """The experts of a model's first layer, as transformers itself runs them."""
    config = tiny_models.make_model(kind).config
    for name in ("num_local_experts", "num_experts"):
        if hasattr(config, name):
            setattr(config, name, num_experts)
    model = type(tiny_models.make_model(kind))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.set_experts_implementation("eager")
    return next(part for part in model.modules() if type(part).__name__.endswith("Experts"))


def routed(num_experts, num_tokens=9, *, num_chosen=2):
    scores = torch.randn(num_tokens, num_experts)
    weights, indices = scores.softmax(-1).topk(num_chosen)
    return torch.randn(num_tokens, 48), indices, weights


def strict_kernel(*args):
    """The kernel's meaning, and what its schema demands."""
    x, table, weights, *_, experts_min, experts_max = args
    assert (experts_min, experts_max) == (0, len(args[3]) - 1)
    assert (table.dtype, weights.dtype) == (torch.int64, x.dtype)
    return mixture_of_experts(*args)


@pytest.mark.parametrize("num_experts", [4, 8, 11])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_dense_experts_compute_what_transformers_own_do(kind, num_experts):
    experts, inputs = experts_of(kind, num_experts), routed(num_experts)
    torch.testing.assert_close(dense_experts(experts, *inputs), experts(*inputs), **TOLERANCE)


@torch.inference_mode()
def test_experts_without_a_gate_have_one_matrix():
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    config = NemotronHConfig(hidden_size=48, moe_intermediate_size=40, n_routed_experts=4, moe_latent_size=None)
    experts = NemotronHExperts(config)
    for parameter in experts.parameters():
        parameter.normal_(0, 0.3)
    experts.config._experts_implementation = "eager"
    inputs = routed(4)
    torch.testing.assert_close(dense_experts(experts, *inputs), experts(*inputs), **TOLERANCE)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@torch.inference_mode()
def test_kernel_gets_the_weights_in_the_vendors_order(kind):
    experts, inputs = experts_of(kind), routed(4)
    torch.testing.assert_close(kernel_experts(strict_kernel)(experts, *inputs), experts(*inputs), **TOLERANCE)


@torch.inference_mode()
def test_weights_that_are_transposed_are_not_permuted():
    experts, inputs = experts_of("mixtral"), routed(4)
    expected = experts(*inputs)
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, torch.nn.Parameter(getattr(experts, name).transpose(1, 2)))
    experts.is_transposed = True
    torch.testing.assert_close(kernel_experts(strict_kernel)(experts, *inputs), expected, **TOLERANCE)
    torch.testing.assert_close(dense_experts(experts, *inputs), expected, **TOLERANCE)


@torch.inference_mode()
def test_experts_that_the_kernel_does_not_serve_are_dense():
    """Those of gpt-oss have biases and a gate of their own."""
    experts, inputs = experts_of("gpt_oss"), routed(4)

    def never(*_):
        raise AssertionError("the kernel computes something else")

    torch.testing.assert_close(kernel_experts(never)(experts, *inputs), experts(*inputs), **TOLERANCE)
    squared = experts_of("mixtral")
    squared.config.hidden_act = "relu2"
    assert kernel_experts(never)(squared, *inputs).shape == inputs[0].shape


@pytest.mark.parametrize("kind", KINDS)
def test_experts_run_in_the_kernel_if_it_serves_them(kind, caplog):
    model = tiny_models.make_model(kind)
    served = use_experts(model, lambda: strict_kernel, CPU)
    assert dict(served) == {"mixtral": {"MixtralExperts": 3}, "qwen3_moe": {"Qwen3MoeExperts": 3}}.get(kind, {})
    assert model.config._experts_implementation == ("trencadis_mixture" if served else "trencadis_dense")
    assert caplog.messages == []


def test_kernel_that_computes_something_else_is_not_used(caplog):
    def gate_after_up(x, table, weights, w12, w3, *args):
        return mixture_of_experts(x, table, weights, [part.roll(len(part) // 2, 0) for part in w12], w3, *args)

    model = tiny_models.make_model("mixtral")
    with caplog.at_level(logging.WARNING, "trencadis.gaudi"):
        assert not use_experts(model, lambda: gate_after_up, CPU)
    assert model.config._experts_implementation == "trencadis_dense"
    assert caplog.messages == [
        "HPU mixture_of_experts kernel is not used: it does not compute its published meaning. "
        "Every expert runs on every token."
    ]


def test_nothing_is_looked_for_in_a_model_without_experts():
    def never():
        raise AssertionError("there are no experts")

    assert not use_experts(tiny_models.make_model("llama"), never, CPU)


def test_experts_whose_shapes_depend_on_the_routing_are_refused():
    from transformers import AutoModelForCausalLM, JetMoeConfig

    config = JetMoeConfig(
        vocab_size=131, hidden_size=48, num_hidden_layers=1, num_key_value_heads=2, kv_channels=12, intermediate_size=40
    )
    with pytest.raises(
        ModelLoadError, match="JetMoeForCausalLM: shapes in JetMoeParallelExperts depend on the routing"
    ):
        use_experts(AutoModelForCausalLM.from_config(config), lambda: None, CPU)


@pytest.mark.nightly  # of a few of them: fused/test_models.py
@pytest.mark.parametrize("mode", ["lazy", "compile", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_engine_generates_what_the_backend_torch_does_and_compiles_nothing_later(model_path, kind, mode):
    path = model_path(kind)
    engine = gaudi_engines.open_engine(path, mode=mode, emulated_frozen=mode != "eager")
    found, expected = (
        gaudi_engines.tokens(gaudi_engines.serve(one, 3, num_requests=6, greedy=True))
        for one in (engine, gaudi_engines.open_engine(path, backend="torch"))
    )
    assert found == expected
    if mode != "eager":
        assert engine.totals.num_compilations == 0
