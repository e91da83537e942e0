from __future__ import annotations

import contextlib
import random
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from support.kv.objects import Blocks, contents, layout_of
from trencadis.errors import ConfigError, TrencadisError
from trencadis_kv.exchange.export_objects import export_objects
from trencadis_kv.exchange.import_objects import import_objects
from trencadis_kv.store.inventory import examine
from trencadis_kv.store.object_directory import ObjectDirectory


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


def test_block_under_another_models_prefix_is_refused(full, tmp_path):
    file = exported(full, tmp_path)
    with safe_open(file, framework="np") as opened:
        metadata = opened.metadata()
    prefix = next(iter(full.payloads)).rsplit("/", 1)[0]
    forged = prefix.replace(full.compat.hex(), "00" * 16)
    tensors = {
        name.replace(prefix, forged): tensor
        for name, tensor in read_numpy(file).items()
        if name.startswith(prefix + "/encoded")
    }
    save_file(tensors, file, metadata={"format": metadata["format"]})
    copy = ObjectDirectory(tmp_path / "copy")
    moved = import_objects(file, copy)
    assert (moved.num_objects, moved.num_broken, contents(copy)) == (0, 2, {})


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


def test_layout_of_another_model_is_refused(full, tmp_path):
    file = exported(full, tmp_path)
    with safe_open(file, framework="np") as opened:
        metadata = opened.metadata()
    forged = metadata | {full.description_key: metadata[full.description_key].replace("Tiny", "Tidy")}
    save_file(read_numpy(file), file, metadata=forged)
    with pytest.raises(ConfigError, match="layout is that of"):
        import_objects(file, ObjectDirectory(tmp_path / "copy"))


def test_other_safetensors_files_are_refused(tmp_path):
    file = tmp_path / "weights.safetensors"
    save_file({"lm_head": np.zeros(3, np.float32)}, file)
    with pytest.raises(ConfigError, match="no file of KV blocks"):
        import_objects(file, ObjectDirectory(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()
