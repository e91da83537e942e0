"""An object proves what it is: any broken bit is noticed, and so is the right object under the wrong name."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from trencadis.errors import TransferError
from trencadis.records import KVLayout, KVPart
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
from trencadis_kv.store.identity import compat_id

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


@settings(max_examples=300, phases=[Phase.explicit, Phase.generate])
@given(st.integers(0, 8 * (HEADER_BYTES + len(PAYLOAD)) - 1))
def test_any_single_flipped_bit_is_noticed(bit: int) -> None:
    data = bytearray(header_of() + PAYLOAD)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TransferError):
        verify(bytes(data[:HEADER_BYTES]), data[HEADER_BYTES:], compat=COMPAT, block_hash=HASH)


def test_every_bit_of_the_header_counts() -> None:
    header = header_of()
    for bit in range(8 * HEADER_BYTES):
        broken = bytearray(header)
        broken[bit // 8] ^= 1 << bit % 8
        assert cause_of(bytes(broken)) in {"corrupt", "incompatible"}


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1])
def test_truncated_header_is_corrupt(length: int) -> None:
    assert cause_of(header_of()[:length]) == "corrupt"


@pytest.mark.parametrize("payload", [b"", PAYLOAD[:-1], PAYLOAD + b"\0"])
def test_payload_of_another_length_is_corrupt(payload: bytes) -> None:
    assert cause_of(header_of(), payload) == "corrupt"


def test_right_bytes_under_another_blocks_key_are_corrupt() -> None:
    assert cause_of(header_of(), block_hash=HASH[::-1]) == "corrupt"


def test_other_models_version_and_codecs_are_incompatible() -> None:
    assert cause_of(header_of(), compat=bytes(16)) == "incompatible"
    assert cause_of(header_of()[:4] + b"\2\0" + header_of()[6:]) == "incompatible"
    assert cause_of(header_of(), codec_flags=0) == "incompatible"


def test_payload_that_was_changed_for_another_of_its_length_is_corrupt() -> None:
    assert cause_of(header_of(), PAYLOAD[::-1]) == "corrupt"


def test_codec_sees_the_same_header_at_both_ends() -> None:
    draft = start_header(LAYOUT, compat=COMPAT, block_hash=HASH, codec_flags=5, first_token=8)
    assert len(draft) == HEADER_BYTES
    assert unsealed(seal_header(draft, b"encoded")) == draft
    assert seal_header(draft, PAYLOAD) == header_of()


def test_payload_in_pieces_has_the_header_of_the_whole() -> None:
    draft = start_header(LAYOUT, compat=COMPAT, block_hash=HASH)
    whole = seal_header(draft, PAYLOAD)
    assert seal_header(draft, [memoryview(PAYLOAD)[:7], PAYLOAD[7:]]) == whole


@pytest.mark.parametrize("wrong", [{"compat": bytes(15)}, {"block_hash": bytes(16)}, {"codec_flags": 1 << 16}])
def test_field_of_a_wrong_size_is_refused_when_writing(wrong) -> None:
    with pytest.raises(ValueError, match="are needed"):
        header_of(**wrong)


def test_header_for_another_block_is_as_if_it_had_been_started_for_it() -> None:
    draft = start_header(LAYOUT, compat=COMPAT, block_hash=bytes(32))
    assert for_block(draft, HASH) == start_header(LAYOUT, compat=COMPAT, block_hash=HASH)


def test_layer_is_an_object_of_its_own_and_none_is_taken_for_another() -> None:
    draft = for_layer(for_block(start_header(LAYOUT, compat=COMPAT, block_hash=bytes(32)), HASH), 4)
    header = seal_header(draft, PAYLOAD)
    found = verify(header, PAYLOAD, compat=COMPAT, block_hash=HASH, layer=4)
    assert (found.first_layer, found.num_layers) == (4, 1)
    with pytest.raises(TransferError, match="1 layers from 4 in the place of layer 3"):
        verify(header, PAYLOAD, compat=COMPAT, block_hash=HASH, layer=3)
    with pytest.raises(TransferError, match="2 layers from 3 in the place of layer 3"):
        verify(header_of(), PAYLOAD, compat=COMPAT, block_hash=HASH, layer=3)
