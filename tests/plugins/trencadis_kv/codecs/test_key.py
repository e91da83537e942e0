from __future__ import annotations

import base64

import pytest

from trencadis.clock import SimulatedClock
from trencadis.errors import ConfigValueError
from trencadis.interfaces import ComponentContext
from trencadis_kv.codecs import trencadis_kv_codecs
from trencadis_kv.codecs.config import AesGcmConfig
from trencadis_kv.codecs.key import read_key
from trencadis_kv.interfaces import KVCodec

KEY = bytes(range(200, 232))


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize(
    "write", [bytes.hex, lambda key: key.hex().upper(), lambda key: base64.b64encode(key).decode()]
)
def test_a_key_is_read_from_a_variable_and_from_a_file(monkeypatch, tmp_path, size, write):
    key = KEY[:size]
    monkeypatch.setenv("KV_TEST_KEY", write(key))
    assert read_key(env="KV_TEST_KEY") == key
    file = tmp_path / "key"
    file.write_text(write(key) + "\n")
    assert read_key(file=str(file)) == key


@pytest.mark.parametrize("text", ["abcd", KEY.hex() + "00", "not a key at all", KEY[:24].hex(), "  "])
def test_what_is_no_key_is_refused_without_showing_it(monkeypatch, tmp_path, text):
    file = tmp_path / "key"
    file.write_text(text)
    monkeypatch.setenv("KV_TEST_KEY", text)
    for where in ({"env": "KV_TEST_KEY"}, {"file": str(file)}):
        with pytest.raises(ConfigValueError, match="holds no key") as error:
            read_key(**where)
        assert not text.strip() or text.strip() not in str(error.value)
        assert "openssl rand -hex 32" in str(error.value)


def test_a_file_of_binary_bytes_is_refused(tmp_path):
    file = tmp_path / "key"
    file.write_bytes(KEY)
    with pytest.raises(ConfigValueError, match="holds no key"):
        read_key(file=str(file))


def test_a_key_that_is_nowhere_is_an_error_that_says_where_it_was_looked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("KV_TEST_KEY", raising=False)
    with pytest.raises(ConfigValueError, match=r"key_env = 'KV_TEST_KEY'.*no such variable"):
        read_key(env="KV_TEST_KEY")
    with pytest.raises(ConfigValueError, match=r"key_file = .*missing.*No such file"):
        read_key(file=str(tmp_path / "missing"))


@pytest.mark.parametrize(("where", "said"), [({}, "neither"), ({"env": "A", "file": "b"}, "both")])
def test_a_key_comes_from_one_place(where, said):
    with pytest.raises(ConfigValueError, match=said):
        read_key(**where)


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
