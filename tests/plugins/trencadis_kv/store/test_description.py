from __future__ import annotations

import attrs
import pytest

from trencadis.errors import TransferError
from trencadis.records import KVLayout, KVPart
from trencadis_kv.store.description import Description, description_key
from trencadis_kv.store.identity import compat_id

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


def test_id_is_that_of_the_blocks():
    assert DESCRIPTION.compat == compat_id(LAYOUT, identity=DESCRIPTION.identity, exact_numerics=True)
    assert description_key("team", DESCRIPTION.compat) == f"kv1/team/{DESCRIPTION.compat.hex()}/layout"


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
