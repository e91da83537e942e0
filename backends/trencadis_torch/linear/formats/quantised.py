"""Checkpoints of which some weights are quantised: several stored tensors stand for one weight, the others are passed on.

    model.layers.0.mlp.up_proj.qweight ┐
    model.layers.0.mlp.up_proj.qzeros  ├─▶ model.layers.0.mlp.up_proj.weight
    model.layers.0.mlp.up_proj.scales  ┘
    model.norm.weight                  ──▶ model.norm.weight

A format says which stored tensor belongs to which weight, and how a weight is made of its parts. Which weights are quantised is read off
the files, since lists of layers in configurations are of many forms; that every weight has all of its parts, of shapes that go together,
is checked before any weight is read.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch

from trencadis.errors import ModelLoadError
from trencadis_torch.linear.formats.mapped import MappedTensors
from trencadis_torch.linear.formats.source import WeightSource
from trencadis_torch.linear.held import FloatWeight, HeldWeight

__all__ = ["FLOATS", "WHOLE", "QuantisedSource"]

WHOLE = ""
"""Label of the tensor that is stored by the weight's own name."""

FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
"""Data types of weights and scales that are floats as they are."""

DAMAGED = "The files are damaged or incomplete, or config.json is of another checkpoint."


class QuantisedSource(WeightSource):
    """Weights of one checkpoint in a format of quantised weights.

    Args:
        files: Tensors of its files.
        quantization: Table ``quantization_config`` of its config.json.
        path: Where it is, for messages.
        dtype: Data type of the model by config.json; that of weights whose format names none of their own.

    Raises:
        ModelLoadError: The table asks for what is not served, or a weight's parts contradict each other.
    """

    method: ClassVar[str]
    """Value of ``quant_method``."""

    marks: ClassVar[tuple[str, ...]]
    """Ends of names of stored tensors that only quantised weights have."""

    parts: ClassVar[Mapping[str, str]] = {}
    """Labels of parts by the ends of their names; where an end begins with a dot, the part is of the module's ``weight``."""

    @classmethod
    def reads(cls, quantization: Mapping[str, Any]) -> bool:
        """Return whether this class reads the format of a table ``quantization_config``. Pure."""
        return bool(quantization.get("quant_method") == cls.method)

    def __init__(self, files: MappedTensors, quantization: Mapping[str, Any], *, path: str, dtype: torch.dtype) -> None:
        self._files = files
        self._path = path
        self._dtype = dtype if dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
        self._read_table(quantization)
        self._parts: dict[str, dict[str, str]] = {}
        for stored in sorted(files.names()):
            owner = self._owner(stored)
            if owner is not None:
                name, label = owner
                self._parts.setdefault(name, {})[label] = stored
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name in self._parts:
            if self.is_quantised(name):
                self._shapes[name] = self._quantised_shape(name)
            else:
                self._check_plain(name)

    @abstractmethod
    def _read_table(self, quantization: Mapping[str, Any]) -> None:
        """Note what is needed of the table ``quantization_config``.

        Raises:
            ModelLoadError: It asks for what is not served.
        """

    def _owner(self, stored: str) -> tuple[str, str] | None:
        """Return the weight that a stored tensor belongs to and the label of this part; None: it is part of no weight. Pure."""
        for end, label in self.parts.items():
            if stored.endswith(end):
                return stored.removesuffix(end) + (".weight" if end.startswith(".") else ""), label
        return stored, WHOLE

    @abstractmethod
    def _quantised_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a quantised weight, by the shapes of its parts.

        Raises:
            ModelLoadError: They contradict each other, or one is missing.
        """

    @abstractmethod
    def _quantised_weight(self, name: str) -> HeldWeight:
        """Return a quantised matrix in a form that has it, or as the floats that the format's own dequantisation gives."""

    def _quantised_tensor(self, name: str) -> torch.Tensor:
        """Return a quantised weight as floats."""
        weight = self._quantised_weight(name)
        return weight.values if isinstance(weight, FloatWeight) else weight.dequantised()

    def names(self) -> frozenset[str]:
        """Return the names of all weights, as a checkpoint without quantisation has them."""
        return frozenset(self._parts)

    def is_quantised(self, name: str) -> bool:
        """Return whether a weight is stored as more than floats by its own name."""
        return self._parts[name].keys() != {WHOLE}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a weight's shape, without reading it."""
        return self._shapes[name] if name in self._shapes else self._files.shape(self._parts[name][WHOLE])

    def weight(self, name: str) -> HeldWeight:
        """Return a matrix in the form nearest to the file's: where only floats can have it, bfloat16, the narrowest that kernels take."""
        if not self.is_quantised(name):
            return FloatWeight(self._plain(name))
        if len(self.shape(name)) != 2:
            raise self._fault(name, f"it is no matrix: {self.shape(name)}")
        held = self._quantised_weight(name)
        return FloatWeight(held.values.bfloat16()) if isinstance(held, FloatWeight) else held

    def tensor(self, name: str) -> torch.Tensor:
        """Return any weight as floats."""
        return self._quantised_tensor(name) if self.is_quantised(name) else self._plain(name)

    def let_go(self) -> None:
        """Take the files' pages out of this process's memory."""
        self._files.let_go()

    def _plain(self, name: str) -> torch.Tensor:
        return self._files.tensor(self._parts[name][WHOLE])

    def _check_plain(self, name: str) -> None:
        dtype = self._files.dtype(self._parts[name][WHOLE])
        if dtype not in FLOATS and name.endswith("weight"):
            raise self._fault(name, f"it is stored as {_dtype_name(dtype)}, and nothing there says at which scale")

    def _has(self, name: str, label: str) -> bool:
        return label in self._parts[name]

    def _part(self, name: str, label: str) -> torch.Tensor:
        """Return a stored part of a weight."""
        return self._files.tensor(self._parts[name][label])

    def _part_shape(self, name: str, label: str) -> tuple[int, ...]:
        """Return the shape of a part.

        Raises:
            ModelLoadError: It is missing.
        """
        if label not in self._parts[name]:
            raise self._fault(
                name, f"{label or 'the weight itself'} is missing beside {', '.join(self._parts[name].values())}"
            )
        return self._files.shape(self._parts[name][label])

    def _need_dtypes(self, name: str, expected: Mapping[str, Collection[torch.dtype]]) -> None:
        """Check data types of parts.

        Raises:
            ModelLoadError: One is another, or missing.
        """
        for label, dtypes in expected.items():
            self._part_shape(name, label)
            found = self._files.dtype(self._parts[name][label])
            if found not in dtypes:
                wanted = " or ".join(map(_dtype_name, dtypes))
                raise self._fault(
                    name, f"{self._parts[name][label]} has the data type {_dtype_name(found)}, not {wanted}"
                )

    def _need_shapes(self, name: str, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Check shapes of parts.

        Raises:
            ModelLoadError: One is another, or missing.
        """
        for label, shape in expected.items():
            found = self._part_shape(name, label)
            if found != shape:
                raise self._fault(name, f"{self._parts[name][label]} has the shape {list(found)}, not {list(shape)}")

    def _fault(self, name: str, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: {name} ({self.method}): {reason}.", hint=DAMAGED)

    def _refusal(self, key: str, value: object, served: str) -> ModelLoadError:
        """Return the error for a value of the table that is not served."""
        return ModelLoadError(
            f"{self._path}: quantization_config has {key} = {value!r}; of {self.method} {served} is served.",
            hint="Take a checkpoint of the same model in another format: docs/do/quantised.md lists what is read.",
        )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
