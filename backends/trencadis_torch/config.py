"""Config table of the backend ``torch``; no torch here, the command line reads it."""

from __future__ import annotations

import re

import attrs
from attrs.validators import ge, in_

from trencadis.errors import ConfigValueError
from trencadis.interfaces import setting
from trencadis_torch.instruction_sets import AUTO, NAMES

__all__ = [
    "ATTENTIONS",
    "COMPILES",
    "EXPERT_PLACEMENTS",
    "GRAPHS",
    "KV_DTYPES",
    "LAYOUTS",
    "PACKS",
    "QUANTIZATIONS",
    "TorchConfig",
]

LAYOUTS = ("ragged", "padded")
"""``ragged``: flat tokens, nothing padded. ``padded``: static shapes, one per bucket."""

ATTENTIONS = ("auto", "native", "sdpa", "triton")
"""``native``: the CPU's own kernel over the paged cache. ``triton``: the same for CUDA. ``sdpa``: blocks are gathered for PyTorch's.
``auto``: what there is."""

KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "int8")

GRAPHS = ("off", "buckets", "checked")
"""``buckets``: every decode bucket is captured as a CUDA graph at the warm-up. ``checked``: the same on a CPU, to see whether it could be."""

PACKS = ("auto", "off")
"""``auto``: linear layers of a float32 model on the CPU are packed and fused, and norms, gates and rotations on CUDA are fused.
``off``: the model computes as transformers made it."""

COMPILES = ("off", "buckets")
"""``buckets``: the forward of every bucket becomes a graph of torch.compile at the warm-up; none is compiled later."""

EXPERT_PLACEMENTS = ("linear", "balanced")
"""``linear``: experts that follow each other are on one rank. ``balanced``: by measured loads, the busiest ones with copies."""

QUANTIZATIONS = ("none", "int8", "int4")
"""``int8``: weights with one scale per output, activations with one per row. ``int4``: both with one for each 32 inputs. On the CPU."""


def _check_device(_: object, __: attrs.Attribute[str], device: str) -> None:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
        raise ValueError('must be "auto", "cpu", "cuda" or "cuda:N" with the number of a device, such as "cuda:0".')


