from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from support.kv.objects import Blocks, contents, layout_of
from trencadis.errors import ConfigError, TrencadisError
from trencadis_kv.exchange.export_objects import export_objects
from trencadis_kv.exchange.file_layout import FORMAT
from trencadis_kv.exchange.import_objects import import_objects
from trencadis_kv.exchange.safetensors_file import DTYPES, StoredTensor, read_tensors, write_tensors
from trencadis_kv.store.description import Description
from trencadis_kv.store.format import parse_header
from trencadis_kv.store.inventory import examine
from trencadis_kv.store.object_directory import ObjectDirectory


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


@pytest.fixture
def full(tmp_path: Path) -> Blocks:
    """Plain, encoded and undescribed blocks of several ranks and dtypes."""
    root = tmp_path / "store"
    blocks = Blocks(root)
    for number in range(6):
        blocks.add(number)
    blocks.add(20, payload=b"a codec did it", codec_flags=1)
    blocks.add(21, payload=b"", codec_flags=1)
    Blocks(root, layout=layout_of("bfloat16", 2, first_head=2), namespace="team").add(1)
    Blocks(root, layout=layout_of("int6", 3), namespace="odd").add(1)
    Blocks(root, model="nobody knows", described=False).add(1)
    return blocks


def exported(blocks: Blocks, tmp_path: Path) -> Path:
    file = tmp_path / "out.safetensors"
    export_objects(blocks.directory, file)
    return file


def test_everything_comes_back_bit_for_bit(full, tmp_path):
    copy = ObjectDirectory(tmp_path / "copy")
    done = []
    moved = import_objects(exported(full, tmp_path), copy, progress=done.append)
    assert contents(copy) == contents(full.directory)
    assert (moved.num_objects, moved.num_broken, done) == (11, 0, list(range(1, 12)))
    assert [finding for finding in examine(copy) if finding.cause] == []


def test_blocks_can_be_put_into_another_namespace(full, tmp_path):
    copy = ObjectDirectory(tmp_path / "copy")
    import_objects(exported(full, tmp_path), copy, namespace="guest")
    before = contents(full.directory)
    assert contents(copy) == {"/".join(["kv1", "guest", *key.split("/")[2:]]): data for key, data in before.items()}


def test_rows_of_zeros_are_left_out(full, tmp_path):
    broken = next(iter(full.payloads))
    full.damage(broken)
    copy = ObjectDirectory(tmp_path / "copy")
    moved = import_objects(exported(full, tmp_path), copy)
    assert (moved.num_objects, moved.num_broken) == (10, 0)
    assert set(contents(full.directory)) - set(contents(copy)) == {broken}


@pytest.mark.slow
def test_nothing_that_is_broken_is_imported_whatever_bit_was_flipped(full, tmp_path):
    file, noise = exported(full, tmp_path), random.Random(3)
    whole, before = file.read_bytes(), contents(full.directory)
    for number in range(60):
        data = bytearray(whole)
        data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
        file.write_bytes(data)
        copy = ObjectDirectory(tmp_path / f"copy {number}")
        with contextlib.suppress(TrencadisError):
            import_objects(file, copy)
        found = contents(copy) if copy.root.is_dir() else {}
        assert all(not finding.cause for finding in (examine(copy) if found else ()))
        for key, value in found.items():
            same_block = [data for name, data in before.items() if name.split("/")[2:] == key.split("/")[2:]]
            assert value in same_block


def read_numpy(file: Path) -> dict[str, np.ndarray]:
    with safe_open(file, framework="np") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys() if "team" not in name}  # noqa: SIM118


@pytest.mark.parametrize(
    "prefix", ["kv1/../" + "00" * 16 + "/s/", "/etc/", "kv1/a/" + "00" * 16 + "/../", "kv1/a/b/c/"]
)
def test_file_cannot_lead_out_of_the_directory(tmp_path, prefix):
    blocks = Blocks(tmp_path / "store", described=False)
    key = blocks.add(1)
    file = exported(blocks, tmp_path)
    real = key.rsplit("/", 1)[0] + "/"
    tensors = {name.replace(real, prefix): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "trencadis-kv-1"})
    copy = ObjectDirectory(tmp_path / "deep" / "copy")
    assert import_objects(file, copy).num_objects == 0
    assert [path for path in (tmp_path / "deep").rglob("*") if path.is_file()] == []


def test_tensors_that_do_not_fit_each_other_are_said(full, tmp_path):
    file = exported(full, tmp_path)
    whole = read_numpy(file)
    with safe_open(file, framework="np") as opened:
        metadata = {name: text for name, text in opened.metadata().items() if "team" not in name}
    prefix = next(iter(full.payloads)).rsplit("/", 1)[0] + "/"
    starts = whole[prefix + "encoded.starts"]
    changes = [
        {prefix + "layers.0.key": whole[prefix + "layers.0.key"][:-1]},
        {prefix + "headers": whole[prefix + "headers"][:-1]},
        {prefix + "headers": whole[prefix + "headers"][:, :-1].copy()},
        {prefix + "encoded.starts": starts[:-1]},
        {prefix + "encoded.starts": starts[::-1].copy()},
        {prefix + "encoded.starts": starts + 9},
        {prefix + "encoded.starts": starts - 1},
        {prefix + "encoded.payloads": np.zeros(3, np.uint8)},
    ]
    for change in changes:
        save_file(whole | change, file, metadata=metadata)
        with pytest.raises(ConfigError, match="is broken"):
            import_objects(file, ObjectDirectory(tmp_path / "copy"))
    lost = {name: tensor for name, tensor in whole.items() if name != prefix + "layers.1.value"}
    save_file(lost, file, metadata=metadata)
    with pytest.raises(ConfigError, match=r"layers\.1\.value"):
        import_objects(file, ObjectDirectory(tmp_path / "copy"))


def test_other_safetensors_files_are_refused(tmp_path):
    file = tmp_path / "weights.safetensors"
    save_file({"lm_head": np.zeros(3, np.float32)}, file)
    with pytest.raises(ConfigError, match="no file of KV blocks"):
        import_objects(file, ObjectDirectory(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()


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
