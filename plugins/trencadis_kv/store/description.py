"""Description of the blocks under a compatibility id, stored once beside them, since the id is only a digest.

kv1/{namespace}/{compatibility id}/layout   JSON; the id can be computed from it, so it cannot belong to another one
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import attrs
import msgspec

from trencadis.errors import TransferError
from trencadis.records import KVLayout, KVPart, TransferCause
from trencadis_kv.store.identity import compat_id

__all__ = ["LAYOUT", "Description", "description_key"]

LAYOUT: Final = "layout"
"""Last part of a description's key; never a block's, which is hexadecimal."""


def description_key(namespace: str, compat: bytes) -> str:
    """Return the key of a description. Pure."""
    return f"kv1/{namespace}/{compat.hex()}/{LAYOUT}"


@attrs.frozen(kw_only=True)
class Description:
    """Meaning of a compatibility id.

    Attributes:
        layout: KV layout of the blocks.
        identity: Identity of the model, ``ModelFacts.identity``.
        exact_numerics: Whether other devices and kernels have another id; see
            :func:`~trencadis_kv.store.identity.compat_id`.
    """

    layout: KVLayout
    identity: str
    exact_numerics: bool

    @property
    def compat(self) -> bytes:
        """The compatibility id, 16 bytes."""
        return compat_id(self.layout, identity=self.identity, exact_numerics=self.exact_numerics)

    @property
    def model(self) -> str:
        """Short description of the model: class, dtype and the beginning of its fingerprint."""
        architecture, dtype, fingerprint = (*self.identity.split("\0"), "", "")[:3]
        return " ".join(word for word in (architecture, dtype, fingerprint[:12]) if word)

    def to_json(self) -> bytes:
        """Return it as JSON; equal descriptions give equal bytes. Pure."""
        layout = attrs.asdict(self.layout)
        if not self.layout.sums:
            del layout["sums"]
        return msgspec.json.encode(
            {"identity": self.identity, "exact_numerics": self.exact_numerics, "layout": layout}, order="sorted"
        )

    @classmethod
    def from_json(cls, data: bytes | str, *, compat: bytes) -> Description:
        """Return the decoded description, checked against its id.

        Args:
            data: JSON as returned by :meth:`to_json`, from any source.
            compat: Expected compatibility id, 16 bytes.

        Raises:
            TransferError: ``corrupt``: the data are no description, or that of another id.
        """
        try:
            found = msgspec.json.decode(data, type=_Fields)
            parts = tuple(KVPart(**msgspec.structs.asdict(part)) for part in found.layout.parts)
            layout = KVLayout(**{**msgspec.structs.asdict(found.layout), "parts": parts})
        except msgspec.MsgspecError as error:
            raise TransferError(f"The KV layout is broken: {error}.", cause=TransferCause.CORRUPT) from error
        description = cls(layout=layout, identity=found.identity, exact_numerics=found.exact_numerics)
        if description.compat != compat:
            message = f"The KV layout is that of {description.compat.hex()}, not of {compat.hex()}."
            raise TransferError(message, cause=TransferCause.CORRUPT)
        return description


_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    layer: int
    kind: str
    num_heads: _Size
    head_dim: _Size
    dtype: str
    item_bytes: _Size


class _Layout(msgspec.Struct, forbid_unknown_fields=True):
    parts: tuple[_Part, ...]
    block_size: _Size
    first_head: int
    last_head: int
    rotated: bool
    numerics: str
    sums: str = ""


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    identity: str
    exact_numerics: bool
    layout: _Layout
