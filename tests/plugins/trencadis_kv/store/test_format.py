"""An object proves what it is: any broken bit is noticed, and so is the right object under the wrong name."""

from __future__ import annotations

import re

import attrs
import pytest

from support.kv.store_parts import BLOCK_BYTES, hashes_of, make_pool
from trencadis.errors import TransferError
from trencadis.records import KVLayout, KVPart
from trencadis_kv.interfaces import KVCodec
from trencadis_kv.store.defaults import IdentityCodec
from trencadis_kv.store.format import (
    HEADER_BYTES,
    ROTATED,
    for_block,
    for_layer,
    pack_header,
    parse_header,
    seal_header,
    start_header,
    unsealed,
    verify,
)
from trencadis_kv.store.identity import compat_id, is_namespace, key_prefix, object_key
from trencadis_kv.store.objects import BlockObjects

PARTS = tuple(
    KVPart(layer=layer, kind=kind, num_heads=2, head_dim=4, dtype="bfloat16", item_bytes=2)
    for kind in ("key", "value")
    for layer in (3, 4)
)


LAYOUT = KVLayout(parts=PARTS, block_size=4, last_head=2, numerics="torch-cpu")


COMPAT = compat_id(LAYOUT, identity="model")


HASH = bytes(range(32))


PAYLOAD = bytes(i % 251 for i in range(LAYOUT.block_bytes))


def header_of(payload: bytes = PAYLOAD, **options) -> bytes:
    given_ = {"compat": COMPAT, "block_hash": HASH, "codec_flags": 5, "first_token": 8, **options}
    return pack_header(LAYOUT, payload=payload, **given_)


def cause_of(header: bytes, payload: bytes = PAYLOAD, **options) -> str:
    with pytest.raises(TransferError) as caught:
        verify(header, payload, **{"compat": COMPAT, "block_hash": HASH, **options})
    return caught.value.cause


def test_header_is_byte_for_byte_what_it_always_was() -> None:
    header = pack_header(
        LAYOUT, compat=bytes(range(16)), block_hash=HASH, payload=PAYLOAD, codec_flags=5, first_token=8
    )
    assert header.hex(" ", 4) == (
        "4b564231 01008000 05000100 02010000 03000200 08000000 04000000 00010000 "
        "00000000 00010203 04050607 08090a0b 0c0d0e0f 00010203 04050607 08090a0b "
        "0c0d0e0f 10111213 14151617 18191a1b 1c1d1e1f dc33e3b6 1ee13d6d f75b3f03 "
        "8ac06914 00000000 00000000 00000000 00000000 00000000 00000000 00000000"
    )


def test_header_says_what_it_was_given() -> None:
    found = verify(header_of(), PAYLOAD, compat=COMPAT, block_hash=HASH, codec_flags=5)
    assert found._asdict() == {
        "version": 1,
        "flags": 5 | ROTATED,
        "dtype": 2,
        "layout": 1,
        "group": 0,
        "first_layer": 3,
        "num_layers": 2,
        "first_token": 8,
        "num_tokens": 4,
        "payload_bytes": len(PAYLOAD),
        "compat": COMPAT,
        "block_hash": HASH,
        "checksum": header_of()[84:100],
    }


def test_layout_of_several_dtypes_and_plain_keys_is_told_by_the_header() -> None:
    mixed = attrs.evolve(LAYOUT, parts=(attrs.evolve(PARTS[0], dtype="float32"), *PARTS[1:]), rotated=False)
    found = parse_header(pack_header(mixed, compat=COMPAT, block_hash=HASH, payload=PAYLOAD))
    assert (found.dtype, found.flags) == (255, 0)


def test_every_bit_of_the_header_counts() -> None:
    header = header_of()
    for bit in range(8 * HEADER_BYTES):
        broken = bytearray(header)
        broken[bit // 8] ^= 1 << bit % 8
        assert cause_of(bytes(broken)) in {"corrupt", "incompatible"}


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        *(("corrupt", {"header": header_of()[:length]}) for length in (0, 1, HEADER_BYTES - 1)),
        *(("corrupt", {"payload": payload}) for payload in (b"", PAYLOAD[:-1], PAYLOAD + b"\0", PAYLOAD[::-1])),
        ("corrupt", {"block_hash": HASH[::-1]}),
        ("incompatible", {"compat": bytes(16)}),
        ("incompatible", {"header": header_of()[:4] + b"\2\0" + header_of()[6:]}),
        ("incompatible", {"codec_flags": 0}),
    ],
)
@pytest.mark.representatives(11)
def test_what_is_broken_is_corrupt_and_what_is_of_another_kind_incompatible(cause: str, changes) -> None:
    assert cause_of(**{"header": header_of(), **changes}) == cause


def test_codec_sees_the_same_header_at_both_ends_and_pieces_have_the_header_of_the_whole() -> None:
    draft = start_header(LAYOUT, compat=COMPAT, block_hash=HASH, codec_flags=5, first_token=8)
    assert len(draft) == HEADER_BYTES
    assert unsealed(seal_header(draft, b"encoded")) == draft
    assert seal_header(draft, PAYLOAD) == seal_header(draft, [memoryview(PAYLOAD)[:7], PAYLOAD[7:]]) == header_of()


@pytest.mark.parametrize("wrong", [{"compat": bytes(15)}, {"block_hash": bytes(16)}, {"codec_flags": 1 << 16}])
def test_field_of_a_wrong_size_is_refused_when_writing(wrong) -> None:
    with pytest.raises(ValueError, match="are needed"):
        header_of(**wrong)


