"""Weights of a share: from files only the parts that are needed, or from a whole model of transformers where files are another matter.

Files of most families have the model's own names, or one weight for each expert where the model has one for all. Families whose files are
tried against transformers (tests/backends/trencadis_torch/parallel/test_reading.py) are read in parts; any other, and .gguf files, whole.

Source of names: ``transformers.conversion_mapping``, transformers 5.24, entries ``qwen2_moe`` and ``mixtral``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Final, Protocol

import torch
from torch import nn

from trencadis_torch.linear.formats.mapped import weight_files
from trencadis_torch.loading.loader import ModelFiles
from trencadis_torch.parallel.cuts import Cut
from trencadis_torch.parallel.sharding import Piece

__all__ = ["READ_IN_PARTS", "LoadedWeights", "StoredWeights", "Weights", "materialise", "missing", "part_of"]

logger = logging.getLogger("trencadis.torch")

READ_IN_PARTS: Final = frozenset(
    {
        "afmoe", "apertus", "apertus1p5_text", "arcee", "codegen", "cohere", "cohere2", "cohere2_moe", "cwm",
        "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "exaone4", "flex_olmo", "gemma", "gemma2",
        "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe",
        "glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_oss", "gptj", "granite", "helium", "hunyuan_v1_dense",
        "hyperclovax", "internlm3", "iquestcoder", "jais2", "llama", "mellum", "minicpm3",
        "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "olmo",
        "olmo2", "olmo3", "olmoe", "opt", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "sarvam_mla",
        "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma", "youtu",
    }
)  # fmt: skip
"""``model_type`` of families whose files were tried."""

_EXPERTS: Final = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
"""Stacked weights, and what each expert's are called in files."""


class Weights(Protocol):
    """Whole weights by name, of which parts are read."""

    def has(self, names: tuple[str, ...]) -> bool:
        """Return whether there is a weight of one of these names."""
        ...

    def read(self, piece: Piece) -> torch.Tensor:
        """Return a part of one; not called where nothing of it is needed."""
        ...


class LoadedWeights:
    """Those of a model that transformers has loaded.

    Args:
        model: Loaded.
    """

    def __init__(self, model: Any) -> None:
        self._tensors: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=False))

    def has(self, names: tuple[str, ...]) -> bool:
        """Return whether there is a weight of one of these names."""
        return any(name in self._tensors for name in names)

    def read(self, piece: Piece) -> torch.Tensor:
        """Return a copy of a part of one."""
        whole = next(self._tensors[name] for name in piece.names if name in self._tensors)
        return part_of(whole, piece)


class StoredWeights:
    """Those of safetensors files.

    Args:
        files: The model.

    Attributes:
        num_bytes: Read so far.

    Raises:
        OSError: There are no files of that kind.
    """

    def __init__(self, files: ModelFiles) -> None:
        from safetensors import safe_open

        self.num_bytes = 0
        self._prefix = ""
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        for path in weight_files(files.name, revision=files.options.get("revision")):
            opened = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def close(self) -> None:
        """Close the files."""
        self._files.clear()
        self._stack.close()

    def dtype(self) -> torch.dtype:
        """Return the data type of the first weight of floats."""
        for name, opened in self._files.items():
            one = opened.get_slice(name)
            if one.get_shape() and one[(slice(0, 0),)].dtype.is_floating_point:
                found: torch.dtype = one[(slice(0, 0),)].dtype
                return found
        return torch.float32

    def has(self, names: tuple[str, ...]) -> bool:
        """Return whether there is a weight of one of these names."""
        return self._found(names) is not None or self._experts(names) is not None

    def read(self, piece: Piece) -> torch.Tensor:
        """Return a part of a weight; no more is read."""
        name = self._found(piece.names)
        if name is not None:
            return self._count(part_of(self._files[name].get_slice(name), piece))
        experts = self._experts(piece.names)
        assert experts is not None, "asked for what it has"
        cut = piece.cut
        if cut is not None and cut.dim == 0:
            experts, cut = [experts[index] for one in cut.ranges for index in range(*one)], None
        inner = None if cut is None else Cut(cut.dim - 1, cut.ranges, cut.size)
        return torch.stack(
            [self._count(part_of(_Joined([self._slice(one) for one in names]), Piece((), inner))) for names in experts]
        )

    def _slice(self, name: str) -> Any:
        return self._files[name].get_slice(name)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.num_bytes += tensor.nbytes
        return tensor

    def _found(self, names: tuple[str, ...]) -> str | None:
        return next((other for name in names for other in _spellings(name) if other in self._files), None)

    def _experts(self, names: tuple[str, ...]) -> list[list[str]] | None:
        """Return the names of each expert's weights that are stacked, or side by side, under one of some names."""
        for name in names:
            owner, _, own = name.rpartition(".")
            for other in _spellings(owner):
                for parts in _EXPERTS.get(own, ()):
                    found: list[list[str]] = []
                    while all(f"{other}.{len(found)}.{part}.weight" in self._files for part in parts):
                        found.append([f"{other}.{len(found)}.{part}.weight" for part in parts])
                    if found:
                        return found
        return None


