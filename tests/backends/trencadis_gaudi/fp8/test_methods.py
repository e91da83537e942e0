from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from trencadis.clock import SystemClock
from trencadis.config import load_config
from trencadis.errors import ConfigValueError, ModelLoadError
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.fp8.measurements import read_measurements
from trencadis_gaudi.fp8.methods import DYNAMIC, STATIC
from trencadis_gaudi.habana import load_habana

TABLE = {"mode": "QUANTIZE", "observer": "maxabs", "dump_stats_path": "out/measure"}
"""As of vllm-gaudi 091bbadd, calibration/quantization_config/maxabs_quant.json."""


def read(tmp_path, table, fp8="inc"):
    path = tmp_path / "quant.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return load({"QUANT_CONFIG": str(path), "TRENCADIS_BACKEND__GAUDI__FP8": fp8}).with_quant_config()


def load(environ):
    loaded = load_config(components={"backend": {"gaudi": GaudiConfig}}, environ=environ)
    config = loaded.config.backend.components["gaudi"]
    config.check()
    return config


def test_configuration_of_the_quantiser_means_static_scales(tmp_path):
    config = read(
        tmp_path, {**TABLE, "scale_method": "MAXABS_POW2", "blocklist": {"types": [], "names": ["self_attn"]}}
    )
    config.check()
    assert (config.fp8, config.fp8_scale_method, config.fp8_exclude) == ("static", "maxabs_pow2", ("self_attn",))
    assert config.fp8_measurements == "out/measure_hooks_maxabs"
    assert config.scale_method is STATIC["maxabs_pow2"]
    assert read(tmp_path, TABLE).scale_method is STATIC["maxabs_hw"]


def test_configuration_with_dynamic_quantization_needs_no_measurement(tmp_path):
    blocklist = {"types": ["Matmul", "B2BMatmul", "KVCache", "VLLMKVCache"]}
    method = "act_maxabs_pcs_pow2_weight_maxabs_pts_pow2_hw"
    config = read(tmp_path, {**TABLE, "dynamic_quantization": True, "scale_method": method, "blocklist": blocklist})
    config.check()
    assert (config.fp8, config.fp8_measurements) == ("dynamic", "")
    assert config.scale_method is DYNAMIC[method]


def test_device_is_opened_with_what_the_file_says(tmp_path):
    path = tmp_path / "quant.json"
    path.write_text(json.dumps({**TABLE, "scale_method": "MAXABS_POW2"}))
    options = GaudiConfig(device="emulated", mode="eager", fp8="inc", quant_config=str(path))
    habana = load_habana(options, clock=SystemClock())
    assert (habana.config.fp8, habana.config.scale_method) == ("static", STATIC["maxabs_pow2"])
    assert habana.fp8 is not None


@pytest.mark.parametrize("fp8", ["off", "dynamic"])
def test_file_is_not_read_unless_it_is_asked_for(tmp_path, fp8):
    config = read(tmp_path, "{", fp8=fp8)
    assert (config.fp8, config.computes_fp8) == (fp8, fp8 == "dynamic")
    assert load({"QUANT_CONFIG": "/no/such/file"}).fp8 == "off"


def test_file_must_be_named():
    with pytest.raises(ConfigValueError, match="without quant_config"):
        GaudiConfig(fp8="inc").check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "MEASURE"}, "mode MEASURE is not QUANTIZE"),
        ({"fp8_config": "E5M2"}, "E5M2"),
        ({"scale_method": "maxabs_hw_opt_weight"}, "maxabs_hw_opt_weight is none of the static ones"),
        ({"scale_method": {"default": {}}}, "differs between layers"),
        ({"dynamic_quantization": True}, "maxabs_hw is none of the dynamic ones"),
        ({"observer": "save"}, "observer save"),
        ({"device_for_scales": "GAUDI2"}, "device_for_scales"),
        ({"blocklist": {"types": ["RowParallelLinear"]}}, "blocklist.types"),
        ({"allowlist": {"types": [], "names": ["mlp"]}}, "allowlist"),
        ({"allowlist": {"types": ["Matmul"]}}, "allowlist"),
    ],
)
def test_what_is_not_served_is_refused_in_words(tmp_path, change, message):
    with pytest.raises(ConfigValueError, match=message) as caught:
        read(tmp_path, {**TABLE, **change})
    assert str(tmp_path / "quant.json") in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_file_that_is_no_configuration_is_refused_by_name(tmp_path, text):
    with pytest.raises(ConfigValueError, match=r"quant\.json"):
        read(tmp_path, text)


def test_static_scales_need_measurements_and_a_method_of_their_kind():
    with pytest.raises(ConfigValueError, match="without fp8_measurements"):
        GaudiConfig(fp8="static").check()
    for mode, method in (("dynamic", "maxabs_hw"), ("static", "maxabs_pcs_pow2")):
        with pytest.raises(ConfigValueError, match=f'"{method}" with fp8 = "{mode}"'):
            GaudiConfig(fp8=mode, fp8_scale_method=method, fp8_measurements="x").check()
    with pytest.raises(ValueError, match="no pattern"):
        GaudiConfig(fp8_exclude=("(",))
    GaudiConfig(fp8="dynamic", kv_cache_dtype="fp8").check()


LINEAR = nn.Linear(48, 20)
Q, QKV = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.qkv_proj"
ATTENTION = "model.layers.0.self_attn"


def write(path, nodes, **more):
    path.write_text(json.dumps({"GlobalRank": None, "LocalRank": 0, "Mode": "DynamicRange", "Nodes": nodes, **more}))
    return path


def node(*inputs, weight=None):
    return {"inputs": list(inputs), "params": {} if weight is None else {"weight": weight}}


