from __future__ import annotations

import attrs
import pytest

from trencadis.errors import ConfigValueError
from trencadis_torch.config import TorchConfig


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:12"])
def test_known_devices_are_accepted(device):
    assert TorchConfig(device=device).device == device


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "hpu"},
        {"device": "cuda:"},
        {"layout": "flat"},
        {"attention": "flash"},
        {"kv_dtype": "fp8"},
        {"num_threads": -1},
        {"max_prefill_batch_size": 0},
        {"pack": "always"},
        {"quantization": "int4"},
        {"compile": "all"},
        {"graphs": "all"},
    ],
)
def test_impossible_values_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TorchConfig(**wrong)


def test_a_device_that_does_not_exist_is_told_those_that_do():
    with pytest.raises(ValueError, match=r'^must be "auto", "cpu", "cuda" or "cuda:N"'):
        TorchConfig(device="gpu")


def test_graphs_need_static_shapes():
    TorchConfig(compile="buckets", layout="padded").check()
    TorchConfig().check()
    with pytest.raises(ConfigValueError, match=r'compile = "buckets": .* layout = "ragged"') as failed:
        TorchConfig(compile="buckets").check()
    assert 'layout = "padded"' in failed.value.hint


def test_every_field_explains_itself():
    assert all(field.metadata["help"].endswith(".") for field in attrs.fields(TorchConfig))


@pytest.mark.parametrize("graphs", ["buckets", "checked"])
def test_graphs_need_static_shapes_and_layers_that_a_graph_can_hold(graphs):
    with pytest.raises(ConfigValueError, match=f'graphs = "{graphs}".*layout = "ragged"'):
        TorchConfig(graphs=graphs).check()
    with pytest.raises(ConfigValueError, match=f'graphs = "{graphs}" with quantization = "int8"'):
        TorchConfig(graphs=graphs, layout="padded", quantization="int8").check()
    TorchConfig(graphs=graphs, layout="padded").check()
    TorchConfig().check()


@pytest.mark.parametrize("graphs", ["buckets", "checked"])
def test_a_bucket_is_compiled_or_captured_not_both(graphs):
    with pytest.raises(ConfigValueError, match=f'compile = "buckets" with graphs = "{graphs}"') as failed:
        TorchConfig(compile="buckets", graphs=graphs, layout="padded").check()
    assert 'graphs = "off"' in failed.value.hint
    assert 'compile = "off"' in failed.value.hint


def test_compiled_graphs_do_not_attend_by_the_kernel_for_cuda():
    with pytest.raises(ConfigValueError, match=r'compile = "buckets" with attention = "triton"'):
        TorchConfig(compile="buckets", attention="triton", layout="padded").check()