class _Joined:
    """Slices of files side by side along the first dimension, as one."""

    def __init__(self, slices: list[Any]) -> None:
        self._slices = slices

    def get_shape(self) -> list[int]:
        shapes = [one.get_shape() for one in self._slices]
        return [sum(shape[0] for shape in shapes), *shapes[0][1:]]

    def __getitem__(self, where: Any) -> torch.Tensor:
        rows, others = (where[0], where[1:]) if isinstance(where, tuple) else (slice(None), ())
        first, last, _ = rows.indices(self.get_shape()[0])
        found, start = [], 0
        for one in self._slices:
            size = one.get_shape()[0]
            begin, end = max(first - start, 0), min(last - start, size)
            if begin < end:
                found.append(one[(slice(begin, end), *others)])
            start += size
        return torch.cat(found)


def _spellings(name: str) -> Iterator[str]:
    """Yield the names of a weight in files: as in the model, without the base model's name, and as Mixtral's were."""
    for one in (name, name.partition(".")[2]):
        yield one
        if ".mlp." in one:
            yield one.replace(".mlp.", ".block_sparse_moe.")


def part_of(source: Any, piece: Piece) -> torch.Tensor:
    """Return a part of a whole weight, a copy.

    Args:
        source: A tensor, or a slice of ``safetensors``.
        piece: Which part.
    """
    cut = piece.cut
    if piece.transposed:
        flipped = None if cut is None else Cut(1 - cut.dim, cut.ranges, cut.size) if len(_shape(source)) == 2 else cut
        return part_of(source, Piece(piece.names, flipped)).t().contiguous()
    if cut is None:
        whole: torch.Tensor = source.clone() if isinstance(source, torch.Tensor) else source[...]
        return whole
    found = cut.take(source)
    missing = cut.size - found.shape[cut.dim]
    if missing:
        shape = list(found.shape)
        shape[cut.dim] = missing
        found = torch.cat([found, found.new_zeros(shape)], cut.dim)
    return found


def _shape(source: Any) -> list[int]:
    return list(source.shape) if isinstance(source, torch.Tensor) else list(source.get_shape())


@torch.no_grad()
def materialise(
    model: Any, pieces: dict[int, Piece], weights: Weights, *, dtype: torch.dtype, device: torch.device
) -> None:
    """Give a share its weights, in place.

    Args:
        model: The share; its parameters have no memory yet, or values of no meaning.
        pieces: By the ``id`` of each parameter.
        weights: Whole ones.
        dtype: Data type of parameters and buffers.
        device: Where they go.
    """
    made: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in made:
                piece = pieces.get(id(parameter))
                if piece is None:
                    continue  # of a module that stands for another stage's
                if piece.cut is not None and not piece.cut.ranges:
                    tensor = torch.zeros(parameter.shape, dtype=dtype, device=device)
                else:
                    tensor = weights.read(piece).to(device=device, dtype=dtype)
                made[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
                pieces[id(made[id(parameter)])] = piece
            setattr(module, name, made[id(parameter)])
    for name, buffer in _stored_buffers(model).items():
        buffer.copy_(weights.read(Piece((name,))))


def missing(model: Any, pieces: dict[int, Piece], weights: Weights) -> list[str]:
    """Return names of parameters and buffers that are not among some weights.

    Args:
        model: The share.
        pieces: By the ``id`` of each parameter.
        weights: Whole ones.
    """
    needed = [piece.names for piece in pieces.values()] + [(name,) for name in _stored_buffers(model)]
    return [names[0] for names in needed if not weights.has(names)]


def _stored_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Return the buffers that are stored with a model's weights; they are not divided."""
    stored = set(model.state_dict())
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}
