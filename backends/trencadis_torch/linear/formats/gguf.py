"""Weights of a ``.gguf`` file, in the forms that its blocks have: none is wider than the file has it, but what no kernel takes in blocks.

the model's names ◀ transformers' and gguf's tables ◀ the file's names
rows of a matrix  ◀ transformers' changes to rows, tried on their numbers ◀ blocks, unpacked as they are asked for
experts           ◀ gates, values and matrices back of all experts, each a weight of the file, as the model's class has them together
"""

from __future__ import annotations

import importlib.util
import math
import mmap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import attrs
import numpy as np
import torch

from trencadis.errors import ModelLoadError
from trencadis.gguf_file import KINDS, ROTARY_TENSORS, GgufFile, GgufTensor
from trencadis_torch.linear.formats.gguf_blocks import FORMS, BlocksWeight
from trencadis_torch.linear.formats.source import WeightSource
from trencadis_torch.linear.held import FloatWeight, HeldWeight, JoinedWeight, StackedWeight

__all__ = ["GgufSource"]

_FLOATS: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufSource(WeightSource):
    """A file's weights by the names that a model of transformers has for them.

    Args:
        file: The file's description.
        config: The model's configuration.

    Raises:
        ModelLoadError: The file has a tensor of a kind that is not read, or one that the model has no place for; or the package ``gguf``
            is not installed.
    """

    def __init__(self, file: GgufFile, config: Any) -> None:
        if importlib.util.find_spec("gguf") is None:
            raise ModelLoadError(
                f"{file.path}: reading .gguf files needs the package gguf, which is not installed.",
                hint="pip install 'trencadis[gguf]'",
            )
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self._file = file
        _check_kinds(file)
        self._processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(config=config.to_dict())
        self._shapes, self._experts = _shapes_of(config)
        self._names, self._parts = _named(file, self._shapes, self._experts, config, self._processor)
        unknown = sorted(set(file.tensors) - {one for parts in self._parts.values() for one in parts} - ROTARY_TENSORS)
        if unknown:
            raise ModelLoadError(
                f"{file.path}: a model of type {config.model_type} has no place for {len(unknown)} of its tensors, {unknown[0]} for one."
            )

    @property
    def format(self) -> str:
        """``GGUF`` and the kinds of its matrices, those with the most elements first."""
        counts: Counter[str] = Counter()
        for tensor in self._file.tensors.values():
            if len(tensor.shape) > 1:
                counts[tensor.kind.name] += math.prod(tensor.shape)
        return f"GGUF, {', '.join(kind for kind, _ in counts.most_common())}"

    @property
    def dtype(self) -> torch.dtype:
        """That of floats which most elements have; float32 where most are in blocks."""
        counts: Counter[torch.dtype] = Counter()
        for tensor in self._file.tensors.values():
            counts[_FLOATS.get(tensor.kind.name, torch.float32)] += math.prod(tensor.shape)
        return max(counts, key=counts.__getitem__, default=torch.float32)

    def names(self) -> frozenset[str]:
        """Return the names of all weights that the file has."""
        return frozenset(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a weight's shape: that of the model where the file has as many elements, else the file's."""
        shapes = [self._file.tensors[part].shape for part in self._parts[name]]
        expected = self._shapes[name]
        return expected if math.prod(expected) == sum(map(math.prod, shapes)) else shapes[0]

    def weight(self, name: str) -> HeldWeight:
        """Return a matrix in the form of the file; as floats where the model has its elements in another order within a row."""
        (part,) = self._parts[name]
        tensor = self._file.tensors[part]
        order = None if len(tensor.shape) != 2 else self._order_of_rows(part, tensor)
        if order is None:
            return FloatWeight(self.tensor(name))
        held = self._held(tensor)
        in_order = bool((order == np.arange(len(order))).all())
        return held if in_order else held.rows(torch.from_numpy(order))

    def tensor(self, name: str) -> torch.Tensor:
        """Return a weight as floats: as stored where that is what the model has, else float32."""
        if name in self._experts:
            return self._of_experts(name)
        gathered: dict[str, Any] = {"tensors": {}}
        last: torch.Tensor | None = None
        for part in self._parts[name]:
            last = self._processed(part, gathered)
        if last is None:
            found: torch.Tensor = gathered["tensors"][name]
            return found
        return last.reshape(self._shapes[name]) if math.prod(self._shapes[name]) == last.numel() else last

    def stack(self, name: str) -> StackedWeight:
        """Return the matrices of a layer's experts in the form of the file."""
        layout = self._experts[name]
        parts = [self._matrices(self._file.tensors[part]) for part in self._parts[name]]
        joined = [JoinedWeight(each, in_turn=layout.in_turn) for each in zip(*parts, strict=True)]
        return StackedWeight(joined if len(parts) > 1 else parts[0], flipped=layout.flipped)

    def _matrices(self, tensor: GgufTensor) -> list[HeldWeight]:
        """Return the matrix of each expert."""
        held, (num_experts, num_outputs, _) = self._held(tensor), tensor.shape
        return [held.rows(slice(e * num_outputs, (e + 1) * num_outputs)) for e in range(num_experts)]

    def _of_experts(self, name: str) -> torch.Tensor:
        """Return matrices or biases of a layer's experts as floats."""
        if len(self._shapes[name]) == 3:
            stack = self.stack(name)
            return torch.stack([stack[index] for index in range(stack.shape[0])])
        biases = [self._held(self._file.tensors[part]).dequantised() for part in self._parts[name]]
        return torch.stack(biases, -1).flatten(1) if self._experts[name].in_turn else torch.cat(biases, 1)

    def let_go(self) -> None:
        """Take the file's pages out of this process's memory."""
        self._file.mapped.madvise(mmap.MADV_DONTNEED)

    def _processed(self, part: str, gathered: dict[str, Any]) -> torch.Tensor | None:
        """Return a tensor as the model has it; None: a processor of transformers has put it into ``gathered``."""
        stored = self._held(self._file.tensors[part])
        floats = stored.dequantised().view(self._file.tensors[part].shape)
        given = floats.numpy()
        result = self._processor.process(
            weights=given, name=part, tensor_key_mapping=self._names, parsed_parameters=gathered
        )
        if result.name is None:
            return None
        if result.weights is given and isinstance(stored, FloatWeight):
            return stored.values.view(self._file.tensors[part].shape)
        return torch.from_numpy(np.ascontiguousarray(result.weights))

    def _order_of_rows(self, part: str, tensor: GgufTensor) -> np.ndarray[Any, Any] | None:
        """Return which row of the file is which of the model's; None: the model has no rows of the file as they are."""
        numbers = np.arange(tensor.shape[0])[:, None]
        try:
            result = self._processor.process(weights=numbers, name=part)
        except ValueError:  # rows are cut, or put together
            return None
        if result.name is None or result.weights.shape != numbers.shape:
            return None
        order: np.ndarray[Any, Any] = result.weights[:, 0]
        return order

    def _held(self, tensor: GgufTensor) -> HeldWeight:
        """Return a tensor's rows in the form of the file."""
        raw = torch.frombuffer(self._file.mapped, dtype=torch.uint8, offset=tensor.offset, count=tensor.num_bytes)
        rows = math.prod(tensor.shape[:-1])
        dtype = _FLOATS.get(tensor.kind.name)
        if dtype is None:
            return BlocksWeight(raw.view(rows, -1), tensor.kind, self.let_go)
        return FloatWeight((raw if tensor.offset % dtype.itemsize == 0 else raw.clone()).view(dtype).view(rows, -1))


def _check_kinds(file: GgufFile) -> None:
    for name, tensor in file.tensors.items():
        if tensor.kind.name not in _FLOATS and tensor.kind.name not in FORMS:
            known = [kind.name for kind in KINDS.values() if kind.name in _FLOATS or kind.name in FORMS]
            raise ModelLoadError(
                f"{file.path}: {name} is stored as {tensor.kind.name}, which is not read.",
                hint=f"Take a file of another quantisation, such as Q4_K_M. Read are {', '.join(known)}.",
            )


@attrs.frozen
class _Layout:
    """How a model's class has the weights of a layer's experts together.

    Attributes:
        flipped: A matrix is ``[K, N]``.
        in_turn: Gates and values take turns; else all values follow all gates.
    """

    flipped: bool
    in_turn: bool


def _shapes_of(config: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, _Layout]]:
    """Return the shapes of a model's weights by name, and how those of experts lie, of a model that is built without memory."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    except Exception as error:
        raise ModelLoadError(f"a model of type {config.model_type} cannot be built: {error}") from error
    experts = {
        f"{prefix}.{own}": _Layout(bool(part.is_transposed), not getattr(part, "is_concatenated", True))
        for prefix, part in model.named_modules()
        if "is_transposed" in vars(part)
        for own, _ in part.named_parameters(recurse=False)
    }
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, experts


def _named(
    file: GgufFile, shapes: Iterable[str], experts: Iterable[str], config: Any, processor: Any
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the model's names by the file's, and the file's tensors of each of the model's weights.

    As ``get_gguf_hf_weights_map`` of transformers has it, which makes gguf's table anew for each module of a model: seconds of work.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next((kind for kind, name in MODEL_ARCH_NAMES.items() if name == file.architecture), None)
    if kind is None:
        raise ModelLoadError(
            f"{file.path}: the package gguf has no names of tensors for the architecture {file.architecture!r}.",
            hint="pip install --upgrade gguf",
        )
    table = get_tensor_name_map(kind, config.get_text_config(decoder=True).num_hidden_layers)
    names = {part: own for own in experts for part in _parts_of_experts(own, table)}
    for own in dict.fromkeys(map(processor.preprocess_name, shapes)):
        base, dot, suffix = own.rpartition(".")
        if suffix not in ("weight", "bias"):
            base, dot, suffix = own, "", ""
        levels = base.split(".")  # some tables have the names of a part of the model, such as that without its head
        found = (table.get_name(".".join(levels[first:])) for first in range(len(levels)))
        part = next((one for one in found if one is not None), None)
        if part is None:
            processor.perform_fallback_tensor_mapping(names, dot + suffix, "", own)
        else:
            names.setdefault(part + dot + suffix, own)
    parts: dict[str, list[str]] = {}
    for part in file.tensors:
        name = names.get(part) or names.get(part.removesuffix(".weight"))
        if name is not None:
            parts.setdefault(name, []).append(part)
    order = {part: place for place, part in enumerate(names)}
    return names, {name: sorted(found, key=lambda part: order.get(part, 0)) for name, found in parts.items()}


def _parts_of_experts(own: str, table: Any) -> Iterator[str]:
    """Yield the file's names for a weight or a bias of a layer's experts; gates come before values."""
    base = own.removesuffix("_bias")
    for one in (base, *(base.replace(".gate_up_proj", f".{side}_proj") for side in ("gate", "up"))):
        part = table.get_name(one)
        if part is not None:
            yield f"{part}.{'weight' if own == base else 'bias'}"
