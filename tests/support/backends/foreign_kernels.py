"""Products of the kernels for a CPU that this machine is not, compiled by a cross compiler and run by an emulator."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trencadis_torch.instruction_sets import FLAGS, InstructionSet
from trencadis_torch.linear.held import HeldWeight
from trencadis_torch.linear.native import KINDS, SOURCE, Packed
from trencadis_torch.linear.packed import pack

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
_DRIVER = Path(__file__).with_name("products.cpp")


def reason_to_skip() -> str:
    """Return what is missing on this machine; empty: nothing."""
    missing = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)} (Debian: g++-aarch64-linux-gnu, qemu-user)" if missing else ""


class Products:
    """A program for an instruction set."""

    def __init__(self, one: InstructionSet, cpu: str, folder: Path) -> None:
        self._program, self._cpu = folder / f"products-{one.name}", cpu
        command = [COMPILER, *FLAGS, "-O1", *one.all_options, "-static", f"-I{SOURCE.parent}", str(_DRIVER)]
        subprocess.run([*command, "-o", str(self._program)], check=True, timeout=300)

    def of(self, jobs: Sequence[tuple[HeldWeight, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return ``x @ weight.T`` and the weight as it was packed, for each weight and ``x``."""
        text = b"".join(_job(held, x) for held, x in jobs)
        command = [EMULATOR, "-cpu", self._cpu, str(self._program)]
        found = subprocess.run(command, input=text, stdout=subprocess.PIPE, check=True, timeout=300).stdout
        floats, results = torch.from_numpy(np.frombuffer(found, np.float32).copy()), []
        for held, x in jobs:
            for shape in ((len(x), held.shape[0]), held.shape):
                part, floats = floats[: shape[0] * shape[1]], floats[shape[0] * shape[1] :]
                results.append(part.view(shape))
        assert not floats.numel()
        return list(zip(results[::2], results[1::2], strict=True))


class _Recorder:
    """Stands for the library where weights are packed: keeps what it would be given."""

    panel, most_apart = 1, 1024

    def pack_floats(self, weight: torch.Tensor, **_: Any) -> Packed:
        kind = KINDS["bfloat" if weight.dtype is torch.bfloat16 else "float"]
        self.arrays = (_bytes(weight),)
        return Packed(weight, None, None, None, None, kind, weight.shape[1], 0, *weight.shape)

    def pack_channels(self, weight: tuple[torch.Tensor, torch.Tensor], **_: Any) -> Packed:
        values, scales = weight
        self.arrays = (_bytes(values.view(torch.uint8) ^ 128), _bytes(scales))
        return Packed(values, scales, None, None, None, KINDS["channels"], values.shape[1], 128, *values.shape)

    def pack_groups(self, weights: Iterable[tuple[torch.Tensor, ...]], **given: Any) -> Packed:
        parts = [torch.cat(part) for part in zip(*weights, strict=True)]
        self.arrays = (*map(_bytes, parts), _bytes(given["scales"]))
        fields = (given["scales"], None, given.get("levels"), given.get("order"), KINDS[given["kind"]])
        return Packed(parts[0], *fields, given["group"], given["zero"], len(parts[0]), given["num_inputs"])


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def _job(held: HeldWeight, x: torch.Tensor) -> bytes:
    recorder: Any = _Recorder()
    packed = pack([held], [None], recorder).packed  # type: ignore[attr-defined]
    tables = [b"" if one is None else _bytes(one) for one in (packed.levels, packed.order)]
    numbers = (
        *(packed.kind, packed.group, packed.zero, packed.num_outputs, packed.num_inputs, len(x)),
        *(len(recorder.arrays[0]), len(tables[0]), len(tables[1]) // 4),
    )
    return b"".join((np.array(numbers, np.int64).tobytes(), *recorder.arrays, *tables, _bytes(x)))
