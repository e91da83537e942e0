"""Identity of KV blocks: the compatibility id of an engine's blocks, and the keys of objects.

    kv1/{namespace}/{compatibility id}/{group}.0.{first head}-{last head}/{block hash}

The block hash identifies tokens, cache salt and model; the compatibility id identifies the form of the block's
bytes, including the layers and the range of KV heads.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

import msgspec

from trencadis.records import KVLayout

__all__ = ["VERSION", "compat_id", "is_namespace", "key_prefix", "object_key"]

VERSION: Final = 1
"""Version of the format of objects: of their header, and of the content that ``compat_id`` hashes."""

_NAMESPACE: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


def compat_id(layout: KVLayout, *, identity: str, exact_numerics: bool = True) -> bytes:
    """Return the digest of everything that changes the bytes of a block or their meaning, 16 bytes. Pure.

    The layers and the range of heads are part of it, so that two ranks' parts of one block are never confused.

    Args:
        layout: KV layout of the blocks.
        identity: Identity of the model, ``ModelFacts.identity``.
        exact_numerics: True: blocks of other devices and kernels, whose low bits differ, have another id; False: they
            have the same.
    """
    parts = [(p.layer, p.kind, p.num_heads, p.head_dim, p.dtype, p.item_bytes) for p in layout.parts]
    numerics = f"exact:{layout.numerics}{layout.sums}" if exact_numerics else "any"
    heads = (layout.first_head, layout.last_head)
    content = (VERSION, identity, layout.block_size, heads, layout.rotated, numerics, parts)
    return hashlib.blake2b(msgspec.msgpack.encode(content), digest_size=16, person=b"kv1-compat").digest()


def is_namespace(name: str) -> bool:
    """Return whether a name may be a namespace: 1 to 64 of ``A-Za-z0-9._-``, no dot in front. Pure."""
    return _NAMESPACE.fullmatch(name) is not None


def key_prefix(namespace: str, *, compat: bytes, layout: KVLayout, group: int = 0) -> str:
    """Return the prefix of the keys of one shard; the block's hash in hex follows. Pure.

    Args:
        namespace: Namespace of the objects; see :func:`is_namespace`.
        compat: Compatibility id, 16 bytes; see :func:`compat_id`.
        layout: KV layout of the shard.
        group: Group of layers that share a block table; 0 if all do.

    Raises:
        ValueError: The namespace is not valid.
    """
    if not is_namespace(namespace):
        raise ValueError(f"namespace {namespace!r}: 1 to 64 of A-Za-z0-9._- are allowed, no dot in front.")
    return f"kv1/{namespace}/{compat.hex()}/{group}.0.{layout.first_head}-{layout.last_head}/"


def object_key(namespace: str, *, compat: bytes, layout: KVLayout, block_hash: bytes) -> str:
    """Return the key of one block: ASCII, under 200 characters, of letters, digits and ``/.-_``. Pure.

    Raises:
        ValueError: The namespace is not valid.
    """
    return key_prefix(namespace, compat=compat, layout=layout) + block_hash.hex()
