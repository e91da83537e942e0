"""Built-in KV codecs: the encoding of a KV block's bytes in a store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trencadis.hookspecs import hookimpl
from trencadis.interfaces import Component, ComponentContext, NoConfig
from trencadis_kv.codecs.config import AesGcmConfig, ZstdConfig
from trencadis_kv.interfaces.kv_codec import INTERFACE_VERSION

if TYPE_CHECKING:
    from trencadis_kv.interfaces import KVCodec

__all__ = ["trencadis_kv_codecs"]


@hookimpl
def trencadis_kv_codecs() -> Iterable[Component]:
    """Yield ``none``, ``zstd`` and ``aes_gcm``."""
    yield Component(
        name="none",
        factory=_make_plain,
        summary="Bytes as they are on the device.",
        interface_version=INTERFACE_VERSION,
        stability="stable",
    )
    yield Component(
        name="zstd",
        factory=_make_zstd,
        config=ZstdConfig,
        summary="Compressed by Zstandard, bytes of equal significance together.",
        interface_version=INTERFACE_VERSION,
        stability="stable",
    )
    yield Component(
        name="aes_gcm",
        factory=_make_aes_gcm,
        config=AesGcmConfig,
        summary="Encrypted and authenticated by AES-GCM, after another codec if one is named.",
        interface_version=INTERFACE_VERSION,
        stability="stable",
    )


def _make_plain(config: NoConfig, context: ComponentContext) -> KVCodec:
    from trencadis_kv.codecs.plain import Plain

    return Plain()


def _make_zstd(config: ZstdConfig, context: ComponentContext) -> KVCodec:
    from trencadis_kv.codecs.zstd import Zstd, item_bytes_of

    return Zstd(level=config.level, item_bytes=config.item_bytes or item_bytes_of(context.model))


def _make_aes_gcm(config: AesGcmConfig, context: ComponentContext) -> KVCodec:
    from trencadis_kv.codecs.aes_gcm import AesGcm
    from trencadis_kv.codecs.key import read_key
    from trencadis_kv.codecs.plain import Plain

    inner = Plain() if config.inner in ("", "none") else context.make("kv_codec", config.inner)
    return AesGcm(read_key(env=config.key_env, file=config.key_file), inner=inner)