@attrs.frozen(kw_only=True)
class TorchConfig:
    """Table ``[backend.torch]``.

    Attributes:
        device: ``auto`` (the first CUDA device, else the CPU), ``cpu``, ``cuda`` or ``cuda:1``.
        layout: ``ragged`` or ``padded``.
        attention: ``auto``, ``native``, ``triton`` or ``sdpa``; ``native`` needs a CPU, the ragged layout and a C++ compiler, ``triton``
            a CUDA device.
        kv_dtype: How keys and values are held in the cache; ``auto`` is the model's dtype.
        max_prefill_batch_size: Most sequences in one padded prefill pass.
        num_threads: Threads of one operation on the CPU; 0: one for a small model, else PyTorch's choice, divided among ranks and replicas.
        instructions: The best set of instructions that the CPU's own kernels may use: ``auto`` (all that the CPU has), or a name of
            :mod:`trencadis_torch.instruction_sets`. PyTorch's own kernels follow ``ATEN_CPU_CAPABILITY``. One for a process.
        prefault_cache: Write to all memory of the KV cache at the start, on the CPU. Else the system gives pages of it when a step writes
            there for the first time, which such a step waits for.
        check_model: Compare the paged forward with the model's own after loading, and refuse the model if they differ; of an
            encoder, compare padded texts with bare ones.
        pack: ``auto`` or ``off``.
        quantization: ``none``, ``int8`` or ``int4``.
        compile: ``off`` or ``buckets``; ``buckets`` needs the CPU, ``layout = "padded"`` and a C++ compiler.
        compile_cache: Where compiled graphs are kept between starts; empty: ``TORCHINDUCTOR_CACHE_DIR``, else
            ``~/.cache/trencadis/inductor``.
        graphs: ``off``, ``buckets`` or ``checked``; graphs need ``layout = "padded"``.
        tensor_plan: How layers are divided over ranks where transformers brings no plan, or another one.
        expert_placement: Which rank has which whole experts: ``linear`` or ``balanced``.
        expert_loads: Measured loads of experts, for ``balanced``.
        redundant_experts: Copies of a layer's experts beyond one of each, for ``balanced``.
    """

    device: str = setting(
        "auto",
        "auto (the first CUDA device, else the CPU), cpu, cuda or cuda:N.",
        validator=_check_device,
    )
    layout: str = setting("ragged", "ragged: nothing padded; padded: static shapes.", validator=in_(LAYOUTS))
    attention: str = setting(
        "auto",
        "native: the CPU's own kernel, compiled when first needed; triton: the same for CUDA; sdpa: gathered blocks; auto: the device's "
        "kernel if it can be had.",
        validator=in_(ATTENTIONS),
    )
    kv_dtype: str = setting(
        "auto",
        "Of keys and values in the cache: auto (the model's), float32, float16, bfloat16 or int8.",
        validator=in_(KV_DTYPES),
    )
    max_prefill_batch_size: int = setting(
        1, "Most sequences in one padded prefill pass.", unit="sequences", validator=ge(1)
    )
    num_threads: int = setting(
        0,
        "Threads of one operation on the CPU; 0: one for a small model, else PyTorch's choice, divided among ranks and replicas.",
        unit="threads",
        validator=ge(0),
    )
    instructions: str = setting(
        AUTO,
        "The best set that the CPU's own kernels may use, to test or measure another CPU's code: auto is what the CPU has.",
        validator=in_((AUTO, *NAMES)),
    )
    prefault_cache: bool = setting(
        False,
        "Write to all memory of the KV cache at the start, on the CPU, so that no step waits for the system to give pages of it.",
    )
    check_model: bool = setting(True, "Compare the paged forward with the model's own after loading.")
    pack: str = setting(
        "auto",
        "auto: pack linear layers of a float32 model on the CPU once, and fuse what is around them; on CUDA fuse alone; off: compute as transformers.",
        validator=in_(PACKS),
    )
    quantization: str = setting(
        "none",
        "int8: hold weights in 8 bits with a scale per output, and round activations to 8 bits row by row; int4: weights in 4 bits, both "
        "with a scale for each 32 inputs; on the CPU.",
        validator=in_(QUANTIZATIONS),
    )
    compile: str = setting(
        "off",
        'buckets: compile the forward of every bucket at the warm-up, and nothing later; on the CPU, with layout = "padded".',
        validator=in_(COMPILES),
    )
    compile_cache: str = setting(
        "",
        "Directory that keeps compiled graphs between starts; empty: TORCHINDUCTOR_CACHE_DIR, else ~/.cache/trencadis/inductor.",
    )
    graphs: str = setting(
        "off",
        "buckets: capture a CUDA graph for every decode bucket at the warm-up; checked: the same on a CPU, where what CUDA could not "
        "replay is an error.",
        validator=in_(GRAPHS),
    )

    tensor_plan: str = setting(
        "",
        "TOML or JSON file that says how layers are divided over ranks, before the plan of transformers; empty: that plan.",
    )

    expert_placement: str = setting(
        "linear",
        "Which rank has which whole experts: linear (those that follow each other on one rank) or balanced (by expert_loads).",
        validator=in_(EXPERT_PLACEMENTS),
    )
    expert_loads: str = setting(
        "",
        'JSON file with measured loads of experts, as "trencadis expert-loads" writes it; for expert_placement = "balanced".',
    )
    redundant_experts: int = setting(
        0,
        'Copies of each layer\'s experts beyond one of each, given to the busiest; for expert_placement = "balanced".',
        unit="experts",
        validator=ge(0),
    )

    def check(self) -> None:
        """See that keys go together.

        Raises:
            ConfigValueError: They do not.
        """
        self._check_experts()
        if self.compile != "off" and self.graphs != "off":
            raise ConfigValueError(
                f'[backend.torch] compile = "{self.compile}" with graphs = "{self.graphs}": a bucket is compiled (CPU) or captured '
                "(CUDA), not both.",
                hint='Set [backend.torch] graphs = "off" on the CPU, or compile = "off" on CUDA.',
            )
        for key, value in (("compile", self.compile), ("graphs", self.graphs)):
            if value != "off" and self.layout != "padded":
                raise ConfigValueError(
                    f'[backend.torch] {key} = "{value}": graphs have static shapes, and layout = "{self.layout}" has not.',
                    hint=f'Set [backend.torch] layout = "padded", or {key} = "off".',
                )
        if self.compile != "off" and self.attention == "triton":
            raise ConfigValueError(
                f'[backend.torch] compile = "{self.compile}" with attention = "triton": these graphs are for the CPU, the kernel for CUDA.',
                hint='Set [backend.torch] attention = "auto", or compile = "off".',
            )
        if self.graphs != "off" and self.quantization != "none":
            raise ConfigValueError(
                f'[backend.torch] graphs = "{self.graphs}" with quantization = "{self.quantization}": these layers are for the CPU, '
                "outside of graphs.",
                hint='Set [backend.torch] quantization = "none", or graphs = "off".',
            )

    def _check_experts(self) -> None:
        is_balanced = self.expert_placement == "balanced"
        if is_balanced and not self.expert_loads:
            raise ConfigValueError(
                '[backend.torch] expert_placement = "balanced" without expert_loads: nothing says which experts have more to do.',
                hint='Measure with expert_placement = "linear", write a file with "trencadis expert-loads", and name it in expert_loads.',
            )
        for key, value in (("expert_loads", self.expert_loads), ("redundant_experts", self.redundant_experts)):
            if value and not is_balanced:
                raise ConfigValueError(
                    f'[backend.torch] {key} = {value!r} with expert_placement = "{self.expert_placement}": it says how experts are balanced.',
                    hint=f'Set [backend.torch] expert_placement = "balanced", or leave {key} out.',
                )
