from __future__ import annotations

from trencadis_kv.codecs.plain import Plain
from trencadis_kv.testing import KVCodecConformance


class TestPlain(KVCodecConformance):
    make = Plain


def test_nothing_is_copied_before_it_is_stored():
    payload = memoryview(bytes(100))
    assert Plain().encode(payload, bytes(128)) is payload
