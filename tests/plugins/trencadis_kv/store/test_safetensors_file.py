from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from trencadis.errors import ConfigError
from trencadis_kv.exchange.safetensors_file import DTYPES, StoredTensor, read_tensors, write_tensors


def test_library_reads_what_is_written(tmp_path):
    file = tmp_path / "out.safetensors"
    tensors = {
        "a": StoredTensor(dtype="F32", shape=(2, 3)),
        "b": StoredTensor(dtype="U8", shape=(5,)),
        "c": StoredTensor(dtype="I64", shape=(2,)),
        "none": StoredTensor(dtype="F16", shape=(0, 4)),
    }
    with write_tensors(file, tensors, {"format": "x", "text": "ü"}) as data:
        data["a"][:] = np.arange(6, dtype="<f4").view(np.uint8)
        data["b"][:] = range(5)
        data["c"][:] = np.array([-1, 2**40], "<i8").view(np.uint8)
        assert not file.exists()
    found = load_file(file)
    assert found["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["b"].tolist() == [0, 1, 2, 3, 4]
    assert found["c"].tolist() == [-1, 2**40]
    assert found["none"].shape == (0, 4)
    with safe_open(file, framework="np") as opened:
        assert opened.metadata() == {"format": "x", "text": "ü"}
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


def test_what_the_library_writes_is_read(tmp_path):
    file = tmp_path / "in.safetensors"
    arrays = {"x": np.arange(12, dtype=np.float16).reshape(3, 4), "y": np.array([7], np.uint64)}
    save_file(arrays, file, metadata={"k": "v"})
    tensors, metadata = read_tensors(file)
    assert metadata == {"k": "v"}
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == {
        "x": ("F16", (3, 4)),
        "y": ("U64", (1,)),
    }
    assert tensors["x"].data.tobytes() == arrays["x"].tobytes()
    assert tensors["y"].data.tobytes() == arrays["y"].tobytes()


@pytest.mark.parametrize(("name", "of_format"), DTYPES.items())
def test_every_dtype_has_the_size_that_the_library_says(tmp_path, name, of_format):
    import torch
    from safetensors.torch import load_file as load_torch

    file = tmp_path / "t.safetensors"
    tensor = StoredTensor(dtype=of_format, shape=(3,))
    with write_tensors(file, {"t": tensor}, {}):
        pass
    found = load_torch(file)["t"]
    assert found.dtype is getattr(torch, name)
    assert found.nbytes == tensor.num_bytes


def test_file_appears_only_if_nothing_was_raised(tmp_path):
    file = tmp_path / "out.safetensors"

    def fill():
        with write_tensors(file, {"b": StoredTensor(dtype="U8", shape=(5,))}, {}):
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fill()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["missing/out.safetensors", "."])
def test_file_that_cannot_be_written_is_said(tmp_path, place):
    with (
        pytest.raises(ConfigError, match="cannot be written"),
        write_tensors(tmp_path / place, {"b": StoredTensor(dtype="U8", shape=(5,))}, {}),
    ):
        pass


def head(**facts) -> bytes:
    text = json.dumps(facts).encode()
    return len(text).to_bytes(8, "little") + text


TENSOR = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        (10**9).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"{",
        (3).to_bytes(8, "little") + b"[1]",
        head(t={**TENSOR, "data_offsets": [0, 5]}) + b"1234",
        head(t={**TENSOR, "data_offsets": [3, 1]}) + b"1234",
        head(t={**TENSOR, "data_offsets": [-4, -1]}) + b"1234",
        head(t={**TENSOR, "data_offsets": [0]}) + b"1234",
        head(t={**TENSOR, "shape": [-4]}) + b"1234",
        head(t={"dtype": "U8", "shape": [4]}) + b"1234",
        head(t=7) + b"1234",
        head(__metadata__=[1]) + b"1234",
    ],
)
def test_file_of_another_kind_is_said(tmp_path, data):
    file = tmp_path / "in.safetensors"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"in\.safetensors: no safetensors file"):
        read_tensors(file)


def test_missing_file_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"in\.safetensors: cannot be read: No such file"):
        read_tensors(tmp_path / "in.safetensors")
