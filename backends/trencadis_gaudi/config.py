"""Config table of the backend ``gaudi``, without torch, since the command line reads it.

The environment names beside the keys are those of the vLLM plugin for Gaudi and of the Gaudi software.
Source: vllm-gaudi, extension/config.py, features.py and runtime.py; the graph budget, vllm-fork v0.5.3.post1-Gaudi-1.17.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
from attrs.validators import and_, deep_iterable, ge, gt, in_, le, lt

from trencadis.errors import ConfigValueError, must_be_one_of
from trencadis.interfaces import setting
from trencadis_gaudi.fp8.methods import DYNAMIC, METHODS, STATIC, ScaleMethod, read_quant_config

__all__ = ["BLOCK_SIZES", "DEFAULT_BLOCK_SIZE", "MODES", "GaudiConfig"]

MODES = ("auto", "compile", "lazy", "eager")
"""``auto``: the default of the Gaudi software's release. ``compile``: torch.compile. ``lazy``: operations are gathered, and HPU graphs
replayed; the only mode of old releases. ``eager``: one operation at a time, for debugging."""

DEFAULT_BLOCK_SIZE = 128
_TRUE = frozenset({"true", "t", "1", "yes", "y", "on"})
_FALSE = frozenset({"false", "f", "0", "no", "n", "off"})
BLOCK_SIZES = (16, 128, 528, 768)
"""Tokens per block that the attention kernels support."""


def _lazy_or_compile(text: str) -> str:
    if text not in {"0", "1"}:
        raise ValueError("must be 0 or 1.")
    return "lazy" if text == "1" else "compile"


def _truth(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError("must be true or false (also: yes, no, on, off, 1, 0).")
    return word in _TRUE


def _unified_or_padded(text: str) -> str:
    return "unified" if _truth(text) else "padded"


def _contiguous_without_sharing(text: str) -> Any:
    """Return True without prefix caching, when the vendor's plugin reads by range. Source: vllm-gaudi, extension/features.py."""
    return attrs.NOTHING if _truth(text) else True


def _on_or_off(text: str) -> str:
    return "on" if _truth(text) else "off"


def _check_pattern(_: object, __: Any, pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"fp8_exclude: {pattern!r} is no pattern: {error}.") from error


def _logs_passes(text: str) -> Any:
    return "fwd" in text.split(",") or attrs.NOTHING


def _logs_moves(text: str) -> Any:
    return "defrag" in text.split(",") or attrs.NOTHING


def _strategy(text: str) -> str:
    names = {"exp": "exponential", "lin": "linear", "pad": "padding_aware"}
    if text not in names:
        raise ValueError(must_be_one_of(text, names))
    return names[text]


_OTHER_ALIASES: Mapping[str, Mapping[str, Callable[[str], Any] | None]] = {
    "bucketing.name": {
        "VLLM_ENABLE_BUCKETING": lambda text: attrs.NOTHING if _truth(text) else "exact",
        "VLLM_BUCKETING_FROM_FILE": lambda _: "from_file",
        "VLLM_EXPONENTIAL_BUCKETING": lambda text: "exponential" if _truth(text) else "linear",
        "VLLM_BUCKETING_STRATEGY": _strategy,
    },
    "engine.warmup": {"VLLM_SKIP_WARMUP": lambda text: not _truth(text)},
    "defragmenter.enabled": {"VLLM_DEFRAG": _on_or_off},
    "defragmenter.threshold": {"VLLM_DEFRAG_THRESHOLD": None},
    "defragmenter.log_moves": {"VLLM_DEBUG": _logs_moves},
    "cache.prefix_caching": {"VLLM_PREFIX_CACHING": _truth},
    "log.level": {
        "VLLM_LOGGING_LEVEL": lambda text: {"critical": "error", "warn": "warning"}.get(text.lower(), text.lower())
    },
}
"""Names for settings of other tables, read whichever backend is chosen."""


