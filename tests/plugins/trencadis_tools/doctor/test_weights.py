from __future__ import annotations

import json

import pytest

from trencadis_tools.doctor.weights import check_weights


def shard(path, num_bytes=64, *, cut=0, header=None):
    told = {"w": {"dtype": "F32", "shape": [num_bytes // 4], "data_offsets": [0, num_bytes]}, "__metadata__": {}}
    text = json.dumps(told).encode() if header is None else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(num_bytes - cut))


def index(place, *names):
    (place / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {f"w{i}": n for i, n in enumerate(names)}})
    )


def test_good_weights_are_summed_up(found, told, tmp_path):
    shard(tmp_path / "a.safetensors")
    shard(tmp_path / "b.safetensors", 128)
    index(tmp_path, "a.safetensors", "b.safetensors")
    assert check_weights(found, tmp_path, "m") == sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert told() == []


def test_missing_shard_is_wrong(found, told, tmp_path):
    shard(tmp_path / "a.safetensors")
    index(tmp_path, "a.safetensors", "b.safetensors")
    assert check_weights(found, tmp_path, "m") == 0
    assert told() == [("fail", "model m: 1 files of weights are missing: b.safetensors")]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: shard(path, cut=8), "is cut off"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid x"), "git lfs pull"),
        (lambda path: path.write_bytes(b"\xff" * 64), "is no safetensors file"),
        (lambda path: path.write_bytes(b""), "is no safetensors file"),
        (lambda path: shard(path, header=b"{not json"), "has a broken header"),
    ],
)
def test_damaged_file_is_named_with_its_fault(found, told, tmp_path, make, words):
    make(tmp_path / "a.safetensors")
    assert check_weights(found, tmp_path, "m") == 0
    ((kind, message),) = told()
    assert kind == "fail"
    assert message.startswith("model m: a.safetensors ")
    assert words in message


def test_directory_without_weights_is_wrong(found, told, tmp_path):
    assert check_weights(found, tmp_path, "m") == 0
    assert [kind for kind, _ in told()] == ["fail"]
    assert "no *.safetensors" in told()[0][1]


def test_pickled_weights_are_refused_with_the_reason(found, told, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert check_weights(found, tmp_path, "m") == 0
    assert "only pickled weights, which are never read: pytorch_model.bin" in told()[0][1]
