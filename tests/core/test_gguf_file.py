"""The description of a .gguf file: what the writer of the package gguf wrote, and files that are none."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from support.gguf_writing import random_blocks, write_gguf
from trencadis.errors import ModelLoadError
from trencadis.gguf_file import KINDS, GgufFile, read_gguf

gguf = pytest.importorskip("gguf")

METADATA = {
    "general.name": "ünï",
    ".block_count": 3,
    ".rope.freq_base": 0.5,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["a", "", "\u2581b", "ü"],
    "tokenizer.ggml.scores": [0.5, -1.0, 2.0, 0.0],
}
TENSORS = {
    "token_embd.weight": np.arange(6, dtype=np.float32).reshape(3, 2),
    "blk.0.ffn_up.weight": (random_blocks("Q4_0", (2, 64)), "Q4_0"),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "a.gguf", "llama", metadata=METADATA, tensors=TENSORS)


def test_metadata_is_what_was_written(path: Path) -> None:
    file = read_gguf(path)
    assert file.architecture == "llama"
    assert file.metadata["general.name"] == "ünï"
    assert file.metadata["llama.block_count"] == 3
    assert file.metadata["llama.rope.freq_base"] == 0.5
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    assert file.metadata["tokenizer.ggml.scores"].tolist() == [0.5, -1.0, 2.0, 0.0]
    assert file.strings("tokenizer.ggml.tokens") == ["a", "", "\u2581b", "ü"]
    assert file.strings("no.such.key") == []


def test_tensors_are_where_they_were_written(path: Path) -> None:
    file = read_gguf(path)
    floats, blocks = (file.tensors[name] for name in TENSORS)
    assert (floats.shape, floats.kind.name) == ((3, 2), "F32")
    assert (blocks.shape, blocks.kind.name, blocks.num_bytes) == ((2, 64), "Q4_0", 72)
    assert np.frombuffer(file.mapped, "<f4", count=6, offset=floats.offset).tolist() == [0, 1, 2, 3, 4, 5]
    found = np.frombuffer(file.mapped, np.uint8, count=72, offset=blocks.offset)
    assert found.tolist() == random_blocks("Q4_0", (2, 64)).ravel().tolist()


def test_an_alignment_of_its_own_is_kept_to(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("a", np.array([7], np.float32))
    writer.add_tensor("b", np.array([8], np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    file = read_gguf(tmp_path / "b.gguf")
    assert file.tensors["a"].offset % 256 == 0
    assert np.frombuffer(file.mapped, "<f4", count=1, offset=file.tensors["b"].offset)[0] == 8


def test_sizes_of_blocks_are_those_of_the_package() -> None:
    sizes = {int(kind): (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {number: (one.name, one.block, one.num_bytes) for number, one in KINDS.items()}.items() <= sizes.items()


def test_a_file_is_read_once_until_it_changes(path: Path) -> None:
    first = read_gguf(path)
    assert read_gguf(str(path)) is first
    write_gguf(path, "qwen2", metadata={})
    os.utime(path, ns=(1, 1))
    assert read_gguf(path).architecture == "qwen2"


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_a_file_that_is_cut_off_anywhere_is_refused(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    end = max(one.offset + one.num_bytes for one in read_gguf(path).tensors.values())
    for length in (*range(4, end, 5), end - 1):
        cut = tmp_path / f"{length}.gguf"
        assert "it is cut off" in refused(cut, content[:length])


def test_a_file_without_its_last_tensor_says_which_one(path: Path, tmp_path: Path) -> None:
    message = refused(tmp_path / "cut.gguf", path.read_bytes()[:-70])
    assert "1 of 2 tensors lie beyond its end, blk.0.ffn_up.weight for one" in message


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    assert "it is no .gguf file" in refused(tmp_path / "a.gguf", b"PK\3\4 something else")
    assert "it is no .gguf file" in refused(tmp_path / "b.gguf", b"")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (struct.pack("<I", 1), "it is version 1"),
        (struct.pack("<I", 4), "it is version 4"),
        (struct.pack(">I", 3), "it is big-endian"),
    ],
)
def test_a_version_that_is_not_read_is_named(path: Path, tmp_path: Path, version: bytes, words: str) -> None:
    content = path.read_bytes()
    assert words in refused(tmp_path / "b.gguf", content[:4] + version + content[8:])


def test_a_kind_of_tensor_that_is_not_known_is_named(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    at = content.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 2 * 8
    assert content[at : at + 4] == struct.pack("<I", 2)
    changed = content[:at] + struct.pack("<I", 4321) + content[at + 4 :]
    assert "blk.0.ffn_up.weight is of kind 4321, which is not known" in refused(tmp_path / "b.gguf", changed)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "a.gguf", "llama", metadata={}, tensors={"aa": np.ones(1, "f4"), "ab": np.ones(1, "f4")}
    )
    assert "two tensors have the name aa" in refused(path, path.read_bytes().replace(b"ab", b"aa"))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no\.gguf: cannot be read: No such file"):
        read_gguf(tmp_path / "no.gguf")


def test_a_token_that_is_no_text_is_named(path: Path, tmp_path: Path) -> None:
    changed = tmp_path / "b.gguf"
    changed.write_bytes(path.read_bytes().replace("\u2581b".encode(), b"\xff\xfe\xfd\xfc"))
    file: GgufFile = read_gguf(changed)
    with pytest.raises(ModelLoadError, match="element 2 is no UTF-8"):
        file.strings("tokenizer.ggml.tokens")
