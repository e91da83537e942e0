"""Step times by data sheet, against numbers worked out by hand."""

from __future__ import annotations

import attrs
import pytest

from trencadis.errors import ConfigError
from trencadis.records import StepShape
from trencadis_tools.simulation.step_times import (
    FORMS,
    DeviceSheet,
    Factors,
    ModelSizes,
    SheetStepTimes,
    load_step_times,
    parse_sheet,
    read_model_sizes,
    read_sheet,
    sheet_names,
)

LLAMA_2_7B = read_model_sizes("llama_2_7b")
H100 = read_sheet("h100")
DECODES = StepShape(num_decodes=4, num_decode_tokens=4, num_decode_context=4000)
PREFILL = StepShape(num_prefills=1, num_prefill_tokens=100, num_prefill_context=100, prefill_products=5050.0)

ROUND = DeviceSheet(
    name="round",
    flops={"bfloat16": 1e12, "float8": 2e12},
    bandwidth_bytes_per_s=1e9,
    memory_bytes=1e9,
    link_bytes_per_s=1e8,
    sources=(),
    factors_from="",
)
SMALL = ModelSizes(num_layers=2, hidden_size=8, num_heads=4, num_kv_heads=2, head_size=2, ffn_size=16)
"""Attention: 2 * 8 * 2 * (4 + 2) = 192 weights of a layer, feed-forward: 3 * 8 * 16 = 384; 1,152 of both layers."""


def test_parts_of_a_small_model_are_those_counted_by_hand():
    parts = SheetStepTimes(model=SMALL, device=ROUND).parts(
        StepShape(
            num_decodes=3,
            num_decode_tokens=3,
            num_decode_context=50,
            num_prefills=1,
            num_prefill_tokens=10,
            prefill_products=55.0,
        )
    )
    pair_ops = 4 * 2 * 4 * 2  # for two layers, four heads of two
    kv_bytes = 2 * 2 * 2 * 2 * 2  # keys and values, two layers, two heads of two, two bytes
    assert parts.prefill_compute_s == pytest.approx((10 * 2 * 1152 + 55 * pair_ops) / 1e12)
    assert parts.decode_compute_s == pytest.approx((3 * 2 * 1152 + 50 * pair_ops) / 1e12)
    assert parts.prefill_kv_s == pytest.approx(10 * kv_bytes / 1e9)
    assert parts.decode_kv_s == pytest.approx(50 * kv_bytes / 1e9)
    assert parts.weights_s == pytest.approx(2 * 1152 / 1e9)
    assert parts.link_s == 0.0


def test_two_ranks_halve_all_but_the_sums_between_them():
    one, two = (SheetStepTimes(model=SMALL, device=ROUND, tensor=tensor).parts(DECODES) for tensor in (1, 2))
    for name in ("decode_compute_s", "decode_kv_s", "weights_s"):
        assert getattr(two, name) == pytest.approx(getattr(one, name) / 2)
    # Four tokens of 8 numbers of two bytes, twice in each of two layers, of which a ring of two sends 2 * 1 / 2.
    assert two.link_s == pytest.approx(4 * 8 * 2 * 2 * 2 / 1e8)


def test_a_token_is_computed_by_its_experts_and_all_experts_are_read():
    experts = {"num_expert_layers": 1, "num_experts": 8, "num_routes": 2, "expert_size": 4, "shared_expert_size": 3}
    model = attrs.evolve(SMALL, **experts)
    parts = SheetStepTimes(model=model, device=ROUND).parts(StepShape(num_prefills=1, num_prefill_tokens=1))
    assert parts.prefill_compute_s == pytest.approx(2 * (2 * 192 + 384 + 3 * 8 * (2 * 4 + 3)) / 1e12)
    assert parts.weights_s == pytest.approx(2 * (2 * 192 + 384 + 3 * 8 * (8 * 4 + 3)) / 1e9)