def measured(tmp_path, **nodes):
    return read_measurements(str(write(tmp_path / "measure_hooks_maxabs.json", nodes)))


@pytest.mark.parametrize("given", ["", "_hooks_maxabs", "_hooks_maxabs_0_1", "_hooks_maxabs_0_1.json"])
def test_file_is_found_by_its_name_or_by_what_the_quantiser_was_told(tmp_path, given):
    write(tmp_path / "measure_hooks_maxabs_0_1.json", {Q: node([[3.5]])})
    assert read_measurements(f"{tmp_path}/measure{given}").input_of(Q, LINEAR) == 3.5


def test_archive_holds_the_same_as_the_json(tmp_path):
    nodes = {Q: {"inputs": [np.array([[3.5]], np.float32)], "params": {"weight": np.full((20, 1), 0.5, np.float32)}}}
    np.savez(tmp_path / "measure.npz", {"GlobalRank": None, "Mode": "DynamicRange", "Nodes": nodes})
    assert read_measurements(str(tmp_path / "measure.npz")).input_of(Q, LINEAR) == 3.5


def test_archive_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return (eval, ("1 + 1",))

    assert pickle.loads(pickle.dumps(Evil())) == 2
    np.savez(tmp_path / "measure.npz", {"Nodes": Evil()})
    with pytest.raises(ModelLoadError, match=r"measure\.npz: is no measurement file: it calls builtins\.eval"):
        read_measurements(str(tmp_path / "measure.npz"))


def test_input_of_a_fused_layer_is_that_of_its_parts(tmp_path):
    found = measured(tmp_path, **{QKV: node([[2.0]]), "model.layers.0.mlp.gate_up_proj": node([[7.0]])})
    assert [found.input_of(f"{ATTENTION}.{name}_proj", LINEAR) for name in "qkv"] == [2.0] * 3
    assert found.input_of("model.layers.0.mlp.up_proj", LINEAR) == 7.0


def test_largest_of_the_channels_counts(tmp_path):
    assert measured(tmp_path, **{Q: node([[value] for value in range(48)])}).input_of(Q, LINEAR) == 47


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"other": node([[1.0]])}, f"layer {Q}: it was not measured"),
        ({Q: node([[1.0]] * 7)}, f"layer {Q}: the measurement of its input is of 7 channels; the layer has 48"),
        (
            {Q: node([[1.0]], weight=[[1.0]] * 48)},
            f"layer {Q}: the measurement of the weight is of 48 channels; the layer has 20",
        ),
        ({Q: node()}, f"layer {Q}: it has not one input"),
        ({Q: node([[1.0]], [[1.0]])}, f"layer {Q}: it has not one input"),
        ({Q: {"outputs": [[[1.0]]]}}, f"layer {Q}: it has not one input"),
        ({Q: node([["loud"]])}, f"layer {Q}: the measurement of its input is not of numbers"),
        ({Q: node([[-1.0]])}, f"layer {Q}: the measurement of its input is no magnitude"),
        ({Q: node([[float("nan")]])}, "is no measurement file: nan is no number"),
    ],
)
def test_measurement_that_does_not_fit_is_refused_with_file_and_layer(tmp_path, nodes, message):
    with pytest.raises(ModelLoadError) as caught:
        measured(tmp_path, **nodes).input_of(Q, LINEAR)
    assert message in str(caught.value)
    assert "measure_hooks_maxabs.json" in str(caught.value)
    assert "fp8_measurements" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no measurement file"),
        ("[]", 'no "Nodes"'),
        ('{"Nodes": {}}', 'no "Nodes"'),
        ('{"Nodes": {"a": 1}}', 'no "Nodes"'),
    ],
)
def test_file_of_another_kind_is_refused_with_its_name(tmp_path, text, message):
    path = tmp_path / "measure.json"
    path.write_text(text)
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_measurements(str(path))
    assert str(path) in str(caught.value)


def test_missing_file_and_that_of_one_of_several_cards_are_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"there is no .*nothing, and no .*nothing_hooks_maxabs\.json"):
        read_measurements(str(tmp_path / "nothing"))
    write(tmp_path / "measure_hooks_maxabs_3_8.json", {Q: node([[1.0]])})
    with pytest.raises(ModelLoadError, match="one of 8 cards") as caught:
        read_measurements(str(tmp_path / "measure_hooks_maxabs_3_8.json"))
    assert "Unify" in caught.value.hint
    (tmp_path / "broken.npz").write_bytes(b"PK nothing")
    with pytest.raises(ModelLoadError, match="is no measurement file"):
        read_measurements(str(tmp_path / "broken.npz"))


@pytest.mark.parametrize("middle", ["", ".attn.impl", ".attn", ".impl"])
def test_keys_and_values_are_found_under_the_names_of_both_softwares(tmp_path, middle):
    nodes = {f"{ATTENTION}{middle}.k_cache": node([[5.0]]), f"{ATTENTION}{middle}.v_cache": node([[2.0]])}
    assert measured(tmp_path, **nodes).cache_of(ATTENTION) == (5.0, 2.0)


def test_cache_that_was_not_measured_has_no_magnitude_and_half_of_one_is_refused(tmp_path):
    assert measured(tmp_path, **{Q: node([[1.0]])}).cache_of(ATTENTION) is None
    with pytest.raises(ModelLoadError, match=rf"layer {ATTENTION}\.v_cache: it was not measured"):
        measured(tmp_path, **{f"{ATTENTION}.k_cache": node([[1.0]])}).cache_of(ATTENTION)


def test_tensor_of_the_file_has_the_vendors_shape(tmp_path):
    """``state`` of the observer is ``(1, 1)``."""
    assert measured(tmp_path, **{Q: node(torch.full((1, 1), 1.5).tolist())}).input_of(Q, LINEAR) == 1.5
