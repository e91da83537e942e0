from __future__ import annotations

from trencadis.records import KVPart
from trencadis_kv.exchange.file_layout import Moved, part_name


def test_part_is_named_by_its_layer_and_what_it_holds():
    part = KVPart(layer=3, kind="value", num_heads=1, head_dim=1, dtype="float32", item_bytes=4)
    assert part_name(part) == "layers.3.value"


def test_nothing_was_moved_at_first():
    assert Moved() == Moved(num_objects=0, num_bytes=0, num_broken=0)