@attrs.frozen(kw_only=True)
class GaudiConfig:
    """Table ``[backend.gaudi]``.

    Attributes:
        other_aliases: Environment names for settings of other tables.
        alias_families: Patterns of environment names with what they stand for.
    """

    other_aliases: ClassVar = _OTHER_ALIASES
    alias_families: ClassVar = {r"VLLM_(PROMPT|DECODE)_\w+_BUCKET_\w+": "bucket size"}

    device: str = setting(
        "hpu", "hpu: a Gaudi; emulated: a CPU that behaves like one.", validator=in_(["hpu", "emulated"])
    )
    mode: str = setting(
        "auto",
        "compile: torch.compile; lazy: HPU graphs; eager: neither; auto: compile, or lazy for releases up to 1.19.",
        validator=in_(MODES),
        aliases={"PT_HPU_LAZY_MODE": _lazy_or_compile},
    )
    any_version: bool = setting(False, "Use a version of the Gaudi software that this backend was not written for.")
    check_model: bool = setting(
        True, "Compare the paged forward with the model's own on the CPU before it goes to the device."
    )

    memory_utilization: float = setting(
        0.9,
        "Share of the free memory that graphs and KV cache may take; the rest is a margin for peaks.",
        validator=[gt(0), le(1)],
    )
    graph_reserve: float = setting(
        0.1,
        "Share of the usable memory kept for graphs; 0 is used in eager mode.",
        validator=and_(ge(0), lt(1)),
        aliases="VLLM_GRAPH_RESERVED_MEM",
    )

    layout: str = setting(
        "padded",
        "padded: prefill passes, then one decode pass; unified: one pass of both, which takes the bucketing unified.",
        validator=in_(["padded", "unified"]),
        aliases={"VLLM_UNIFIED_ATTN": _unified_or_padded},
    )
    contiguous: bool = setting(
        False,
        "Decode passes read KV blocks by range instead of gathering them by id.",
        aliases={"VLLM_CONTIGUOUS_PA": None, "VLLM_PREFIX_CACHING": _contiguous_without_sharing},
    )
    max_prefill_batch_size: int = setting(
        1, "Most prompts in one prefill pass.", unit="sequences", validator=ge(1), aliases="VLLM_PROMPT_BS_BUCKET_MAX"
    )
    merged_prefill: bool = setting(
        False,
        "Prompts of one prefill pass follow each other in one row instead of being padded to the longest.",
        aliases="VLLM_MERGED_PREFILL",
    )
    fused_sdpa: bool = setting(
        True, "Use the vendor's fused attention in prefills where it can.", aliases="VLLM_PROMPT_USE_FUSEDSDPA"
    )
    fused_kernels: bool = setting(
        True, "Use the vendor's fused norms, rotary embeddings and experts where they compute what the model does."
    )
    mark_layers: int = setting(
        1,
        "Decoder layers between two calls of mark_step, in lazy mode; 0: none within a forward.",
        unit="layers",
        validator=ge(0),
        aliases="VLLM_CONFIG_HIDDEN_LAYERS",
    )

    fp8: str = setting(
        "off",
        "Linear layers in fp8, except the output layer and routers. static: scales of fp8_measurements; dynamic: of each token; "
        "inc: as quant_config says; off.",
        validator=in_(["off", "dynamic", "static", "inc"]),
    )
    fp8_scale_method: str = setting(
        "auto",
        "How scales are rounded, as Intel Neural Compressor names it; auto: maxabs_hw, or maxabs_pcs_pow2 for dynamic scales.",
        validator=in_(METHODS),
    )
    fp8_measurements: str = setting(
        "",
        "Measurement file of Intel Neural Compressor, .json or .npz, or its dump_stats_path; for static scales and those of the KV cache.",
    )
    fp8_exclude: tuple[str, ...] = setting(
        None,
        "Patterns that are searched for in the names of linear layers, which then stay as they are.",
        factory=tuple,
        validator=deep_iterable(_check_pattern),
    )
    quant_config: str = setting(
        "",
        'Configuration of Intel Neural Compressor, a JSON file; read for fp8 = "inc", in the place of the four keys before it.',
        aliases="QUANT_CONFIG",
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Keys and values in the cache: auto (the model's dtype) or fp8, with the scales of fp8_measurements or 1.",
        validator=in_(["auto", "fp8"]),
    )

    capture: str = setting(
        "capture_all",
        "capture_all: every bucket becomes a graph; budgeted: as many as graph_reserve pays for. Lazy mode.",
        validator=in_(["capture_all", "budgeted"]),
    )
    prompt_ratio: float = setting(
        0.3,
        "Share of the graph budget that prefills have at first.",
        validator=[ge(0), le(1)],
        aliases="VLLM_GRAPH_PROMPT_RATIO",
    )
    prompt_order: str = setting(
        "min_tokens",
        "Which prefill buckets are captured first: of the fewest tokens, or of the largest batch.",
        validator=in_(["min_tokens", "max_bs"]),
        aliases="VLLM_GRAPH_PROMPT_STRATEGY",
    )
    decode_order: str = setting(
        "max_bs",
        "The same for decode buckets.",
        validator=in_(["min_tokens", "max_bs"]),
        aliases="VLLM_GRAPH_DECODE_STRATEGY",
    )
    on_memory_shortage: str = setting(
        "skip",
        "skip: buckets whose graphs do not fit run without; fail: stop with an error. Skipping captures the smallest first.",
        validator=in_(["skip", "fail"]),
    )

    compile_only: bool = setting(True, "Compile during the warm-up without running what was compiled.")
    hot_replay: bool = setting(True, "Run the smallest, a middling and the largest bucket once more after the warm-up.")
    warmup_required: int = setting(
        0,
        "Buckets prepared before the first request: those that cover all others, then the largest; the rest follows. 0: all.",
        unit="buckets",
        validator=ge(0),
    )
    warmup_quiet_s: float = setting(
        0.5, "How long no step must have run before the rest of the buckets is prepared.", unit="s", validator=ge(0)
    )
    warmup_step_s: float = setting(
        0.0,
        "Time that a step gives to the rest of the buckets, saved up until it pays for one; 0: none.",
        unit="s",
        validator=ge(0),
    )
    prompt_logprobs: bool = setting(
        False, "Warm up for log-probabilities of prompts too: a second program for each bucket."
    )
    embeddings: bool = setting(False, "Warm up for embeddings too: a program for each size of texts, by powers of two.")
    expected_graph_s: float = setting(
        0.4, "Time to prepare one bucket, for the estimate before the warm-up.", unit="s", validator=gt(0)
    )
    defragmenter_graphs: str = setting(
        "auto",
        "Whether block swaps run as graphs: on, off; auto: on with torch.compile.",
        validator=in_(["auto", "on", "off"]),
        aliases={"VLLM_DEFRAG_WITH_GRAPHS": _on_or_off},
    )

    regional: bool = setting(
        True, "torch.compile one decoder layer at a time.", aliases="VLLM_T_COMPILE_REGIONAL_COMPILATION"
    )
    dynamic_shapes: bool = setting(
        False, "Let torch.compile make shapes symbolic.", aliases="VLLM_T_COMPILE_DYNAMIC_SHAPES"
    )
    fullgraph: bool = setting(False, "torch.compile refuses to break a graph.", aliases="VLLM_T_COMPILE_FULLGRAPH")
    tensor_plan: str = setting(
        "",
        "TOML or JSON file that says how layers are divided over ranks, before the plan of transformers; empty: that plan.",
    )
    recipe_cache: str = setting(
        "", "Directory, ',', true or false (clear it at start), ',', MB: where compiled graphs are kept between runs."
    )

    watch_compilations: bool = setting(True, "Count what is compiled in a step, and warn about it.")
    log_passes: bool = setting(False, "Log the bucket of every pass.", aliases={"VLLM_DEBUG": _logs_passes})

    emulated_memory_bytes: int = setting(16 * 2**30, "Memory of the emulated device.", unit="bytes", validator=ge(1))
    emulated_compile_s: float = setting(
        0.0, "What the emulated device charges for a compilation.", unit="s", validator=ge(0)
    )
    emulated_frozen: bool = setting(False, "On the emulated device, compiling after the warm-up is an error.")

    @property
    def captures(self) -> bool:
        """Whether HPU graphs are captured."""
        return self.mode == "lazy"

    @property
    def swaps_in_graphs(self) -> bool:
        """Whether blocks are swapped by a graph."""
        return self.mode == "compile" if self.defragmenter_graphs == "auto" else self.defragmenter_graphs == "on"

    @property
    def computes_fp8(self) -> bool:
        """Whether linear layers or the KV cache are in fp8."""
        return self.fp8 != "off" or self.kv_cache_dtype == "fp8"

    def with_quant_config(self) -> GaudiConfig:
        """Return the config with the settings of the ``quant_config`` file in place of ``fp8 = "inc"``.

        Raises:
            ConfigValueError: The file cannot be read, or has a setting that is not supported.
        """
        return attrs.evolve(self, **read_quant_config(self.quant_config)) if self.fp8 == "inc" else self

    @property
    def scale_method(self) -> ScaleMethod:
        """Scale method of the linear layers."""
        known = DYNAMIC if self.fp8 == "dynamic" else STATIC
        return known.get(self.fp8_scale_method, next(iter(known.values())))

    @property
    def cache_scale_method(self) -> ScaleMethod:
        """Scale method of the KV cache, whose scales are static."""
        return STATIC.get(self.fp8_scale_method, next(iter(STATIC.values())))

    def check(self) -> None:
        """Check keys against each other.

        Raises:
            ConfigValueError: Two keys contradict each other.
        """
        if self.capture == "budgeted" and self.mode not in {"auto", "lazy"}:
            raise ConfigValueError(
                f'[backend.gaudi] capture = "budgeted" with mode = "{self.mode}": HPU graphs exist in lazy mode only.',
                hint='Set mode = "lazy", or capture = "capture_all".',
            )
        if self.defragmenter_graphs == "on" and self.mode == "eager":
            raise ConfigValueError(
                '[backend.gaudi] defragmenter_graphs = "on" with mode = "eager": nothing is captured or compiled there.',
                hint='Set it to "auto", or choose another mode.',
            )
        if self.emulated_frozen and self.device != "emulated":
            raise ConfigValueError(
                '[backend.gaudi] emulated_frozen = true with device = "hpu": only the emulated device can refuse to compile.',
                hint='Set device = "emulated", or leave emulated_frozen out.',
            )
        if self.layout == "unified" and (self.contiguous or self.merged_prefill):
            raise ConfigValueError(
                '[backend.gaudi] layout = "unified" with contiguous or merged_prefill: a unified pass reads unshared blocks by '
                "range and has its prompts in one row as it is.",
                hint='Leave both out, or set layout = "padded".',
            )
        if self.merged_prefill and self.max_prefill_batch_size == 1:
            raise ConfigValueError(
                "[backend.gaudi] merged_prefill = true with max_prefill_batch_size = 1: there is nothing to merge.",
                hint="Raise max_prefill_batch_size.",
            )
        self._check_fp8()
        _check_recipe_cache(self.recipe_cache)

    def _check_fp8(self) -> None:
        if self.fp8 == "inc" and not self.quant_config:
            raise ConfigValueError(
                '[backend.gaudi] fp8 = "inc" without quant_config.',
                hint="Name the configuration of Intel Neural Compressor, there or in the environment as QUANT_CONFIG.",
            )
        if self.fp8 == "static" and not self.fp8_measurements:
            raise ConfigValueError(
                '[backend.gaudi] fp8 = "static" without fp8_measurements: static scales come from a calibration.',
                hint='Name the measurement file, or set fp8 = "dynamic".',
            )
        known = DYNAMIC if self.fp8 == "dynamic" else STATIC
        if self.fp8 in {"static", "dynamic"} and self.fp8_scale_method not in {"auto", *known}:
            raise ConfigValueError(
                f'[backend.gaudi] fp8_scale_method = "{self.fp8_scale_method}" with fp8 = "{self.fp8}".',
                hint=f"Methods for it are {', '.join(known)}.",
            )


def _check_recipe_cache(text: str) -> None:
    parts = text.split(",")
    if text and (len(parts) != 3 or parts[1] not in {"true", "false"} or not parts[2].isdigit()):
        raise ConfigValueError(
            f'[backend.gaudi] recipe_cache = "{text}": not of the form DIRECTORY,true|false,MB.',
            hint='Such as "/var/cache/recipes,false,2048".',
        )
