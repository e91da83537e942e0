"""Every format's weights against those by its formula, bit for bit."""

from __future__ import annotations

import pytest
import torch

from support.backends import quantised_checkpoints as made
from trencadis.errors import ModelLoadError
from trencadis_torch.linear.formats.choose import source_class
from trencadis_torch.linear.held import ChannelWeight, Float8Weight, FloatWeight, GroupedWeight

NAME = "model.layers.0.self_attn.q_proj"
OUTPUTS, INPUTS = 24, 96


def weight(seed=0, outputs=OUTPUTS, inputs=INPUTS):
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def read(path, table, stored, *, dtype=torch.bfloat16, name=NAME, more=None):
    tensors = {name + suffix: one for suffix, one in stored.items()} | (more or {})
    return source_class(table, "here")(made.mapped(path, tensors), table, path="here", dtype=dtype)


def shuffled(size):
    return torch.randperm(size, generator=torch.Generator().manual_seed(3))


def table(kind, **changes):
    return {**made.FORMATS[kind].table, **changes}


def check(source, expected, form, *, name=NAME, floats=None, exact=None):
    """The weight is held in the form, has the formula's bits, and so has what is read of it as floats and by rows.

    ``exact`` has those before they are rounded to what is read as floats.
    """
    held = source.weight(f"{name}.weight")
    assert (type(held), held.form) == form
    assert source.shape(f"{name}.weight") == held.shape == tuple(expected.shape)
    assert torch.equal(source.tensor(f"{name}.weight").float(), expected)
    assert source.tensor(f"{name}.weight").dtype == (floats or torch.float32)
    if isinstance(held, FloatWeight):
        expected = expected.bfloat16().float()
    expected = expected if exact is None else exact
    assert torch.equal(held.dequantised(), expected)
    assert torch.equal(held.rows(slice(8, 16)).dequantised(), expected[8:16])


AS_FLOATS = (FloatWeight, "bfloat16")
INT4, INT8 = (GroupedWeight, "int4 in groups of 16"), (GroupedWeight, "int8 in groups of 16")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [16, 32, -1])
def test_awq_is_held_exactly_in_int4_groups(tmp_path, group, dtype):
    stored, expected = made.awq(weight(), group=group, dtype=dtype)
    source = read(tmp_path, table("awq", group_size=group), stored)
    check(source, expected, (GroupedWeight, f"int4 in groups of {INPUTS if group < 0 else group}"))
    assert source.format == f"AWQ, 4 bit {'by output' if group < 0 else f'in groups of {group}'}"
    assert source.names() == {f"{NAME}.weight"}


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [16, -1])
def test_gptq_is_held_exactly_in_groups(tmp_path, group, bits, v2):
    stored, expected = made.gptq(weight(), group=group, bits=bits, v2=v2)
    layout = "gptq_v2" if v2 else "gptq"
    source = read(tmp_path, table("gptq", group_size=group, bits=bits, checkpoint_format=layout), stored)
    check(source, expected, (GroupedWeight, f"int{bits} in groups of {INPUTS if group < 0 else group}"))


def test_gptq_zeros_of_nought_borrow_within_their_word(tmp_path):
    """Version 1 stores zeros less one in a whole word: a zero of nought borrows from the next."""
    all_positive = weight().abs()
    stored, expected = made.gptq(all_positive)
    assert (stored[".qzeros"] == -0x11111111).all()
    check(read(tmp_path, table("gptq"), stored), expected, INT4)


def test_gptq_without_g_idx_has_groups_in_order(tmp_path):
    stored, expected = made.gptq(weight(), index=False)
    check(read(tmp_path, table("gptq"), stored), expected, INT4)


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_act_order_is_held_exactly_with_its_order_of_inputs(tmp_path, bits):
    stored, expected = made.gptq(weight(), order=shuffled(INPUTS), bits=bits)
    source = read(tmp_path, table("gptq", desc_act=True, bits=bits), stored)
    check(source, expected, (GroupedWeight, f"int{bits} in groups of 16, act-order"))
    assert source.format == f"GPTQ, {bits} bit in groups of 16, act-order"


def test_groups_of_different_sizes_are_held_as_bfloat16(tmp_path):
    """Such a g_idx is of no quantiser that is known."""
    stored, _ = made.gptq(weight())
    stored[".g_idx"] = torch.tensor([0] * 17 + [1] * 15 + [2] * 16 + [3] * 16 + [4] * 16 + [5] * 16, dtype=torch.int32)
    held = read(tmp_path, table("gptq", desc_act=True), stored).weight(f"{NAME}.weight")
    assert held.form == "bfloat16"