def test_factors_and_overheads_are_summed_up():
    factors = Factors(
        prefill_compute=2.0,
        prefill_kv=3.0,
        decode_compute=5.0,
        decode_kv=7.0,
        weights=11.0,
        link=13.0,
        layer_s=0.1,
        row_s=0.01,
        step_s=1.0,
    )
    times = SheetStepTimes(model=SMALL, device=attrs.evolve(ROUND, factors=factors), tensor=2, form="published")
    shape = attrs.evolve(DECODES, num_prefills=1, num_prefill_tokens=10, prefill_products=55.0)
    parts = times.parts(shape)
    expected = (
        2 * parts.prefill_compute_s
        + 3 * parts.prefill_kv_s
        + 5 * parts.decode_compute_s
        + 7 * parts.decode_kv_s
        + 11 * parts.weights_s
        + 13 * parts.link_s
        + 2 * 0.1
        + 5 * 0.01
        + 1.0
    )
    assert times.device_s(shape) == pytest.approx(expected)
    assert times.host_s(shape) == 0.0
    assert times.device_s(StepShape()) == 0.0


def test_layers_that_alternate_with_experts_cost_extra_and_experts_everywhere_do_not():
    factors = attrs.evolve(Factors(), expert_layer_s=10.0)
    device = attrs.evolve(ROUND, factors=factors)
    experts = {"num_experts": 8, "num_routes": 2, "expert_size": 4}
    some, every = (attrs.evolve(SMALL, num_expert_layers=number, **experts) for number in (1, 2))
    assert SheetStepTimes(model=some, device=device).device_s(DECODES) > 10.0
    assert SheetStepTimes(model=every, device=device).device_s(DECODES) < 1.0


def test_llama_2_7b_on_an_h100_takes_what_inference_sim_computes():
    """By hand from its formula, in µs: 1.36252915 · weights + 1.94710771 · KV + 32 · 32.09546717 + rows · 4.41684444 + 126.024825."""
    weights_us = 32 * (4096 * 4 * 4096 + 3 * 4096 * 11008) * 2 / 3.35e6
    kv_us = 32 * 2 * 4096 * 2 * 4000 / 3.35e6
    decodes_us = 1.36252915 * weights_us + 1.94710771 * kv_us + 32 * 32.09546717 + 4 * 4.41684444 + 126.024825
    assert SheetStepTimes(model=LLAMA_2_7B, device=H100, form="published").device_s(DECODES) * 1e6 == pytest.approx(
        decodes_us, rel=1e-12
    )
    compute_us = (100 * 2 * 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32 * 4 * 32 * 128 * 5050) / 989.5e6
    prefill_us = 0.152128 * compute_us + 1.36252915 * weights_us + 32 * 32.09546717 + 4.41684444 + 126.024825
    assert SheetStepTimes(model=LLAMA_2_7B, device=H100, form="published").device_s(PREFILL) * 1e6 == pytest.approx(
        prefill_us, rel=1e-12
    )


def test_sums_over_ranks_of_an_h100_count_as_in_inference_sim():
    """Its basis is bytes over the memory's bandwidth, times 0.752037; ours is bytes over the link's."""
    times = SheetStepTimes(model=LLAMA_2_7B, device=H100, tensor=4)
    link_us = 2 * 32 * 4 * 4096 * 2 * 2 * 3 / 4 / 3.35e6
    assert H100.factors.link * times.parts(DECODES).link_s * 1e6 == pytest.approx(0.752037 * link_us, rel=1e-12)


def test_the_roofline_is_the_larger_of_operations_and_bytes():
    times = SheetStepTimes(model=LLAMA_2_7B, device=H100, form="roofline")
    parts = times.parts(DECODES)
    assert times.device_s(DECODES) == parts.weights_s + parts.decode_kv_s
    long = StepShape(num_prefills=1, num_prefill_tokens=20_000)
    assert times.device_s(long) == times.parts(long).prefill_compute_s


