"""Directories of KV blocks as engines leave them, without an engine."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from trencadis.records import KVLayout, KVPart
from trencadis_kv.store.description import Description, description_key
from trencadis_kv.store.format import pack_header
from trencadis_kv.store.identity import object_key
from trencadis_kv.store.object_directory import ObjectDirectory


def layout_of(dtype: str = "float32", item_bytes: int = 4, *, first_head: int = 0) -> KVLayout:
    return KVLayout(
        parts=tuple(
            KVPart(layer=layer, kind=kind, num_heads=2, head_dim=4, dtype=dtype, item_bytes=item_bytes)
            for kind in ("key", "value")
            for layer in range(2)
        ),
        block_size=3,
        first_head=first_head,
        last_head=first_head + 2,
        numerics="test",
    )


class Blocks:
    """The blocks of one model in one namespace.

    Attributes:
        payloads: By key.
    """

    def __init__(
        self,
        root: Path,
        *,
        layout: KVLayout | None = None,
        namespace: str = "default",
        model: str = "Tiny\0float32\0fedcba9876543210",
        described: bool = True,
    ) -> None:
        self.directory = ObjectDirectory(root)
        self.layout = layout or layout_of()
        self.namespace = namespace
        description = Description(layout=self.layout, identity=model, exact_numerics=True)
        self.compat = description.compat
        self.payloads: dict[str, bytes] = {}
        self.description_key = description_key(namespace, self.compat)
        if described:
            self.directory.write(self.description_key, [memoryview(description.to_json())])

    def add(self, number: int, *, payload: bytes | None = None, codec_flags: int = 0) -> str:
        if payload is None:
            payload = np.random.default_rng(number).bytes(self.layout.block_bytes)
        block_hash = hashlib.blake2b(str(number).encode(), digest_size=32).digest()
        key = object_key(self.namespace, compat=self.compat, layout=self.layout, block_hash=block_hash)
        header = pack_header(
            self.layout, compat=self.compat, block_hash=block_hash, payload=payload, codec_flags=codec_flags
        )
        self.directory.write(key, [memoryview(header), memoryview(payload)])
        self.payloads[key] = payload
        return key

    def damage(self, key: str, place: int = -1) -> None:
        """Flip a bit of an object."""
        data = bytearray(self.directory.read(key) or b"")
        data[place] ^= 16
        self.directory.write(key, [memoryview(bytes(data))])


def contents(directory: ObjectDirectory) -> dict[str, bytes | None]:
    return {found.key: directory.read(found.key) for found in directory.objects()}
