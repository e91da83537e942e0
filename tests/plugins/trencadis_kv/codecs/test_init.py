from __future__ import annotations

import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext
from trencadis_kv.codecs import trencadis_kv_codecs
from trencadis_kv.codecs.config import AesGcmConfig
from trencadis_kv.interfaces import KVCodec

COMPONENTS = {component.name: component for component in trencadis_kv_codecs()}
CONTEXT = ComponentContext(clock=SimulatedClock(), seed=0, make=lambda noun, name: make(name))


def make(name, **options):
    component = COMPONENTS[name]
    return component.factory(component.config(**options), CONTEXT)


def test_there_are_three_codecs():
    assert set(COMPONENTS) == {"none", "zstd", "aes_gcm"}
    assert all(component.summary for component in COMPONENTS.values())


def test_flags_say_what_a_reader_must_undo(monkeypatch):
    monkeypatch.setenv("KV_TEST_KEY", "07" * 16)
    codecs = [make("none"), make("zstd"), *(make("aes_gcm", key_env="KV_TEST_KEY", inner=i) for i in ("none", "zstd"))]
    assert all(isinstance(codec, KVCodec) for codec in codecs)
    assert [codec.flags for codec in codecs] == [0, 1, 256, 257]


def test_encryption_without_a_key_is_an_error_with_a_remedy():
    with pytest.raises(ConfigValueError, match=r"neither key_env nor key_file.*openssl rand -hex 32"):
        COMPONENTS["aes_gcm"].factory(AesGcmConfig(), CONTEXT)
