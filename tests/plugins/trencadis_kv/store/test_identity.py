"""Two blocks share an id only if their bytes mean the same; keys are safe as file names and as words of a protocol."""

from __future__ import annotations

import re

import attrs
import pytest

from trencadis.records import KVLayout, KVPart
from trencadis_kv.store.identity import compat_id, is_namespace, key_prefix, object_key

PART = KVPart(layer=0, kind="key", num_heads=2, head_dim=4, dtype="float32", item_bytes=4)
LAYOUT = KVLayout(
    parts=(PART, attrs.evolve(PART, kind="value")), block_size=16, first_head=0, last_head=2, numerics="torch-cpu"
)


def id_of(layout=LAYOUT, identity="LlamaForCausalLM\0float32\0abc", **options):
    return compat_id(layout, identity=identity, **options)


def test_ids_are_what_they_always_were() -> None:
    assert id_of().hex() == "42d72adabd1161d4c518266ac85895bc"
    assert id_of(exact_numerics=False).hex() == "812b21fb4ec1948be7c8d4f92e98f172"


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 32},
        {"first_head": 2, "last_head": 4},
        {"rotated": False},
        {"numerics": "torch-cuda"},
        {"parts": LAYOUT.parts[::-1]},
        *(
            {"parts": (attrs.evolve(PART, **{name: value}), LAYOUT.parts[1])}
            for name, value in [
                ("layer", 1),
                ("kind", "latent"),
                ("num_heads", 1),
                ("head_dim", 8),
                ("dtype", "bfloat16"),
                ("item_bytes", 2),
            ]
        ),
    ],
)
def test_whatever_changes_the_bytes_changes_the_id(change) -> None:
    assert id_of(attrs.evolve(LAYOUT, **change)) != id_of()


def test_another_model_has_another_id() -> None:
    assert id_of(identity="LlamaForCausalLM\0float32\0abd") != id_of()


def test_numerics_may_be_shared_on_purpose() -> None:
    other = attrs.evolve(LAYOUT, numerics="torch-cuda")
    assert id_of(other, exact_numerics=False) == id_of(exact_numerics=False)
    assert id_of(exact_numerics=False) != id_of()


def test_key_names_namespace_format_ranks_heads_and_block() -> None:
    layout = attrs.evolve(LAYOUT, first_head=2, last_head=4)
    key = object_key("team-a", compat=bytes(range(16)), layout=layout, block_hash=bytes(range(32)))
    assert key == f"kv1/team-a/{bytes(range(16)).hex()}/0.0.2-4/{bytes(range(32)).hex()}"
    assert key.startswith(key_prefix("team-a", compat=bytes(range(16)), layout=layout))


def test_longest_key_keeps_to_what_stores_are_promised() -> None:
    key = object_key("x" * 64, compat=bytes(16), layout=attrs.evolve(LAYOUT, last_head=99_999), block_hash=bytes(32))
    assert len(key) <= 200
    assert re.fullmatch(r"[A-Za-z0-9/._-]+", key)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "a\n", "é", "x" * 65])
def test_namespace_that_could_leave_its_place_is_refused(name) -> None:
    assert not is_namespace(name)
    with pytest.raises(ValueError, match="namespace"):
        object_key(name, compat=bytes(16), layout=LAYOUT, block_hash=bytes(32))
