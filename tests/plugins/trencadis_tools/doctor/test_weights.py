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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: shard(path, cut=8), "a.safetensors is cut off"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid x"), "git lfs pull"),
        (lambda path: path.write_bytes(b"\xff" * 64), "a.safetensors is no safetensors file"),
        (lambda path: path.write_bytes(b""), "a.safetensors is no safetensors file"),
        (lambda path: shard(path, header=b"{not json"), "a.safetensors has a broken header"),
        (lambda path: index(path.parent, path.name), "1 files of weights are missing: a.safetensors"),
        (lambda path: None, "no *.safetensors"),
        (
            lambda path: (path.parent / "pytorch_model.bin").write_bytes(b"x"),
            "only pickled weights, which are never read: pytorch_model.bin",
        ),
    ],
    ids=range(8),
)
@pytest.mark.representatives(8)
def test_weights_that_are_damaged_missing_or_pickled_are_named_with_their_fault(found, told, tmp_path, make, message):
    make(tmp_path / "a.safetensors")
    assert check_weights(found, tmp_path, "m") == 0
    ((kind, said),) = told()
    assert kind == "fail"
    assert said.startswith("model m")
    assert message in said
