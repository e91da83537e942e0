"""Reads a key from a file or the environment. No message contains its digits."""

from __future__ import annotations

import base64
import binascii
import os

from trencadis.errors import ConfigValueError
from trencadis.files import read_text

__all__ = ["read_key"]

_SIZES = (16, 32)
_HOW = "Make one with: openssl rand -hex 32, and name its variable in kv_codec.aes_gcm.key_env or its file in key_file."


def read_key(*, env: str = "", file: str = "") -> bytes:
    """Return the key, 16 or 32 bytes.

    Args:
        env: Name of the environment variable that holds the key.
        file: Path of the file that holds the key. Exactly one of the two must be given.

    Raises:
        ConfigValueError: Neither or both are given, the variable or file is missing or empty, or its content is no key.
    """
    if bool(env) == bool(file):
        both = "both key_env and key_file are" if env else "neither key_env nor key_file is"
        raise ConfigValueError(f"[kv_codec.aes_gcm]: {both} set, one must be.", hint=_HOW)
    if env:
        return _parse(_from_env(env), f"environment variable {env} (from kv_codec.aes_gcm.key_env)")
    return _parse(_from_file(file), f"file {file} (from kv_codec.aes_gcm.key_file)")


def _from_env(name: str) -> str:
    text = os.environ.get(name, "")
    if not text:
        raise ConfigValueError(
            f"kv_codec.aes_gcm.key_env = {name!r}: the environment has no such variable, or it is empty.", hint=_HOW
        )
    return text


def _from_file(name: str) -> str:
    try:
        return read_text(name, encoding="ascii", max_bytes=2**16)
    except OSError as error:
        raise ConfigValueError(
            f"kv_codec.aes_gcm.key_file = {name!r}: it cannot be read: {error.strerror}.", hint=_HOW
        ) from error
    except ValueError:  # not ASCII text, so no key
        return ""


def _parse(text: str, where: str) -> bytes:
    digits = text.strip()
    for decode in (bytes.fromhex, _from_base64):
        try:
            key = decode(digits)
        except (ValueError, binascii.Error):
            continue
        if len(key) in _SIZES:
            return key
    raise ConfigValueError(
        f"The {where} holds no key: 32 or 64 hexadecimal digits are needed, or 16 or 32 bytes in base64; it has "
        f"{len(digits)} characters.",
        hint=_HOW,
    )


def _from_base64(digits: str) -> bytes:
    return base64.b64decode(digits, validate=True)
