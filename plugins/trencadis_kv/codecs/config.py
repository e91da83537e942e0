"""Config tables of the built-in KV codecs."""

from __future__ import annotations

import attrs
from attrs.validators import and_, ge, in_, le

from trencadis.interfaces import setting

__all__ = ["AesGcmConfig", "ZstdConfig"]


@attrs.frozen(kw_only=True)
class ZstdConfig:
    """Table ``[kv_codec.zstd]``.

    Attributes:
        level: Compression level of Zstandard; higher levels hardly make floats smaller.
        item_bytes: Bytes of one element; bytes of equal significance are grouped before compression. 0: from the
            model's dtype.
    """

    level: int = setting(1, "Of Zstandard: higher is smaller and slower.", unit="level", validator=and_(ge(-7), le(22)))
    item_bytes: int = setting(
        0,
        "Of one element of the KV cache, 1, 2, 4 or 8; 0: of the model's dtype.",
        unit="bytes",
        validator=in_([0, 1, 2, 4, 8]),
    )


@attrs.frozen(kw_only=True)
class AesGcmConfig:
    """Table ``[kv_codec.aes_gcm]``. The key itself is never in the configuration, so that no dump or log can show it.

    Attributes:
        key_env: Name of the environment variable that holds the key.
        key_file: File that holds the key. One of the two must be set.
        inner: Codec applied before encryption, because encrypted data cannot be compressed.
    """

    key_env: str = setting(
        "", "Environment variable that holds the key: 32 or 64 hexadecimal digits, or the same bytes in base64."
    )
    key_file: str = setting("", "File that holds the key, in the place of a variable.")
    inner: str = setting(
        "none", "Codec applied before encryption, such as zstd; none: bytes as they are.", component="kv_codec"
    )