def test_the_bounded_form_is_the_larger_of_the_published_one_and_the_roofline():
    long = StepShape(num_prefills=1, num_prefill_tokens=20_000)
    for shape, larger in ((DECODES, "published"), (long, "roofline")):
        times = {form: SheetStepTimes(model=LLAMA_2_7B, device=H100, form=form).device_s(shape) for form in FORMS}
        assert times["bounded"] == times[larger] == max(times.values())


def test_narrow_weights_have_the_peak_of_their_type_or_that_of_bfloat16():
    assert ROUND.peak_flops("float8") == 2e12
    assert read_sheet("a100").peak_flops("float8") == 312e12
    with pytest.raises(ConfigError, match="float64"):
        ROUND.peak_flops("float64")


def test_heads_that_do_not_go_over_the_ranks_are_refused():
    with pytest.raises(ConfigError, match="do not go over 3 ranks"):
        SheetStepTimes(model=SMALL, device=ROUND, tensor=3)


@pytest.mark.parametrize("name", sheet_names())
def test_every_sheet_says_where_its_numbers_are_from(name):
    sheet = read_sheet(name)
    assert sheet.sources
    assert sheet.factors_from
    assert sheet.peak_flops("float32" if name == "cpu" else "bfloat16") > 0


def test_drafts_are_multiplied_with_the_entries_of_their_sequence_and_read_them_once():
    sheet = SheetStepTimes(model=SMALL, device=ROUND)
    plain = sheet.parts(StepShape(num_decodes=3, num_decode_tokens=3, num_decode_context=60))
    drafted = sheet.parts(StepShape(num_decodes=3, num_decode_tokens=12, num_decode_context=60))
    assert drafted.decode_kv_s == plain.decode_kv_s
    assert drafted.decode_compute_s == pytest.approx(4 * plain.decode_compute_s)


OWN = """
name = "round"
flops = { bfloat16 = 1e12, float8 = 2e12 }
bandwidth_bytes_per_s = 1e9
memory_bytes = 1e9
link_bytes_per_s = 1e8
factors_from = ""
"""


def test_a_sheet_of_ones_own_is_the_same_as_one_of_the_package(tmp_path):
    assert parse_sheet(OWN, "own.toml") == ROUND
    file = tmp_path / "a:b" / "own.toml"
    file.parent.mkdir()
    file.write_text(OWN)
    times = load_step_times(f"{file}:llama_2_7b:tp2:roofline")
    assert times == SheetStepTimes(model=LLAMA_2_7B, device=attrs.evolve(ROUND), tensor=2, form="roofline")
    with pytest.raises(ConfigError, match="depend on the model"):
        load_step_times(file)


def test_a_file_that_is_too_large_for_a_sheet_is_refused_before_it_is_parsed(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text("#" * (1 << 21))
    with pytest.raises(ConfigError, match="more than 1,048,576 bytes"):
        load_step_times(f"{file}:llama_2_7b")


def test_a_sum_over_ranks_waits_for_the_latency_of_its_link_whatever_its_bytes():
    device = attrs.evolve(ROUND, link_latency_s=1e-3)
    assert SheetStepTimes(model=SMALL, device=device).parts(DECODES).link_latency_s == 0.0
    for form in FORMS:
        one, two = (SheetStepTimes(model=SMALL, device=each, tensor=2, form=form) for each in (ROUND, device))
        assert two.device_s(DECODES) - one.device_s(DECODES) == pytest.approx(
            2 * 2 * 1e-3
        )  # twice in each of two layers


def test_a_device_without_links_computes_alone():
    alone = attrs.evolve(ROUND, link_bytes_per_s=0.0)
    assert SheetStepTimes(model=SMALL, device=alone).parts(DECODES).link_s == 0.0
    with pytest.raises(ConfigError, match="no link_bytes_per_s, and 2 ranks need links"):
        SheetStepTimes(model=SMALL, device=alone, tensor=2)
