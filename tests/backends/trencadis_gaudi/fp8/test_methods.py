from __future__ import annotations

import json

import pytest

from trencadis.clock import SystemClock
from trencadis.config import load_config
from trencadis.errors import ConfigValueError
from trencadis_gaudi.config import GaudiConfig
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
