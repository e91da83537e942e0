"""Checkpoints in published formats of quantised weights, packed value by value by the formats' public formulas.

Nothing here uses the unpackers that it tests: a packer is a plain loop over values, and what it returns beside the stored tensors is the
weight by the format's formula, one multiplication a value.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from trencadis_torch.linear.formats.mapped import MappedTensors, weight_files

Stored = dict[str, torch.Tensor]
"""What is stored of a weight, by what is put after the name of its module."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ, awq/modules/linear/gemm.py: ``order_map``."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""OCP Microscaling Formats (MX) Specification 1.0, table 5."""

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""QLoRA (arXiv 2305.14314), appendix E."""

FP4 = tuple(value / 12 for value in (0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3))
"""bitsandbytes, functional.py: ``get_4bit_type("fp4")``."""


def rounded(
    weight: torch.Tensor, group: int, bits: int, *, symmetric: bool = False, dtype: torch.dtype = torch.float16
) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
    """Return values ``[N, K]``, zeros ``[N, G]`` and scales ``[N, G]`` of a weight, to the nearest; values and zeros from 0."""
    top = 2**bits - 1
    grouped = weight.float().unflatten(1, (-1, group))
    if symmetric:
        scales = (grouped.abs().amax(2) / (top // 2)).clamp(min=1e-4).to(dtype)
        zeros = torch.full(scales.shape, (top + 1) // 2)
    else:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scales = ((high - low) / top).clamp(min=1e-4).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, top).int()
    values = (grouped / scales.float()[..., None] + zeros[..., None]).round().clamp(0, top).flatten(1)
    return values.int().numpy(), zeros.int().numpy(), scales


def pack(values: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return int32 words of values along the last axis; ``order`` says which value of a word each place has, lowest bits first."""
    per = 32 // bits
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns // per)), dtype=np.uint32)
    for row in range(rows):
        for column in range(columns):
            place = column % per if order is None else order.index(column % per)
            words[row, column // per] |= np.uint32(int(values[row, column]) << (bits * place))
    return torch.from_numpy(words.view(np.int32).copy())


def by_formula(values: np.ndarray, zeros: np.ndarray, scales: torch.Tensor, index: np.ndarray) -> torch.Tensor:
    """Return ``scale · (value - zero)``, value by value, float32."""
    floats = scales.float().numpy()
    made = np.empty(values.shape, dtype=np.float32)
    for row in range(values.shape[0]):
        for column in range(values.shape[1]):
            group = index[column]
            made[row, column] = floats[row, group] * np.float32(int(values[row, column]) - int(zeros[row, group]))
    return torch.from_numpy(made)


def _groups(inputs: int, group: int) -> np.ndarray:
    return np.arange(inputs) // group


def awq(weight: torch.Tensor, *, group: int = 16, dtype: torch.dtype = torch.float16) -> tuple[Stored, torch.Tensor]:
    """Return what AutoAWQ's layout ``gemm`` stores: awq/modules/linear/gemm.py, ``WQLinear_GEMM.from_linear``."""
    group = weight.shape[1] if group < 0 else group
    values, zeros, scales = rounded(weight, group, 4, dtype=dtype)
    stored = {
        ".qweight": pack(values.T, 4, AWQ_ORDER),
        ".qzeros": pack(zeros.T, 4, AWQ_ORDER),
        ".scales": scales.T.contiguous(),
    }
    return stored, by_formula(values, zeros, scales, _groups(weight.shape[1], group))


def gptq(
    weight: torch.Tensor,
    *,
    group: int = 16,
    bits: int = 4,
    v2: bool = False,
    order: torch.Tensor | None = None,
    index: bool = True,
    dtype: torch.dtype = torch.float16,
) -> tuple[Stored, torch.Tensor]:
    """Return what AutoGPTQ and GPTQModel store: auto_gptq/nn_modules/qlinear/qlinear_cuda.py, ``pack``."""
    inputs = weight.shape[1]
    group = inputs if group < 0 else group
    order = torch.arange(inputs) if order is None else order
    ordered, zeros, scales = rounded(weight[:, order], group, bits, dtype=dtype)
    values, groups = np.empty_like(ordered), np.empty(inputs, dtype=np.int32)
    values[:, order.numpy()], groups[order.numpy()] = ordered, _groups(inputs, group)
    words = pack(zeros.T, bits)
    if not v2:
        ones = sum(1 << shift for shift in range(0, 32, bits))
        words = ((words.long() - ones) & 0xFFFFFFFF).to(torch.int64)
        words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    stored = {".qweight": pack(values, bits).T.contiguous(), ".qzeros": words, ".scales": scales.T.contiguous()}
    if index:
        stored[".g_idx"] = torch.from_numpy(groups)
    return stored, by_formula(values, zeros, scales, groups)


def compressed_ints(
    weight: torch.Tensor,
    *,
    group: int = 16,
    bits: int = 4,
    packed: bool = True,
    symmetric: bool = True,
    order: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Stored, torch.Tensor]:
    """Return what compressed-tensors stores of integers: compressors/pack_quantized/helpers.py, ``pack_to_int32``."""
    outputs, inputs = weight.shape
    group = inputs if group < 0 else group
    order = torch.arange(inputs) if order is None else order
    ordered, zeros, scales = rounded(weight[:, order], group, bits, symmetric=symmetric, dtype=dtype)
    values, groups = np.empty_like(ordered), np.empty(inputs, dtype=np.int32)
    values[:, order.numpy()], groups[order.numpy()] = ordered, _groups(inputs, group)
    half = 1 << (bits - 1)
    stored = {".weight_scale": scales}
    if packed:
        stored |= {".weight_packed": pack(values, bits), ".weight_shape": torch.tensor([outputs, inputs])}
    else:
        stored[".weight"] = torch.from_numpy(values - half).to(torch.int8)
    if not symmetric:
        as_int8 = torch.from_numpy(zeros - half).to(torch.int8)
        stored[".weight_zero_point"] = pack(zeros.T, bits).T.contiguous() if packed else as_int8
    if not torch.equal(order, torch.arange(inputs)):
        stored[".weight_g_idx"] = torch.from_numpy(groups)
    return stored, by_formula(values, zeros, scales, groups)


def fp8(
    weight: torch.Tensor,
    *,
    block: tuple[int, int] | None = (16, 32),
    scales: str = "block",
    suffix: str = ".weight_scale_inv",
    dtype: torch.dtype = torch.float32,
    held: torch.dtype = torch.bfloat16,
    kind: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Stored, torch.Tensor]:
    """Return what DeepSeek's checkpoints store: inference/kernel.py, ``weight_dequant_kernel``; also scales by output or matrix."""
    outputs, inputs = weight.shape
    height, width = {"block": block, "channel": (1, inputs), "tensor": (outputs, inputs)}[scales] or (1, 1)
    shape = (-(-outputs // height), -(-inputs // width))
    factors = torch.empty(shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            part = weight[row * height : (row + 1) * height, column * width : (column + 1) * width]
            factors[row, column] = part.abs().max().clamp(min=1e-4) / torch.finfo(kind).max
    if dtype == torch.uint8:
        exponents = factors.log2().ceil() + 127
        kept, factors = exponents.to(torch.uint8), torch.exp2((exponents - 127).double()).float()
    else:
        kept = factors.to(dtype)
        factors = kept.float()
    values, made = torch.empty(outputs, inputs, dtype=kind), torch.empty(outputs, inputs)
    for row in range(outputs):
        for column in range(inputs):
            factor = factors[row // height, column // width]
            values[row, column] = (weight[row, column] / factor).to(kind)
            made[row, column] = values[row, column].float() * factor
    kept = kept.reshape(()) if scales == "tensor" else kept
    return {".weight": values, suffix: kept}, made.to(held).float()


def _nearest_e2m1(value: float) -> int:
    return min(range(16), key=lambda bits: abs(E2M1[bits] - value))


def compressed_fp4(weight: torch.Tensor, *, kind: str = "nvfp4") -> tuple[Stored, torch.Tensor]:
    """Return what compressed-tensors stores of NVFP4 and MXFP4: compressors/nvfp4/base.py and helpers.py."""
    outputs, inputs = weight.shape
    group = 16 if kind == "nvfp4" else 32
    largest = weight.unflatten(1, (-1, group)).abs().amax(2).clamp(min=1e-4) / 6
    stored: Stored = {}
    if kind == "nvfp4":
        overall = (448 / largest.max()).reshape(1)
        kept = (largest * overall).to(torch.float8_e4m3fn)
        factors = kept.float() / overall
        stored[".weight_global_scale"] = overall
    else:
        kept = (largest.log2().ceil() + 127).to(torch.uint8)
        factors = torch.tensor([[2.0 ** (int(byte) - 127) for byte in row] for row in kept])
    octets, made = np.zeros((outputs, inputs // 2), dtype=np.uint8), torch.empty(outputs, inputs)
    for row in range(outputs):
        for column in range(inputs):
            factor = factors[row, column // group]
            bits = _nearest_e2m1(float(weight[row, column] / factor))
            octets[row, column // 2] |= np.uint8(bits << (4 * (column % 2)))
            made[row, column] = torch.tensor(E2M1[bits]) * factor
    stored |= {".weight_packed": torch.from_numpy(octets), ".weight_scale": kept}
    return stored, made


def mxfp4_experts(weights: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Return what gpt-oss stores of stacked matrices ``[E, K, N]``: gpt_oss/torch/weights.py, ``_get_mxfp4_tensor``."""
    blocks, scales, made = [], [], []
    for expert in weights:
        stored, weight = compressed_fp4(expert.T, kind="mxfp4")
        blocks.append(stored[".weight_packed"].unflatten(1, (-1, 16)))
        scales.append(stored[".weight_scale"])
        made.append(weight.T)
    return {"_blocks": torch.stack(blocks), "_scales": torch.stack(scales)}, torch.stack(made)


def bitsandbytes(
    weight: torch.Tensor,
    *,
    kind: str = "nf4",
    double: bool = False,
    block: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    storage: torch.dtype = torch.uint8,
) -> tuple[Stored, torch.Tensor]:
    """Return what bitsandbytes stores of 4 bit: functional.py, ``quantize_4bit`` and ``QuantState.as_dict(packed=True)``."""
    levels = torch.tensor(NF4 if kind == "nf4" else FP4)
    flat = weight.flatten()
    largest = torch.stack([part.abs().max().clamp(min=1e-4) for part in flat.split(block)])
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": str(dtype)[6:],
        "shape": list(weight.shape),
    }
    stored = {".weight.absmax": largest, ".weight.quant_map": levels}
    if double:
        offset, nested = float(largest.mean()), torch.sort(torch.linspace(-1, 1, 256) ** 3).values
        rest = largest - offset
        outer = torch.stack([part.abs().max().clamp(min=1e-4) for part in rest.split(256)])
        octets = torch.tensor([int((nested - rest[i] / outer[i // 256]).abs().argmin()) for i in range(len(rest))])
        largest = torch.stack([nested[octets[i]] * outer[i // 256] + offset for i in range(len(rest))])
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        stored |= {".weight.absmax": octets.to(torch.uint8)}
        stored |= {".weight.nested_absmax": outer, ".weight.nested_quant_map": nested}
    packed, made = np.zeros(-(-len(flat) // 2), dtype=np.uint8), torch.empty(len(flat))
    for at, value in enumerate(flat):
        bits = int((levels - value / largest[at // block]).abs().argmin())
        packed[at // 2] |= np.uint8(bits << (0 if at % 2 else 4))
        made[at] = levels[bits] * largest[at // block]
    stored[".weight"] = torch.from_numpy(packed).view(storage).reshape(-1, 1)
    text = json.dumps(state).encode()
    stored[f".weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    return stored, made.view(weight.shape).to(dtype).float()


def int8_of_bitsandbytes(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """Return what bitsandbytes stores of LLM.int8: nn/modules.py, ``Int8Params``."""
    largest = weight.abs().amax(1)
    values = (weight / largest[:, None] * 127).round().to(torch.int8)
    stored = {".weight": values, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, values.float() * (largest / 127)[:, None]


@attrs.frozen(kw_only=True)
class Format:
    """A format, as a checkpoint is written in it."""

    table: Mapping[str, Any]
    write: Callable[[torch.Tensor], tuple[Stored, torch.Tensor]]


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_GROUPS_OF_16 = {"strategy": "group", "group_size": 16}

FORMATS: Mapping[str, Format] = {
    "awq": Format(
        table={"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}, write=awq
    ),
    "gptq": Format(table={"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}, write=gptq),
    "gptq_v2": Format(
        table={"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        write=lambda weight: gptq(weight, group=-1, bits=8, v2=True),
    ),
    "gptq_act_order": Format(
        table={"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
        write=lambda weight: gptq(weight, order=_shuffled(weight.shape[1])),
    ),
    "fp8": Format(
        table={"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]},
        write=lambda weight: fp8(weight, held=torch.float32),
    ),
    "compressed_int4": Format(
        table=_compressed("pack-quantized", num_bits=4, symmetric=False, **_GROUPS_OF_16),
        write=lambda weight: compressed_ints(weight, symmetric=False),
    ),
    "compressed_int8": Format(
        table=_compressed("int-quantized", strategy="channel"),
        write=lambda weight: compressed_ints(weight, group=-1, bits=8, packed=False),
    ),
    "compressed_fp8": Format(
        table=_compressed("float-quantized", type="float", strategy="channel"),
        write=lambda weight: fp8(
            weight, scales="channel", suffix=".weight_scale", dtype=torch.bfloat16, held=torch.float32
        ),
    ),
    "compressed_nvfp4": Format(
        table=_compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        write=compressed_fp4,
    ),
    "bitsandbytes_nf4": Format(
        table={"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        write=lambda weight: bitsandbytes(weight, double=True),
    ),
}


def _shuffled(size: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(size))


def quantise_checkpoint(plain: Path, form: Format, quantised: Path, reference: Path) -> None:
    """Write a checkpoint of floats once quantised and once with the weights that this stands for, in float32."""
    tensors = load_file(plain / "model.safetensors")
    stored, floats = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if form.table["quant_method"] == "mxfp4":
            if weight.dim() == 3 and name.endswith("_proj"):
                parts, floats[name] = form.write(weight)
                stored.update({name + suffix: part for suffix, part in parts.items()})
                del stored[name]
        elif "_proj.weight" in name or (".experts." in name and weight.dim() == 2):
            parts, floats[name] = form.write(weight)
            del stored[name]
            stored.update({name.removesuffix(".weight") + suffix: part for suffix, part in parts.items()})
    for path, found in ((quantised, stored), (reference, floats)):
        shutil.copytree(plain, path)
        save_file({name: one.contiguous() for name, one in found.items()}, path / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": form.table}))


def mapped(path: Path, tensors: Stored) -> MappedTensors:
    """Return tensors as a file of them is read."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    return MappedTensors(weight_files(str(path)))
