"""compressed-tensors: int8, packed int4, FP8, NVFP4, MXFP4 and MXFP8 by groups of layers, as LLM Compressor writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Final

import attrs
import torch

from trencadis_torch.linear.formats.quantised import FLOATS, WHOLE, QuantisedSource
from trencadis_torch.linear.formats.unpacking import (
    float8_scales,
    float8_weight,
    fp4_groups,
    integer_groups,
    packed_integers,
    powers_of_two,
)
from trencadis_torch.linear.held import ChannelWeight, Float8Weight, HeldWeight

__all__ = ["CompressedTensorsSource"]

_FORMATS: Final = frozenset(
    {
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "pack-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
        "mxfp8-quantized",
        "mixed-precision",
    }
)
_LABELS: Final = ("packed", "scale", "zero_point", "g_idx", "shape", "global_scale")
_OF_ACTIVATIONS: Final = re.compile(r"(.*\.)?(input|output|q|k|v)_(scale|zero_point|global_scale)")
_OF_INTS: Final = ("tensor", "channel", "group")
_ANY_LINEAR: Final = frozenset({"Linear", "LinearBase"})
_KINDS: Final = {
    ("int", 4): "int4",
    ("int", 8): "int8",
    ("float", 8): "FP8",
    ("float", 4): "FP4",
}


@attrs.frozen
class _Scheme:
    """How the weights of one group of layers are quantised.

    Attributes:
        targets: Names of modules, ``re:`` patterns of them, or names of classes.
        kind: Kind of values, one of :data:`_KINDS`.
        strategy: ``tensor``, ``channel``, ``group``, ``tensor_group`` or ``block``.
        group: Inputs of a group; 0: no groups.
        block: Outputs and inputs of a block.
        is_symmetric: There are no zeros.
    """

    targets: tuple[str, ...]
    kind: str
    strategy: str
    group: int
    block: tuple[int, int] | None
    is_symmetric: bool

    @property
    def words(self) -> str:
        """Kind and scales."""
        groups = f" in groups of {self.group}" if self.group else f" by {self.strategy}"
        return self.kind + (f" in blocks of {self.block[0]} x {self.block[1]}" if self.block else groups)


class CompressedTensorsSource(QuantisedSource):
    """A checkpoint of LLM Compressor; integers are exact in the form in which they are held.

    * int: ``weight = scale · (value - zero)``, values plus half their range in int32 words along inputs (zeros: along outputs) if packed.
    * FP8: ``weight = scale · value``.
    * NVFP4: ``weight = e2m1 · (scale / global_scale)``; MXFP4: ``e2m1 · 2 ** (scale - 127)``; both held as places in a table of 16 levels.

    Scales of activations and of the KV cache are not used: neither is rounded by them.

    Source: compressed-tensors 0.20, compressors/pack_quantized, compressors/nvfp4, quantization/lifecycle/forward.py.
    """

    method: ClassVar[str] = "compressed-tensors"
    marks: ClassVar[tuple[str, ...]] = (".weight_packed", ".weight_scale")

    @classmethod
    def reads(cls, quantization: Mapping[str, Any]) -> bool:
        """Return whether this class reads a format: older tables name no method, but groups of layers."""
        return super().reads(quantization) or (
            quantization.get("quant_method") is None and "config_groups" in quantization
        )

    def _read_table(self, quantization: Mapping[str, Any]) -> None:
        found = str(quantization.get("format"))
        served = ", ".join(sorted(_FORMATS))
        if found not in _FORMATS:
            raise self._refusal("format", found, served)
        sparsity = (quantization.get("sparsity_config") or {}).get("format", "dense")
        if sparsity != "dense":
            raise self._refusal("sparsity_config.format", sparsity, '"dense"')
        if (quantization.get("transform_config") or {}).get("config_groups"):
            raise self._refusal("transform_config", quantization["transform_config"], "a checkpoint without transforms")
        groups = quantization.get("config_groups") or {}
        for name, group in groups.items():
            if group.get("format", found) not in (*_FORMATS, None):
                raise self._refusal(f"config_groups.{name}.format", group["format"], served)
        self._schemes = [
            self._scheme(name, group["targets"], group["weights"])
            for name, group in groups.items()
            if group.get("weights")
        ]
        if not self._schemes:
            raise self._refusal("config_groups", groups, "one with weights at least")
        self._ignored = tuple(quantization.get("ignore") or ())

    def _scheme(self, name: str, targets: Iterable[str], weights: Mapping[str, Any]) -> _Scheme:
        where, group = f"config_groups.{name}.weights", weights.get("group_size") or 0
        kind = _KINDS.get((str(weights.get("type", "int")), weights.get("num_bits", 8)))
        if kind is None:
            given = f"{weights.get('type', 'int')} of {weights.get('num_bits', 8)} bits"
            raise self._refusal(where, given, "int of 4 or 8 bits, float of 4 or 8 bits")
        strategy = weights.get("strategy") or ("group" if group > 0 else "channel" if group < 0 else "tensor")
        if kind == "FP4" and group not in (16, 32):
            raise self._refusal(f"{where}.group_size", group, "16 (NVFP4) or 32 (MXFP4)")
        if kind == "FP4":
            kind = "NVFP4" if group == 16 else "MXFP4"
        if kind == "FP8" and strategy == "group":
            kind, weights = "MXFP8", {**weights, "block_structure": [1, group]}
        allowed = {"int4": _OF_INTS, "int8": _OF_INTS, "FP8": ("tensor", "channel", "block"), "MXFP8": ("group",)}
        if strategy not in allowed.get(kind, ("group", "tensor_group")):
            raise self._refusal(
                f"{where}.strategy", strategy, f"for {kind} " + ", ".join(allowed.get(kind, ("group",)))
            )
        block = weights.get("block_structure")
        if isinstance(block, str):
            block = block.split("x")
        return _Scheme(
            targets=tuple(targets),
            kind=kind,
            strategy=strategy,
            group=group if strategy in ("group", "tensor_group") else 0,
            block=(int(block[0]), int(block[1])) if block else None,
            is_symmetric=bool(weights.get("symmetric", True)),
        )

    @property
    def format(self) -> str:
        """The format with its kinds of weights."""
        return ", ".join([self.method, *dict.fromkeys(scheme.words for scheme in self._schemes)])

    def _owner(self, stored: str) -> tuple[str, str] | None:
        if _OF_ACTIVATIONS.fullmatch(stored):
            return None
        for label in _LABELS:
            if stored.endswith(f".weight_{label}"):
                return stored.removesuffix(f"_{label}"), label
        return stored, WHOLE

    def _scheme_of(self, name: str) -> _Scheme:
        """Return a weight's scheme: of those that name its module, else of those for linear layers.

        Raises:
            ModelLoadError: There is none, or its module is among those that are not quantised.
        """
        module = name.removesuffix(".weight")
        if self._named(module, self._ignored):
            raise self._fault(name, "it is stored quantised, and quantization_config.ignore says that it is not")
        for scheme in self._schemes:
            if self._named(module, scheme.targets):
                return scheme
        for scheme in self._schemes:
            if _ANY_LINEAR.intersection(scheme.targets) or len(self._schemes) == 1:
                return scheme
        raise self._fault(name, "it is stored quantised, and no group of quantization_config.config_groups has it")

    def _named(self, module: str, targets: Iterable[str]) -> bool:
        for target in targets:
            try:
                if re.match(target[3:], module) if target.startswith("re:") else target == module:
                    return True
            except re.error as error:
                raise self._refusal("a pattern", target, f"a valid one ({error})") from error
        return False

    def _quantised_shape(self, name: str) -> tuple[int, ...]:
        scheme = self._scheme_of(name)
        if scheme.kind in ("NVFP4", "MXFP4"):
            return self._fp4_shape(name, scheme)
        if scheme.kind in ("FP8", "MXFP8"):
            shape = self._part_shape(name, WHOLE)
            self._need_dtypes(
                name, {WHOLE: [torch.float8_e4m3fn], "scale": [*FLOATS, torch.uint8, torch.float8_e8m0fnu]}
            )
            if len(shape) != 2 or float8_scales(self._part_shape(name, "scale"), *shape, scheme.block) is None:
                found = list(self._part_shape(name, "scale"))
                raise self._fault(name, f"its scales have the shape {found}, for {list(shape)}")
            return shape
        return self._integer_shape(name, scheme)

    def _fp4_shape(self, name: str, scheme: _Scheme) -> tuple[int, ...]:
        outputs, octets = self._part_shape(name, "packed")
        self._need_shapes(name, {"scale": (outputs, 2 * octets // scheme.group)})
        scales = [torch.float8_e4m3fn] if scheme.kind == "NVFP4" else [torch.uint8, torch.float8_e8m0fnu]
        self._need_dtypes(name, {"packed": [torch.uint8], "scale": scales})
        if scheme.kind == "NVFP4" and self._part_shape(name, "global_scale") not in ((), (1,)):
            raise self._fault(name, f"its global scale has the shape {list(self._part_shape(name, 'global_scale'))}")
        return outputs, 2 * octets

    def _integer_shape(self, name: str, scheme: _Scheme) -> tuple[int, ...]:
        bits = int(scheme.kind[-1])
        if self._has(name, "packed"):
            self._need_shapes(name, {"shape": (2,)})
            self._need_dtypes(name, {"packed": [torch.int32]})
            outputs, inputs = map(int, self._part(name, "shape").tolist())
            self._need_shapes(name, {"packed": (outputs, -(-inputs * bits // 32))})
        else:
            outputs, inputs = self._part_shape(name, WHOLE)
            self._need_dtypes(name, {WHOLE: [torch.int8]})
        groups = inputs // scheme.group if scheme.group else 1
        if groups * (scheme.group or inputs) != inputs:
            raise self._fault(name, f"its {inputs} inputs are no multiple of the group of {scheme.group}")
        self._need_dtypes(name, {"scale": FLOATS})
        scales = self._part_shape(name, "scale")
        if scales != (outputs, groups) and not (groups == 1 and scales in ((), (1,), (1, 1), (outputs,))):
            raise self._fault(name, f"its scales have the shape {list(scales)}, for {[outputs, inputs]}")
        if not scheme.is_symmetric:
            self._part_shape(name, "zero_point")
        if self._has(name, "g_idx"):
            self._need_shapes(name, {"g_idx": (inputs,)})
        return outputs, inputs

    def _quantised_weight(self, name: str) -> HeldWeight:
        scheme, scales = self._scheme_of(name), self._part(name, "scale")
        match scheme.kind:
            case "NVFP4":
                return fp4_groups(self._part(name, "packed"), scales.float() / self._part(name, "global_scale").float())
            case "MXFP4":
                return fp4_groups(self._part(name, "packed"), powers_of_two(scales))
            case "FP8" | "MXFP8":
                values, dtype = self._part(name, WHOLE), self._float8_dtype(scales)
                return float8_weight(values, scales, scheme.block, dtype)
        return self._integers(name, scheme, scales)

    def _quantised_tensor(self, name: str) -> torch.Tensor:
        weight = self._quantised_weight(name)
        dtype = self._float8_dtype(self._part(name, "scale"))
        return weight.dequantised().to(dtype) if isinstance(weight, Float8Weight) else super()._quantised_tensor(name)

    def _float8_dtype(self, scales: torch.Tensor) -> torch.dtype:
        return scales.dtype if scales.dtype in (torch.bfloat16, torch.float16) else self._dtype

    def _integers(self, name: str, scheme: _Scheme, scales: torch.Tensor) -> HeldWeight:
        (outputs, inputs), bits = self.shape(name), int(scheme.kind[-1])
        half = 1 << (bits - 1)
        groups = inputs // scheme.group if scheme.group else 1
        scales = scales.reshape(-1, groups).expand(outputs, groups)
        is_packed = self._has(name, "packed")
        if not is_packed and scheme.is_symmetric and groups == 1:
            return ChannelWeight(self._part(name, WHOLE), scales[:, 0].float().contiguous())
        if is_packed:
            values = packed_integers(self._part(name, "packed"), bits)[:, :inputs].contiguous()
        else:
            values = self._part(name, WHOLE).view(torch.uint8) ^ 0x80
        zeros = torch.full_like(scales, half, dtype=torch.float32)
        if not scheme.is_symmetric:
            zeros = self._zeros(name, bits, outputs, groups)
        index = self._part(name, "g_idx").long() if self._has(name, "g_idx") else None
        if index is not None and int(index.min()) < 0:
            index = None  # what older writers leave where there is no act-order
        if index is not None and int(index.max()) >= groups:
            raise self._fault(name, f"its g_idx names groups that are none of {groups}")
        return integer_groups(values, zeros, scales, bits=bits, index=index, dtype=self._dtype)

    def _zeros(self, name: str, bits: int, outputs: int, groups: int) -> torch.Tensor:
        """Return zeros plus half the range of values, ``[N, groups]``."""
        stored = self._part(name, "zero_point")
        if stored.dtype == torch.int32 and self._has(name, "packed"):
            if stored.shape != (-(-outputs * bits // 32), groups):
                raise self._fault(name, f"its zeros have the shape {list(stored.shape)}, for {outputs} outputs")
            return packed_integers(stored.T, bits).T[:outputs]
        if stored.numel() not in (1, outputs * groups):
            raise self._fault(name, f"its zeros have the shape {list(stored.shape)}, for {outputs} outputs")
        return stored.reshape(-1, groups).expand(outputs, groups).float() + (1 << (bits - 1))
