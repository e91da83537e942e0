from __future__ import annotations

import os

import attrs
import pytest

from support.kv.objects import Blocks, layout_of
from trencadis.errors import TransferError
from trencadis.records import KVLayout, KVPart
from trencadis_kv.store.description import Description
from trencadis_kv.store.inventory import BlockKey, examine, take_stock


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


LAYOUT = KVLayout(
    parts=tuple(
        KVPart(layer=layer, kind=kind, num_heads=2, head_dim=4, dtype="bfloat16", item_bytes=2)
        for kind in ("key", "value")
        for layer in range(2)
    ),
    block_size=16,
    first_head=2,
    last_head=4,
    numerics="test",
)


DESCRIPTION = Description(layout=LAYOUT, identity="LlamaForCausalLM\0bfloat16\0abcdef0123456789", exact_numerics=True)


def test_description_comes_back_from_its_json():
    data = DESCRIPTION.to_json()
    assert Description.from_json(data, compat=DESCRIPTION.compat) == DESCRIPTION
    assert Description.from_json(data.decode(), compat=DESCRIPTION.compat).to_json() == data


def test_model_is_named_in_a_few_words():
    assert DESCRIPTION.model == "LlamaForCausalLM bfloat16 abcdef012345"
    assert attrs.evolve(DESCRIPTION, identity="").model == ""
    assert attrs.evolve(DESCRIPTION, identity="Fake\0float32\0").model == "Fake float32"


@pytest.mark.parametrize(
    "change",
    [
        {"identity": "another"},
        {"exact_numerics": False},
        {"layout": attrs.evolve(LAYOUT, block_size=32)},
        {"layout": attrs.evolve(LAYOUT, rotated=False)},
        {"layout": attrs.evolve(LAYOUT, parts=LAYOUT.parts[::-1])},
    ],
)
def test_description_of_another_id_is_refused(change):
    other = attrs.evolve(DESCRIPTION, **change)
    with pytest.raises(TransferError, match="layout is that of") as caught:
        Description.from_json(other.to_json(), compat=DESCRIPTION.compat)
    assert caught.value.cause == "corrupt"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        DESCRIPTION.to_json()[:-1],
        DESCRIPTION.to_json().replace(b'"block_size":16', b'"block_size":-16'),
        DESCRIPTION.to_json().replace(b'"block_size":16', b'"block_size":"16"'),
        DESCRIPTION.to_json().replace(b'"item_bytes":2', b'"item_bytes":99999999999'),
        DESCRIPTION.to_json().replace(b'"rotated"', b'"turned"'),
    ],
)
def test_what_is_no_description_is_refused(data):
    with pytest.raises(TransferError, match="layout is broken") as caught:
        Description.from_json(data, compat=DESCRIPTION.compat)
    assert caught.value.cause == "corrupt"