def test_layer_is_an_object_of_its_own_and_none_is_taken_for_another() -> None:
    draft = for_layer(for_block(start_header(LAYOUT, compat=COMPAT, block_hash=bytes(32)), HASH), 4)
    header = seal_header(draft, PAYLOAD)
    found = verify(header, PAYLOAD, compat=COMPAT, block_hash=HASH, layer=4)
    assert (found.first_layer, found.num_layers) == (4, 1)
    with pytest.raises(TransferError, match="1 layers from 4 in the place of layer 3"):
        verify(header, PAYLOAD, compat=COMPAT, block_hash=HASH, layer=3)
    with pytest.raises(TransferError, match="2 layers from 3 in the place of layer 3"):
        verify(header_of(), PAYLOAD, compat=COMPAT, block_hash=HASH, layer=3)


NAME, OTHER = hashes_of("one", "other")


CONTENT = bytes(range(BLOCK_BYTES))


class Sealing(KVCodec):
    """Turns bytes round, and appends the header that it was given."""

    flags = 131
    max_growth_bytes = 128

    def encode(self, payload, header):
        return bytes(payload)[::-1] + header

    def decode(self, data, header, out):
        if bytes(data[-128:]) != header:
            raise TransferError("another header", cause="corrupt")
        out[:] = bytes(data[:-128])[::-1]


def objects_of(codec=None, *, identity="model", namespace="default", exact_numerics=True, layout=None):
    return BlockObjects(
        layout or make_pool().layout,
        identity=identity,
        namespace=namespace,
        exact_numerics=exact_numerics,
        codec=codec or IdentityCodec(),
    )


def packed(objects, block_hash=NAME):
    return bytearray(b"".join(objects.pack(block_hash, memoryview(CONTENT))))


def unpacked(objects, data, block_hash=NAME):
    out = bytearray(BLOCK_BYTES)
    objects.unpack(block_hash, memoryview(data), memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("codec", [IdentityCodec(), Sealing()])
def test_what_was_packed_is_unpacked_bit_for_bit(codec):
    objects = objects_of(codec)
    data = packed(objects)
    assert unpacked(objects, data) == CONTENT
    assert len(data) <= objects.max_bytes == 128 + BLOCK_BYTES + codec.max_growth_bytes


@pytest.mark.parametrize(
    "other",
    [
        objects_of(identity="another model"),
        objects_of(Sealing()),
        objects_of(layout=attrs.evolve(make_pool().layout, numerics="hpu")),
        objects_of(layout=attrs.evolve(make_pool().layout, rotated=False)),
    ],
    ids=["model", "codec", "numerics", "rotated"],
)
def test_object_of_another_kind_is_incompatible(other):
    with pytest.raises(TransferError) as caught:
        unpacked(objects_of(), packed(other))
    assert caught.value.cause == "incompatible"


def test_any_numerics_shares_between_devices():
    mine = objects_of(exact_numerics=False)
    theirs = objects_of(exact_numerics=False, layout=attrs.evolve(make_pool().layout, numerics="hpu"))
    assert mine.keys([NAME]) == theirs.keys([NAME])
    assert unpacked(mine, packed(theirs)) == CONTENT


PART = KVPart(layer=0, kind="key", num_heads=2, head_dim=4, dtype="float32", item_bytes=4)


TWO_PARTS = KVLayout(
    parts=(PART, attrs.evolve(PART, kind="value")), block_size=16, first_head=0, last_head=2, numerics="torch-cpu"
)


def id_of(layout=TWO_PARTS, identity="LlamaForCausalLM\0float32\0abc", **options):
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
        {"parts": TWO_PARTS.parts[::-1]},
        *(
            {"parts": (attrs.evolve(PART, **{name: value}), TWO_PARTS.parts[1])}
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
    assert id_of(attrs.evolve(TWO_PARTS, **change)) != id_of()


def test_another_model_has_another_id() -> None:
    assert id_of(identity="LlamaForCausalLM\0float32\0abd") != id_of()


def test_numerics_may_be_shared_on_purpose() -> None:
    other = attrs.evolve(TWO_PARTS, numerics="torch-cuda")
    assert id_of(other, exact_numerics=False) == id_of(exact_numerics=False)
    assert id_of(exact_numerics=False) != id_of()


def test_key_names_namespace_format_ranks_heads_and_block() -> None:
    layout = attrs.evolve(TWO_PARTS, first_head=2, last_head=4)
    key = object_key("team-a", compat=bytes(range(16)), layout=layout, block_hash=bytes(range(32)))
    assert key == f"kv1/team-a/{bytes(range(16)).hex()}/0.0.2-4/{bytes(range(32)).hex()}"
    assert key.startswith(key_prefix("team-a", compat=bytes(range(16)), layout=layout))


def test_longest_key_keeps_to_what_stores_are_promised() -> None:
    key = object_key("x" * 64, compat=bytes(16), layout=attrs.evolve(TWO_PARTS, last_head=99_999), block_hash=bytes(32))
    assert len(key) <= 200
    assert re.fullmatch(r"[A-Za-z0-9/._-]+", key)


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "a\n", "é", "x" * 65])
def test_namespace_that_could_leave_its_place_is_refused(name) -> None:
    assert not is_namespace(name)
    with pytest.raises(ValueError, match="namespace"):
        object_key(name, compat=bytes(16), layout=TWO_PARTS, block_hash=bytes(32))