def test_gptq_groups_that_are_runs_in_another_order_stay_groups(tmp_path):
    order = torch.arange(INPUTS).unflatten(0, (-1, 16))[shuffled(INPUTS // 16)].flatten()
    stored, expected = made.gptq(weight(), order=order)
    assert stored[".g_idx"][0] != 0
    check(read(tmp_path, table("gptq", desc_act=True), stored), expected, INT4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("strategy", ["group", "channel"])
def test_compressed_tensors_packed_integers_are_held_exactly(tmp_path, strategy, bits, symmetric, dtype):
    group = 16 if strategy == "group" else -1
    stored, expected = made.compressed_ints(weight(), group=group, bits=bits, symmetric=symmetric, dtype=dtype)
    source = read(tmp_path, packed(strategy, bits, symmetric), stored)
    check(source, expected, (GroupedWeight, f"int{bits} in groups of {16 if strategy == 'group' else INPUTS}"))


def packed(strategy, bits, symmetric):
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    if strategy == "group":
        weights["group_size"] = 16
    return table("compressed_int4", config_groups={"group_0": {"targets": ["Linear"], "weights": weights}})


def test_compressed_tensors_odd_sizes_leave_part_of_a_word(tmp_path):
    """10 outputs in words of zeros, 12 inputs in words of values."""
    one = weight(outputs=10, inputs=12)
    stored, expected = made.compressed_ints(one, group=-1, symmetric=False)
    held = read(tmp_path, packed("channel", 4, False), stored).weight(f"{NAME}.weight")
    assert torch.equal(held.dequantised(), expected)


def test_compressed_tensors_act_order_is_held_exactly_with_its_order_of_inputs(tmp_path):
    stored, expected = made.compressed_ints(weight(), order=shuffled(INPUTS))
    source = read(tmp_path, packed("group", 4, True), stored)
    check(source, expected, (GroupedWeight, "int4 in groups of 16, act-order"))


@pytest.mark.parametrize("group", [-1, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_int8_is_held_exactly(tmp_path, group, symmetric):
    stored, expected = made.compressed_ints(weight(), group=group, bits=8, packed=False, symmetric=symmetric)
    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric}
    weights |= {"strategy": "channel"} if group < 0 else {"strategy": "group", "group_size": 16}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    source = read(tmp_path, table("compressed_int8", config_groups=groups), stored)
    by_output = (ChannelWeight, "int8") if symmetric else (GroupedWeight, f"int8 in groups of {INPUTS}")
    check(source, expected, by_output if group < 0 else INT8)


@pytest.mark.parametrize("held", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("scales", ["block", "channel", "tensor"])
def test_fp8_is_held_as_it_is_stored_and_read_as_the_models_floats(tmp_path, scales, kind, dtype, held):
    """Blocks of 20 x 64 leave part of a block at the end of either side: groups of 32 inputs are all in one block."""
    block = (20, 64) if scales == "block" else None
    given = {"block": block, "scales": scales, "dtype": dtype, "kind": getattr(torch, kind)}
    stored, expected = made.fp8(weight(), held=held, **given)
    _, exact = made.fp8(weight(), held=torch.float32, **given)
    source = read(tmp_path, table("fp8", weight_block_size=block, fmt=kind[7:11]), stored, dtype=held)
    check(source, expected, (Float8Weight, f"{kind} in groups of 32" if block else kind), floats=held, exact=exact)
    assert source.format == f"FP8{' in blocks of 20 x 64' if block else ''}"


def test_fp8_in_blocks_that_leave_runs_below_16_inputs_is_held_as_bfloat16(tmp_path):
    stored, expected = made.fp8(weight(), block=(16, 36))
    source = read(tmp_path, table("fp8", weight_block_size=(16, 36)), stored)
    check(source, expected, AS_FLOATS, floats=torch.bfloat16)


@pytest.mark.parametrize(("kind", "octet"), [("float8_e4m3fn", 0x7F), ("float8_e5m2", 0xFC), ("float8_e5m2", 0x7E)])
def test_fp8_with_what_is_no_finite_number_keeps_it(tmp_path, kind, octet):
    stored, _ = made.fp8(weight(), kind=getattr(torch, kind))
    stored[".weight"].view(torch.uint8)[3, 5] = octet
    held = read(tmp_path, table("fp8", fmt=kind[7:11]), stored).weight(f"{NAME}.weight")
    assert held.form == "bfloat16"
    assert not bool(held.dequantised()[3, 5].isfinite())


def test_fp8_of_a_float32_model_is_read_in_16_bits(tmp_path):
    stored, expected = made.fp8(weight())
    _, exact = made.fp8(weight(), held=torch.float32)
    source = read(tmp_path, table("fp8"), stored, dtype=torch.float32)
    check(source, expected, (Float8Weight, "float8_e4m3fn in groups of 32"), floats=torch.bfloat16, exact=exact)


def test_fp8_of_fbgemm_has_scales_by_output(tmp_path):
    stored, expected = made.fp8(weight(), scales="channel", suffix=".weight_scale")
    _, exact = made.fp8(weight(), scales="channel", held=torch.float32)
    source = read(tmp_path, {"quant_method": "fbgemm_fp8"}, stored)
    check(source, expected, (Float8Weight, "float8_e4m3fn"), floats=torch.bfloat16, exact=exact)


@pytest.mark.parametrize("strategy", ["block", "channel", "tensor"])
def test_compressed_tensors_fp8_is_held_as_it_is_stored(tmp_path, strategy):
    block = (16, 32) if strategy == "block" else None
    stored, expected = made.fp8(weight(), block=block, scales=strategy, suffix=".weight_scale")
    _, exact = made.fp8(weight(), block=block, scales=strategy, held=torch.float32)
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": block}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    source = read(tmp_path, table("compressed_fp8", config_groups=groups), stored)
    form = (Float8Weight, "float8_e4m3fn" + (" in groups of 32" if block else ""))
    check(source, expected, form, floats=torch.bfloat16, exact=exact)


def test_compressed_tensors_mxfp4_is_held_exactly_in_4_bits(tmp_path):
    stored, expected = made.compressed_fp4(weight(), kind="mxfp4")
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 32}}}
    source = read(tmp_path, table("compressed_nvfp4", format="mxfp4-pack-quantized", config_groups=groups), stored)
    check(source, expected, (GroupedWeight, "4 bit levels in groups of 32"))
    assert source.format == "compressed-tensors, MXFP4 in groups of 32"


def test_compressed_tensors_nvfp4_is_held_in_4_bits_to_a_float32_rounding(tmp_path):
    """A scale is a quotient of 24 bits there: the minimum of a group is rounded once, and once the sum."""
    stored, expected = made.compressed_fp4(weight())
    source = read(tmp_path, table("compressed_nvfp4"), stored)
    held = source.weight(f"{NAME}.weight")
    assert held.form == "4 bit levels in groups of 16"
    largest = expected.unflatten(1, (-1, 16)).abs().amax(2).repeat_interleave(16, dim=1)
    assert ((held.dequantised() - expected).abs() <= largest * 2.0**-22).all()
    assert torch.equal(held.dequantised().bfloat16(), expected.bfloat16())
    assert torch.equal(held.dequantised() == 0, expected == 0)


def test_mxfp4_experts_are_held_exactly_one_by_one(tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    stacked = torch.stack([weight(seed, outputs=64, inputs=OUTPUTS) for seed in range(3)])
    stored, expected = made.mxfp4_experts(stacked)
    bias = torch.randn(3, OUTPUTS)
    source = read(tmp_path, {"quant_method": "mxfp4"}, stored, name=name, more={f"{name}_bias": bias})
    assert source.names() == {name, f"{name}_bias"}
    assert source.shape(name) == (3, 64, OUTPUTS)
    assert torch.equal(source.tensor(name), expected)
    assert torch.equal(source.tensor(f"{name}_bias"), bias)
    one = source.expert(name, 1)
    assert one.form == "4 bit levels in groups of 32"
    assert torch.equal(one.dequantised(), expected[1].T)


@pytest.mark.parametrize("exponent", [0, 1, 251])
def test_mxfp4_scales_from_subnormal_to_enormous_are_exact(tmp_path, exponent):
    blocks = torch.arange(16, dtype=torch.uint8).view(1, 1, 1, 16)
    scales = torch.full((1, 1, 1), exponent, dtype=torch.uint8)
    source = read(tmp_path, {"quant_method": "mxfp4"}, {"_blocks": blocks, "_scales": scales}, name="experts")
    found = source.expert("experts", 0).dequantised().double().flatten()[::2]
    assert found.tolist() == [value * 2.0 ** (exponent - 127) for value in made.E2M1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_4_bit_is_held_in_4_bits_and_read_as_the_floats_it_was_made_of(tmp_path, kind, double, dtype):
    """Levels are rounded to integers of 8 bits: each weight is within a 254th of its block's largest, and nought stays nought."""
    given = {"kind": kind, "double": double}
    stored, expected = made.bitsandbytes(weight(), dtype=dtype, **given)
    source = read(tmp_path, table("bitsandbytes_nf4", bnb_4bit_quant_type=kind), stored)
    found = source.tensor(f"{NAME}.weight")
    assert found.dtype == dtype
    assert torch.equal(found.float(), expected)
    held, exact = source.weight(f"{NAME}.weight"), made.bitsandbytes(weight(), dtype=torch.float32, **given)[1]
    assert held.form == "4 bit levels in groups of 32"
    largest = weight().flatten().unflatten(0, (-1, 64)).abs().amax(1).repeat_interleave(64).view(OUTPUTS, INPUTS)
    assert ((held.dequantised() - exact).abs() <= largest * (1.01 / 254)).all()
    assert torch.equal(held.dequantised() == 0, exact == 0)
    assert float((held.dequantised() - exact).norm() / exact.norm()) < 0.007
    assert torch.equal(held.rows(slice(8, 16)).dequantised(), held.dequantised()[8:16])
    assert source.format == f"bitsandbytes, 4 bit ({kind}), levels rounded to 8 bits"


def test_bitsandbytes_blocks_go_over_the_ends_of_rows_and_words_may_be_stored_as_floats(tmp_path):
    stored, expected = made.bitsandbytes(weight(outputs=6, inputs=44), storage=torch.bfloat16)
    held = read(tmp_path, table("bitsandbytes_nf4"), stored).weight(f"{NAME}.weight")
    assert held.form == "bfloat16"  # 4 inputs in a row share a block
    assert torch.equal(held.dequantised(), expected)


def test_bitsandbytes_int8_is_held_as_int8(tmp_path):
    stored, expected = made.int8_of_bitsandbytes(weight())
    source = read(tmp_path, {"quant_method": "bitsandbytes", "load_in_8bit": True}, stored)
    check(source, expected, (ChannelWeight, "int8"))


@pytest.mark.parametrize("kind", made.FORMATS)
def test_what_is_not_quantised_is_a_view_of_the_file_and_activation_scales_are_no_weights(tmp_path, kind):
    form = made.FORMATS[kind]
    more = {"model.norm.weight": torch.randn(8), "lm_head.weight": torch.randn(16, 8).bfloat16()}
    dropped = {f"{NAME}.input_scale": torch.ones(1), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    scaled = dropped if form.table["quant_method"] in ("fp8", "compressed-tensors") else {}
    source = read(tmp_path, form.table, form.write(weight())[0], more=more | scaled)
    assert source.names() == {f"{NAME}.weight", *more}
    assert source.weight("lm_head.weight").form == "bfloat16"
    assert torch.equal(source.tensor("model.norm.weight"), more["model.norm.weight"])
    assert source.shape("lm_head.weight") == (16, 8)


def test_a_weight_in_several_files_is_one_weight(tmp_path):
    import json

    from safetensors.torch import save_file

    from trencadis_torch.linear.formats.mapped import MappedTensors, weight_files

    stored, expected = made.awq(weight())
    places = {}
    for number, (suffix, tensor) in enumerate(stored.items()):
        places[NAME + suffix] = f"model-{number}.safetensors"
        save_file({NAME + suffix: tensor}, tmp_path / places[NAME + suffix])
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    files = MappedTensors(weight_files(str(tmp_path)))
    source = source_class(table("awq"), "here")(files, table("awq"), path="here", dtype=torch.float16)
    check(source, expected, INT4)


def test_groups_of_layers_have_schemes_of_their_own(tmp_path):
    """Names and patterns count before classes of modules."""
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
    eight = {"num_bits": 8, "type": "int", "strategy": "channel"}
    groups = {
        "all": {"targets": ["Linear"], "weights": four, "format": "pack-quantized"},
        "down": {"targets": ["re:.*down_proj"], "weights": eight, "format": "int-quantized"},
    }
    mixed = table("compressed_int4", format="mixed-precision", config_groups=groups)
    stored, expected = made.compressed_ints(weight())
    other, as_int8 = made.compressed_ints(weight(1), group=-1, bits=8, packed=False)
    down = "model.layers.0.mlp.down_proj"
    source = read(tmp_path, mixed, stored, more={down + suffix: one for suffix, one in other.items()})
    check(source, expected, INT4)
    check(source, as_int8, (ChannelWeight, "int8"), name=down)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quant_method": "aqlm"}, "quant_method is 'aqlm', which is not served; served are awq, bitsandbytes"),
        ({}, "quant_method is None"),
        (table("awq", bits=8), "bits = 8; of awq 4 is served"),
        (table("awq", version="gemv"), "version = 'gemv'; of awq \"gemm\" is served"),
        (table("gptq", bits=3), "bits = 3; of gptq 4 or 8 is served"),
        (table("gptq", checkpoint_format="marlin"), "checkpoint_format = 'marlin'"),
        (table("gptq", dynamic={"-:lm_head": {}}), "dynamic"),
        (table("fp8", fmt="e3m4"), "fmt = 'e3m4'"),
        (table("compressed_int4", format="marlin-24"), "format = 'marlin-24'"),
        (table("compressed_int4", sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
        (table("compressed_int4", transform_config={"config_groups": {"R1": {}}}), "transform_config"),
        (table("compressed_int4", config_groups={}), "config_groups"),
        (
            table("compressed_int4", config_groups={"g": {"targets": ["Linear"], "weights": {"num_bits": 3}}}),
            "config_groups.g.weights = 'int of 3 bits'",
        ),
        (
            table("compressed_int4", config_groups={"g": {"targets": ["Linear"], "weights": {"strategy": "block"}}}),
            "config_groups.g.weights.strategy = 'block'",
        ),
        (table("bitsandbytes_nf4", bnb_4bit_quant_type="af4"), "bnb_4bit_quant_type = 'af4'"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused_with_value_and_remedy(tmp_path, given, words):
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path, given, made.awq(weight())[0])
    assert words in str(caught.value)
    assert "here: quantization_config" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("kind", "spoil", "words"),
    [
        ("awq", lambda parts: parts.pop(".scales"), "scales is missing beside"),
        (
            "awq",
            lambda parts: parts.update({".qzeros": parts[".qzeros"][:, :1]}),
            "qzeros has the shape [6, 1], not [6, 3]",
        ),
        ("gptq", lambda parts: parts.update({".g_idx": parts[".g_idx"] + 6}), "g_idx names groups"),
        ("gptq", lambda parts: parts.update({".qweight": parts[".qweight"].float()}), "data type float32, not int32"),
        ("fp8", lambda parts: parts.update({".weight_scale_inv": torch.ones(5, 5)}), "scales have the shape [5, 5]"),
        ("fp8", lambda parts: parts.pop(".weight_scale_inv"), "stored as float8_e4m3fn, and nothing"),
        ("compressed_int4", lambda parts: parts.pop(".weight_shape"), "shape is missing beside"),
        ("compressed_int4", lambda parts: parts.pop(".weight_zero_point"), "zero_point is missing"),
        ("compressed_int8", lambda parts: parts.pop(".weight_scale"), "stored as int8, and nothing"),
        ("compressed_nvfp4", lambda parts: parts.pop(".weight_global_scale"), "global_scale is missing"),
        ("bitsandbytes_nf4", lambda parts: parts.pop(".weight.absmax"), "absmax is missing"),
        (
            "bitsandbytes_nf4",
            lambda parts: parts.update({".weight.quant_state.bitsandbytes__nf4": torch.zeros(3, dtype=torch.uint8)}),
            "quant_state cannot be read",
        ),
    ],
)
def test_parts_that_contradict_each_other_are_named(tmp_path, kind, spoil, words):
    stored = made.FORMATS[kind].write(weight())[0]
    spoil(stored)
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path, made.FORMATS[kind].table, stored).weight(f"{NAME}.weight")
    assert words in str(caught.value)
    assert f"here: {NAME}.weight" in str(caught.value)


def test_a_quantised_weight_of_an_ignored_module_is_a_contradiction(tmp_path):
    stored = made.compressed_ints(weight(), symmetric=False)[0]
    with pytest.raises(ModelLoadError, match=r"quantization_config\.ignore says that it is not"):
        read(tmp_path, table("compressed_int4", ignore=["re:.*q_proj"]), stored)
