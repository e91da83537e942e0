"""Import of a safetensors file's blocks into a directory; for the format see :mod:`trencadis_kv.exchange.file_layout`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from trencadis.errors import ConfigError, TransferError
from trencadis.records import TransferCause
from trencadis_kv.exchange.file_layout import ENCODED, FORMAT, HEADERS, PAYLOADS, STARTS, Moved, part_name
from trencadis_kv.exchange.safetensors_file import StoredTensor, read_tensors
from trencadis_kv.store.description import Description, description_key
from trencadis_kv.store.format import HEADER_BYTES, parse_header
from trencadis_kv.store.inventory import check_object
from trencadis_kv.store.object_directory import ObjectDirectory

__all__ = ["import_objects"]

_PREFIX: Final = re.compile(r"kv1/[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}/[0-9a-f]{32}/[A-Za-z0-9_-][A-Za-z0-9._-]{0,29}/")
"""Valid prefixes: no file can make the import write to another folder."""


def import_objects(
    file: Path, directory: ObjectDirectory, *, namespace: str = "", progress: Callable[[int], object] = lambda _: None
) -> Moved:
    """Write the blocks of a safetensors file into a directory, replacing existing ones.

    Args:
        file: Path of a file that :func:`export_objects` wrote.
        directory: Directory to write to.
        namespace: Namespace of all blocks in the directory; empty: as in the file.
        progress: Called after each block with the number of blocks done.

    Raises:
        ConfigError: The file cannot be read, or was not exported from a directory.
        TransferError: The directory cannot be written.
    """
    tensors, metadata = read_tensors(file)
    if metadata.get("format") != FORMAT:
        raise ConfigError(f"{file}: no file of KV blocks.", hint="Give one that trencadis kv export wrote.")
    directory.check()
    moved, num_done = Moved(), 0
    for prefix, encoded in _prefixes(tensors):
        # A broken or forged file raises here, before anything of the group is written.
        rows = _rows(file, prefix, tensors, metadata, encoded=encoded)
        target = _renamed(prefix, namespace)
        _import_description(directory, prefix, metadata, namespace)
        for header, payload in rows:
            _import_row(directory, target, header, payload, moved)
            num_done += 1
            progress(num_done)
    return moved


def _prefixes(tensors: Mapping[str, StoredTensor]) -> list[tuple[str, bool]]:
    """Return the prefixes in a file, each with whether its payloads are encoded."""
    found = []
    for name in sorted(tensors):
        for tail, encoded in ((ENCODED + HEADERS, True), (HEADERS, False)):
            if name.endswith("/" + tail) and _PREFIX.fullmatch(name.removesuffix(tail)):
                found.append((name.removesuffix(tail), encoded))
    return found


def _rows(
    file: Path, prefix: str, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, str], *, encoded: bool
) -> Iterator[tuple[bytes, bytes]]:
    """Return headers and payloads, after checking that the tensors match."""
    try:
        if encoded:
            headers = tensors[prefix + ENCODED + HEADERS].data.reshape(-1, HEADER_BYTES)
            starts = tensors[prefix + STARTS].data.view("<i8")
            payloads = tensors[prefix + PAYLOADS].data
            if (
                len(starts) != len(headers) + 1
                or starts[0] < 0
                or starts[-1] > len(payloads)
                or (np.diff(starts) < 0).any()
            ):
                raise ValueError(f"{len(headers)} headers, {len(starts)} starts, {len(payloads)} bytes")
            return (
                (header.tobytes(), payloads[starts[row] : starts[row + 1]].tobytes())
                for row, header in enumerate(headers)
            )
        compat = bytes.fromhex(prefix.split("/")[2])
        layout = Description.from_json(metadata[_description_name(prefix)], compat=compat).layout
        headers = tensors[prefix + HEADERS].data.reshape(-1, HEADER_BYTES)
        parts = [
            tensors[prefix + part_name(part)].data.reshape(len(headers), layout.block_size * part.token_bytes)
            for part in layout.parts
        ]
        return (
            (header.tobytes(), b"".join(part[row].tobytes() for part in parts)) for row, header in enumerate(headers)
        )
    except (KeyError, ValueError, TransferError) as error:
        raise ConfigError(f"{file}: {prefix} is broken: {error}.", hint="Export it again.") from error


def _import_row(directory: ObjectDirectory, prefix: str, header: bytes, payload: bytes, moved: Moved) -> None:
    if not any(header):
        return
    try:
        key = prefix + parse_header(header).block_hash.hex()
        check_object(key, header + payload)
    except TransferError as error:
        if error.cause not in {TransferCause.CORRUPT, TransferCause.INCOMPATIBLE}:
            raise
        moved.num_broken += 1
        return
    directory.write(key, [memoryview(header), memoryview(payload)])
    moved.num_objects += 1
    moved.num_bytes += len(header) + len(payload)


def _import_description(directory: ObjectDirectory, prefix: str, metadata: Mapping[str, str], namespace: str) -> None:
    text = metadata.get(_description_name(prefix))
    if text is None:
        return
    try:
        description = Description.from_json(text, compat=bytes.fromhex(prefix.split("/")[2]))
    except TransferError:
        return  # the blocks can be used without it
    key = _renamed(_description_name(prefix), namespace)
    directory.write(key, [memoryview(description.to_json())])


def _description_name(prefix: str) -> str:
    _, namespace, compat, *_ = prefix.split("/")
    return description_key(namespace, bytes.fromhex(compat))


def _renamed(name: str, namespace: str) -> str:
    kind, old, rest = name.split("/", 2)
    return f"{kind}/{namespace or old}/{rest}"
