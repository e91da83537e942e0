"""Export of a directory's blocks to a safetensors file; for the format see :mod:`trencadis_kv.exchange.file_layout`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trencadis.errors import ConfigError, TransferError
from trencadis.records import KVPart
from trencadis_kv.exchange.file_layout import ENCODED, FORMAT, HEADERS, PAYLOADS, STARTS, Moved, part_name
from trencadis_kv.exchange.safetensors_file import DTYPES, StoredTensor, write_tensors
from trencadis_kv.store.description import Description, description_key
from trencadis_kv.store.format import HEADER_BYTES
from trencadis_kv.store.inventory import BlockKey, check_object
from trencadis_kv.store.object_directory import ObjectDirectory, StoredObject

__all__ = ["export_objects"]


def export_objects(
    directory: ObjectDirectory, file: Path, *, namespace: str = "", progress: Callable[[int], object] = lambda _: None
) -> Moved:
    """Write blocks to a safetensors file.

    Args:
        directory: Directory of the blocks; engines may go on using it.
        file: Path of the file.
        namespace: Namespace to export; empty: all.
        progress: Called after each block with the number of blocks done.

    Raises:
        ConfigError: There are no blocks, or the file cannot be written.
        TransferError: The directory cannot be read.
    """
    groups = [_RankBlocks(prefix, found, directory) for prefix, found in _by_prefix(directory, namespace)]
    if not groups:
        where = f" in namespace {namespace}" if namespace else ""
        raise ConfigError(
            f"{directory.root}: there are no KV blocks{where}.", hint="trencadis kv show lists what there is."
        )
    tensors = {name: tensor for group in groups for name, tensor in group.tensors().items()}
    metadata = {"format": FORMAT}
    for group in groups:
        metadata |= group.metadata
    moved, num_done = Moved(), 0
    with write_tensors(file, tensors, metadata) as data:
        for group in groups:
            for row, key in enumerate(group.keys):
                group.put(row, _whole(directory, key, moved), data)
                num_done += 1
                progress(num_done)
    return moved


class _RankBlocks:
    """Blocks of one key prefix, and their tensors in the file."""

    def __init__(self, prefix: str, found: Sequence[StoredObject], directory: ObjectDirectory) -> None:
        self._prefix = prefix
        key = BlockKey.parse(found[0].key)
        description = _described(directory, key) if key is not None else None
        self.metadata = {description[0]: description[1].to_json().decode()} if description else {}
        self._parts = description[1].layout.parts if description else ()
        self._block_size = description[1].layout.block_size if description else 0
        plain = HEADER_BYTES + description[1].layout.block_bytes if description else -1
        self._plain = [one.key for one in found if one.num_bytes == plain]
        encoded = [one for one in found if one.num_bytes != plain]
        sizes = [max(0, one.num_bytes - HEADER_BYTES) for one in encoded]
        self._starts = np.cumsum([0, *sizes], dtype="<i8")
        self.keys = [*self._plain, *(one.key for one in encoded)]

    def tensors(self) -> dict[str, StoredTensor]:
        """Return the tensors of this group."""
        num_plain, num_encoded = len(self._plain), len(self.keys) - len(self._plain)
        made = {}
        if num_plain:
            made[HEADERS] = StoredTensor(dtype="U8", shape=(num_plain, HEADER_BYTES))
            made |= {part_name(part): _part_tensor(part, num_plain, self._block_size) for part in self._parts}
        if num_encoded:
            made[ENCODED + HEADERS] = StoredTensor(dtype="U8", shape=(num_encoded, HEADER_BYTES))
            made[STARTS] = StoredTensor(dtype="I64", shape=(num_encoded + 1,))
            made[PAYLOADS] = StoredTensor(dtype="U8", shape=(int(self._starts[-1]),))
        return {self._prefix + name: tensor for name, tensor in made.items()}

    def put(self, row: int, whole: bytes, data: Mapping[str, NDArray[np.uint8]]) -> None:
        """Fill one row; zeros if the object is missing or does not match the listing."""
        content = np.frombuffer(whole, np.uint8)
        payload = content[HEADER_BYTES:]
        if row < len(self._plain):
            if len(payload) == self._block_size * sum(part.token_bytes for part in self._parts):
                data[self._prefix + HEADERS].reshape(-1, HEADER_BYTES)[row] = content[:HEADER_BYTES]
                for part, piece in _pieces(self._parts, self._block_size, payload):
                    data[self._prefix + part_name(part)].reshape(-1, len(piece))[row] = piece
            return
        row -= len(self._plain)
        data[self._prefix + STARTS].view("<i8")[row : row + 2] = self._starts[row : row + 2]
        begin, end = self._starts[row : row + 2]
        if len(payload) == end - begin and len(whole) >= HEADER_BYTES:
            data[self._prefix + ENCODED + HEADERS].reshape(-1, HEADER_BYTES)[row] = content[:HEADER_BYTES]
            data[self._prefix + PAYLOADS][begin:end] = payload


def _by_prefix(directory: ObjectDirectory, namespace: str) -> list[tuple[str, list[StoredObject]]]:
    groups: dict[str, list[StoredObject]] = {}
    for found in directory.objects():
        key = BlockKey.parse(found.key)
        if key is not None and namespace in {"", key.namespace}:
            groups.setdefault(key.prefix, []).append(found)
    return [(prefix, sorted(groups[prefix], key=lambda found: found.key)) for prefix in sorted(groups)]


def _described(directory: ObjectDirectory, key: BlockKey) -> tuple[str, Description] | None:
    """Return key and description of a layout, if it is stored and its parts have unique names."""
    name = description_key(key.namespace, key.compat)
    data = directory.read(name)
    if data is None:
        return None
    try:
        description = Description.from_json(data, compat=key.compat)
    except TransferError:
        return None
    parts = description.layout.parts
    return (name, description) if len({part_name(part) for part in parts}) == len(parts) else None


def _whole(directory: ObjectDirectory, key: str, moved: Moved) -> bytes:
    """Return an object if it is intact, else no bytes; counts it."""
    data = directory.read(key)
    if data is None:
        return b""
    try:
        check_object(key, data)
    except TransferError:
        moved.num_broken += 1
        return b""
    moved.num_objects += 1
    moved.num_bytes += len(data)
    return data


def _part_tensor(part: KVPart, num_blocks: int, block_size: int) -> StoredTensor:
    shape = (num_blocks, block_size, part.num_heads, part.head_dim)
    tensor = StoredTensor(dtype=DTYPES.get(part.dtype, ""), shape=shape)
    if tensor.dtype and tensor.num_bytes == num_blocks * block_size * part.token_bytes:
        return tensor
    # A dtype that the format does not know goes as bytes.
    return StoredTensor(dtype="U8", shape=(*shape[:3], part.head_dim * part.item_bytes))


def _pieces(
    parts: Sequence[KVPart], block_size: int, payload: NDArray[np.uint8]
) -> Iterator[tuple[KVPart, NDArray[np.uint8]]]:
    """Yield each part's bytes of a block."""
    begin = 0
    for part in parts:
        end = begin + block_size * part.token_bytes
        yield part, payload[begin:end]
        begin = end
