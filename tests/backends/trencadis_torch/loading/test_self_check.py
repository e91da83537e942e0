from __future__ import annotations

import pytest
import torch

from support.backends import tiny_models
from trencadis.errors import ModelLoadError
from trencadis_torch.attention import adapter
from trencadis_torch.attention.choice import choose_kernel
from trencadis_torch.loading import profile_run as trial
from trencadis_torch.loading.inspection import attention_layers, model_facts
from trencadis_torch.loading.profile_run import AllocationTracker, measure_memory
from trencadis_torch.loading.self_check import ModelCheck, check_model


@pytest.fixture(autouse=True)
def registered():
    adapter.register()


@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sound_model_passes_and_is_left_with_paged_attention(layout, dtype):
    model = tiny_models.make_model("gemma2", dtype=dtype)
    check_model(model, attention_layers(model), layout=layout)
    assert model.config._attn_implementation == adapter.PAGED


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_every_pass_runs_once(layout):
    model = tiny_models.make_model("llama")
    layers = attention_layers(model)
    check = ModelCheck(model, layers, layout=layout)
    num_tokens = []
    model.register_forward_pre_hook(
        lambda module, args, options: num_tokens.append(options["input_ids"].numel()), with_kwargs=True
    )
    check.compare(model)
    # A chunk of one sequence, the rest of it with the other one, a token of each; padded ones are as long as the longest.
    assert num_tokens == ([12, 13 + 12, 2] if layout == "ragged" else [12, 2 * 13, 2])


def refused(model, layers=None, *, match="differ from the model's own"):
    layers = layers or attention_layers(model)
    for layout in ("ragged", "padded"):
        with pytest.raises(ModelLoadError, match=match):
            check_model(model, layers, layout=layout)


def test_state_that_crosses_tokens_outside_attention_is_noticed():
    model = tiny_models.make_model("llama")

    def shift(module, inputs, output):
        return output + 0.5 * output.roll(1, dims=1)

    model.model.layers[1].mlp.register_forward_hook(shift)
    refused(model)


def test_window_that_was_missed_is_noticed():
    model = tiny_models.make_model("mistral")
    windowless = tuple(
        type(layer)(**{name: getattr(layer, name) for name in layer.__slots__ if name != "__weakref__"} | {"window": 0})
        for layer in attention_layers(model)
    )
    refused(model, windowless)


def test_logits_that_are_no_numbers_are_noticed():
    model = tiny_models.make_model("llama")
    layers = attention_layers(model)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    refused(model, layers)


@pytest.fixture(scope="module")
def model():
    adapter.register()
    made = tiny_models.make_model("llama")
    layers = attention_layers(made)
    adapter.switch(made, adapter.PAGED)
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


@pytest.mark.parametrize("num_tokens", [40, 2048])
def test_with_the_cpus_own_kernel_a_few_tokens_are_counted_and_scaled_up(model, monkeypatch, num_tokens):
    made, layers, facts = model
    kernel = choose_kernel("auto", device=torch.device("cpu"), layout="ragged", layers=layers)
    if kernel is None:
        pytest.skip("no C++ compiler")
    tried, held = [], []
    run = trial._run

    def noting(*args, num_tokens, watch, **options):
        tried.append(run(*args, num_tokens=num_tokens, watch=watch, **options))
        held.append(watch.peak)
        return tried[-1]

    monkeypatch.setattr(trial, "_run", noting)
    report = measure_memory(
        made, layers, facts, layout="ragged", max_num_batched_tokens=num_tokens, max_num_seqs=3, kernel=kernel
    )
    assert tried == [min(num_tokens, 64)]
    # At the least the inner states of one MLP, gates and values.
    assert held[0] >= 2 * 4 * made.config.intermediate_size * tried[0]
    assert report.activation_bytes == int(1.25 * held[0] * num_tokens / tried[0]) + 4 * 4 * 3 * 131


def test_counted_temporaries_grow_with_the_tokens_alone(model):
    made, layers, facts = model
    kernel = choose_kernel("auto", device=torch.device("cpu"), layout="ragged", layers=layers)
    if kernel is None:
        pytest.skip("no C++ compiler")
    held = {}
    for num_tokens in (64, 256):
        live = AllocationTracker()
        with torch.inference_mode():
            trial._run(
                made, layers, "ragged", num_tokens=num_tokens, facts=facts, num_logits=1, kernel=kernel, watch=live
            )
        held[num_tokens] = live.peak
    assert 0.9 * 4 * held[64] <= held[256] <= 4 * held[64]


def test_what_lives_at_once_is_counted_until_it_is_let_go() -> None:
    with AllocationTracker() as live:
        first = torch.zeros(1000)
        second = first + 1
        assert live.now == live.peak == 8000
        del first
        assert live.now == 4000
        third = second * 2
        assert (live.now, live.peak) == (8000, 8000)
    del second, third
    assert (live.now, live.peak) == (0, 8000)


def test_temporaries_inside_an_expression_count() -> None:
    given = torch.ones(1000)
    with AllocationTracker() as live:
        result = (given * 2 + given * 3).sum()
    assert result == 5000
    assert live.peak == 3 * 4000
    assert live.now == 4


def test_views_and_operations_in_place_hold_nothing_of_their_own() -> None:
    given = torch.ones(10, 100)
    with AllocationTracker() as live:
        view = given[2:].transpose(0, 1)
        view.add_(1)
        given.mul_(2)
        torch.add(given, 1, out=given)
    assert live.peak == 0


def test_a_view_keeps_the_whole_alive() -> None:
    with AllocationTracker() as live:
        part = torch.zeros(1000)[:10]
        assert live.now == 4000
        del part
        assert live.now == 0


def test_it_counts_in_inference_mode() -> None:
    with torch.inference_mode(), AllocationTracker() as live:
        made = torch.zeros(3, 5, dtype=torch.int8)
        assert live.now == 15
        del made
    assert (live.now, live.peak) == (0, 15)
