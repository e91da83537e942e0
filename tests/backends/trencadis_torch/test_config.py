from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from trencadis.errors import BackendError, ConfigValueError, ModelLoadError
from trencadis_torch.config import TorchConfig
from trencadis_torch.device import (
    SMALL_MODEL,
    choose_device,
    choose_dtype,
    fill,
    host_memory,
    numbered_device,
    to_device,
)


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


CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


def dtype_of(stored, device=CPU, *, asked="auto", size=SMALL_MODEL, native=True):
    return choose_dtype(asked, stored=stored, device=device, num_parameters=size, native_bfloat16=native)


@pytest.mark.representatives(11)
@pytest.mark.parametrize(
    ("stored", "options", "held"),
    [
        (torch.float32, {"asked": "float16"}, torch.float16),
        (torch.float16, {"asked": "float32", "device": CUDA}, torch.float32),
        (torch.float16, {"device": CUDA}, torch.float16),
        (torch.bfloat16, {"device": CUDA}, torch.bfloat16),
        (torch.float64, {"device": CUDA}, torch.float32),
        (torch.bfloat16, {}, torch.bfloat16),
        (torch.bfloat16, {"size": SMALL_MODEL - 1}, torch.float32),
        (torch.bfloat16, {"native": False}, torch.float32),
        (torch.float16, {}, torch.float32),
    ],
)
def test_dtype_is_that_asked_for_or_stored_and_on_a_cpu_one_that_it_computes_in(stored, options, held):
    assert dtype_of(stored, **options) is held
    assert dtype_of(torch.bfloat16, native=None) in (torch.bfloat16, torch.float32)


def test_unknown_dtype_is_refused_with_the_choices():
    with pytest.raises(ModelLoadError, match=r'"int8".*float32, bfloat16, float16'):
        dtype_of(torch.float32, asked="int8")


def test_missing_cuda_device_is_refused_with_its_number():
    with pytest.raises(BackendError, match="cuda:99"):
        choose_device("cuda:99")
    assert choose_device("cpu") == CPU
    assert choose_device("auto").type in ("cpu", "cuda")


def test_array_on_the_cpu_is_not_copied():
    array = np.arange(3)
    to_device(array, CPU)[0] = 7
    assert array[0] == 7


def test_tensor_is_filled_where_it_is_and_keeps_nothing_of_the_array():
    target, array = torch.zeros(4, dtype=torch.int64), np.arange(2)
    place = target.data_ptr()
    fill(target[1:3], array)
    array[:] = 9
    assert (target.tolist(), target.data_ptr()) == ([0, 0, 1, 0], place)


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\n"


def test_memory_is_the_machines_without_limits(tmp_path):
    write(tmp_path, {"proc/meminfo": MEMINFO, "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5"})
    assert host_memory(tmp_path) == (1000 * 1024, 600 * 1024)


def test_tightest_control_group_counts(tmp_path):
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/mine\n4:memory:/older\n",
            "sys/fs/cgroup/mine/memory.max": "400000",
            "sys/fs/cgroup/mine/memory.current": "100000",
            "sys/fs/cgroup/memory/older/memory.limit_in_bytes": "500000",
            "sys/fs/cgroup/memory/older/memory.usage_in_bytes": "250000",
        },
    )
    assert host_memory(tmp_path) == (400_000, 250_000)


def test_memory_of_this_machine_is_read():
    total, free = host_memory()
    assert 0 < free <= total


@pytest.mark.parametrize(
    ("name", "device", "number", "expected"),
    [
        ("auto", "cuda:0", 5, "cuda:5"),
        ("cuda", "cuda:0", 9, "cuda:1"),
        ("cuda:3", "cuda:3", 5, "cuda:3"),
        ("auto", "cpu", 5, "cpu"),
    ],
)
def test_ranks_of_replicas_take_the_devices_in_turn_unless_one_is_named(name, device, number, expected):
    assert numbered_device(name, torch.device(device), number, num_devices=8) == torch.device(expected)
