from __future__ import annotations

import base64

import pytest

from trencadis.errors import ConfigValueError
from trencadis_kv.codecs.key import read_key

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
