from __future__ import annotations

import os

import pytest

from support.kv.objects import Blocks, layout_of
from trencadis.errors import TransferError
from trencadis_kv.store.inventory import BlockKey, check_object, examine, take_stock


def test_stock_has_a_shelf_for_each_namespace_model_and_rank(tmp_path):
    first = Blocks(tmp_path)
    team = Blocks(tmp_path, namespace="team", model="Other\0float16\0", described=False)
    rank = Blocks(tmp_path, layout=layout_of(first_head=2))
    for number in range(3):
        first.add(number)
    team.add(1)
    rank.add(1)
    (tmp_path / "notes.txt").write_text("no object")
    found = {
        (s.namespace, s.compat, s.shard): (s.model, s.num_objects, s.num_bytes) for s in take_stock(first.directory)
    }
    block_bytes = 128 + first.layout.block_bytes
    assert found == {
        ("default", first.compat.hex(), "0.0.0-2"): ("Tiny float32 fedcba987654", 3, 3 * block_bytes),
        ("default", rank.compat.hex(), "0.0.2-4"): ("Tiny float32 fedcba987654", 1, block_bytes),
        ("team", team.compat.hex(), "0.0.0-2"): ("", 1, block_bytes),
    }


def test_shelf_was_used_when_its_latest_block_was(tmp_path):
    blocks = Blocks(tmp_path)
    for number, used_s in enumerate((1000, 3000, 2000)):
        name = blocks.add(number).rsplit("/", 1)[1]
        (file,) = tmp_path.rglob(name)
        os.utime(file, (used_s, used_s))
    (summary,) = take_stock(blocks.directory)
    assert summary.used_ns == 3000 * 10**9


def test_stock_of_an_empty_directory_is_empty(tmp_path):
    assert take_stock(Blocks(tmp_path, described=False).directory) == []


def test_broken_description_is_no_model(tmp_path):
    blocks = Blocks(tmp_path)
    blocks.add(1)
    blocks.damage(blocks.description_key, 5)
    (summary,) = take_stock(blocks.directory)
    assert summary.model == ""


def test_every_object_is_examined(tmp_path):
    blocks = Blocks(tmp_path)
    whole, flipped, swapped, other, foreign = (blocks.add(number) for number in range(5))
    blocks.damage(flipped)
    blocks.directory.write(swapped, [memoryview(blocks.directory.read(other))])
    blocks.damage(foreign, 4)
    blocks.directory.write("some/thing", [memoryview(b"else")])
    causes = {finding.key: str(finding.cause) for finding in examine(blocks.directory)}
    assert causes == {
        whole: "",
        flipped: "corrupt",
        swapped: "corrupt",
        other: "",
        foreign: "incompatible",
        blocks.description_key: "",
        "some/thing": "corrupt",
    }


def test_block_of_another_model_under_this_ones_key_is_found(tmp_path):
    mine, other = Blocks(tmp_path), Blocks(tmp_path, model="fine-tuned")
    key, theirs = mine.add(1), other.add(1)
    with pytest.raises(TransferError) as caught:
        check_object(key, other.directory.read(theirs))
    assert caught.value.cause == "incompatible"


def test_object_that_vanishes_meanwhile_is_not_broken(tmp_path, monkeypatch):
    blocks = Blocks(tmp_path, described=False)
    blocks.add(1)
    monkeypatch.setattr(blocks.directory, "read", lambda key: None)
    (finding,) = examine(blocks.directory)
    assert (finding.cause, finding.num_bytes) == ("evicted", 0)


def test_key_is_taken_apart_and_put_together():
    key = f"kv1/team/{'ab' * 16}/0.0.0-8/{'cd' * 32}"
    found = BlockKey.parse(key)
    assert (found.namespace, found.compat.hex(), found.shard, found.block_hash.hex()) == (
        "team",
        "ab" * 16,
        "0.0.0-8",
        "cd" * 32,
    )
    assert found.prefix + found.block_hash.hex() == key


@pytest.mark.parametrize("key", ["", "kv1/a/b/c/d", f"kv2/a/{'ab' * 16}/s/{'cd' * 32}", f"kv1/a/{'ab' * 16}/layout"])
def test_other_keys_are_no_blocks(key):
    assert BlockKey.parse(key) is None
