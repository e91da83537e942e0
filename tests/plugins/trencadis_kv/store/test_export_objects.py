from __future__ import annotations

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from support.kv.objects import Blocks, layout_of
from trencadis.errors import ConfigError
from trencadis_kv.exchange.export_objects import export_objects
from trencadis_kv.exchange.file_layout import FORMAT
from trencadis_kv.store.description import Description
from trencadis_kv.store.format import parse_header


def test_parts_of_the_layout_become_tensors_with_a_row_for_each_block(tmp_path):
    blocks, file = Blocks(tmp_path / "store"), tmp_path / "out.safetensors"
    keys = sorted(blocks.add(number) for number in range(5))
    moved = export_objects(blocks.directory, file)
    assert (moved.num_objects, moved.num_bytes, moved.num_broken) == (5, 5 * (128 + 384), 0)
    tensors = load_file(file)
    prefix = keys[0].rsplit("/", 1)[0] + "/"
    names = ["headers", *(f"layers.{layer}.{kind}" for layer in range(2) for kind in ("key", "value"))]
    assert sorted(tensors) == sorted(prefix + name for name in names)
    for row, key in enumerate(keys):
        block = np.frombuffer(blocks.payloads[key], "<f4").reshape(4, 3, 2, 4)
        order = ["layers.0.key", "layers.1.key", "layers.0.value", "layers.1.value"]
        for part, name in zip(block, order, strict=True):
            assert tensors[prefix + name].dtype == np.float32
            np.testing.assert_array_equal(tensors[prefix + name][row], part)
        assert parse_header(tensors[prefix + "headers"][row].tobytes()).block_hash.hex() == key.rsplit("/", 1)[1]
    with safe_open(file, framework="np") as opened:
        metadata = opened.metadata()
    assert metadata["format"] == FORMAT
    found = Description.from_json(metadata[blocks.description_key], compat=blocks.compat)
    assert found.layout == blocks.layout


def test_bfloat16_is_read_by_torch(tmp_path):
    import torch
    from safetensors.torch import load_file as load_torch

    blocks, file = Blocks(tmp_path / "store", layout=layout_of("bfloat16", 2)), tmp_path / "out.safetensors"
    key = blocks.add(1)
    export_objects(blocks.directory, file)
    (name,) = (name for name in load_torch(file) if name.endswith("layers.0.key"))
    found = load_torch(file)[name]
    assert (found.dtype, tuple(found.shape)) == (torch.bfloat16, (1, 3, 2, 4))
    assert found.view(torch.uint8).numpy().tobytes() == blocks.payloads[key][:48]


def test_dtype_that_the_format_does_not_know_goes_as_bytes(tmp_path):
    blocks, file = Blocks(tmp_path / "store", layout=layout_of("int6", 3)), tmp_path / "out.safetensors"
    blocks.add(1)
    export_objects(blocks.directory, file)
    shapes = {tensor.shape for name, tensor in load_file(file).items() if "layers" in name}
    assert shapes == {(1, 3, 2, 12)}


def test_blocks_that_nobody_described_or_a_codec_changed_are_whole_payloads(tmp_path):
    blocks, file = Blocks(tmp_path / "store"), tmp_path / "out.safetensors"
    plain = blocks.add(1)
    short, long = (blocks.add(number, payload=bytes(number), codec_flags=2) for number in (7, 500))
    bare = Blocks(tmp_path / "store", model="nobody knows", described=False)
    other = bare.add(9)
    export_objects(blocks.directory, file)
    tensors = load_file(file)
    prefix = plain.rsplit("/", 1)[0] + "/"
    assert tensors[prefix + "headers"].shape == (1, 128)
    starts, payloads = tensors[prefix + "encoded.starts"], tensors[prefix + "encoded.payloads"]
    found = [payloads[starts[row] : starts[row + 1]].tobytes() for row in range(2)]
    assert found == [blocks.payloads[key] for key in sorted([short, long])]
    prefix = other.rsplit("/", 1)[0] + "/"
    assert prefix + "headers" not in tensors
    assert tensors[prefix + "encoded.payloads"].tobytes() == bare.payloads[other]


def test_broken_and_vanished_blocks_are_rows_of_zeros(tmp_path, monkeypatch):
    blocks, file = Blocks(tmp_path / "store"), tmp_path / "out.safetensors"
    keys = sorted(blocks.add(number) for number in range(4))
    blocks.damage(keys[1])
    real = blocks.directory.read
    monkeypatch.setattr(blocks.directory, "read", lambda key: None if key == keys[2] else real(key))
    done = []
    moved = export_objects(blocks.directory, file, progress=done.append)
    assert (moved.num_objects, moved.num_broken, done) == (2, 1, [1, 2, 3, 4])
    (headers,) = (tensor for name, tensor in load_file(file).items() if name.endswith("headers"))
    assert [bool(row.any()) for row in headers] == [True, False, False, True]


def test_object_that_was_replaced_by_one_of_another_size_is_left_out(tmp_path, monkeypatch):
    blocks, file = Blocks(tmp_path / "store"), tmp_path / "out.safetensors"
    key, coded = blocks.add(1), blocks.add(2, payload=b"short", codec_flags=1)
    other = Blocks(tmp_path / "other")
    other.add(1, payload=b"now a codec did it", codec_flags=1)
    other.add(2, payload=b"shorter?", codec_flags=1)
    monkeypatch.setattr(blocks.directory, "read", other.directory.read)
    export_objects(blocks.directory, file)
    assert all(not tensor.any() for name, tensor in load_file(file).items() if name.endswith("headers"))
    assert {key, coded} == set(other.payloads)


def test_one_namespace_can_be_exported(tmp_path):
    blocks, team = Blocks(tmp_path / "store"), Blocks(tmp_path / "store", namespace="team")
    blocks.add(1)
    team.add(1)
    team.add(2)
    file = tmp_path / "out.safetensors"
    assert export_objects(blocks.directory, file, namespace="team").num_objects == 2
    assert all(name.startswith("kv1/team/") for name in load_file(file))
    assert export_objects(blocks.directory, file).num_objects == 3


def test_nothing_to_export_is_said(tmp_path):
    blocks = Blocks(tmp_path / "store")
    with pytest.raises(ConfigError, match="there are no KV blocks"):
        export_objects(blocks.directory, tmp_path / "out.safetensors")
    blocks.add(1)
    with pytest.raises(ConfigError, match="in namespace team"):
        export_objects(blocks.directory, tmp_path / "out.safetensors", namespace="team")
    assert not (tmp_path / "out.safetensors").exists()
