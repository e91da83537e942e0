"""The engines: where each runs, what speaks for it, which files it reads, which precisions it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

__all__ = [
    "AGAIN",
    "COMPILED",
    "ENGINES",
    "OURS",
    "OWN",
    "PRECISIONS",
    "PUBLISHED",
    "REFERENCE",
    "WAIT_PASSIVELY",
    "Engine",
]

OURS = "ours"
AGAIN = "ours_again"
COMPILED = "ours_compiled"
OWN = (OURS, AGAIN, COMPILED)
REFERENCE = "transformers"
"""Whose greedy tokens are those the others are held against."""

WAIT_PASSIVELY = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "500"}
"""For OpenMP: a thread that waits sleeps after some microseconds, so that CPU seconds are work. What our engine sets for itself."""


@attrs.frozen(kw_only=True)
class Engine:
    """One column of the comparison.

    Attributes:
        name: On the command line and in results.
        label: In the table.
        home: The environment it runs in; empty: that of the benchmark itself.
        driver: Its module in ``peers.drivers``.
        files: What it reads, by precision; see ``models.py``.
        env: What it needs in its environment.
        lacks: By precision, why it is not measured.
        mask: How far instructions can be hidden from it.
        options: Settings of its own; those of the command line come on top.
    """

    name: str
    label: str
    driver: str
    home: str = ""
    files: Mapping[str, str]
    env: Mapping[str, str] = attrs.field(factory=dict)
    lacks: Mapping[str, str] = attrs.field(factory=dict)
    mask: str = ""
    options: Mapping[str, Any] = attrs.field(factory=dict)


PRECISIONS = ("fp32", "bf16", "int8", "int4")
PUBLISHED = "q4_k_m"
"""The precision of a file that is run as it was published."""
FILES = {"fp32": "hf", "bf16": "hf_bf16", "int8": "hf", "int4": "hf", PUBLISHED: "published"}
GGUF = {**dict.fromkeys(PRECISIONS, "gguf"), PUBLISHED: "published"}
FP32_ONLY = {"fp32": "hf"}
NO_PRODUCT = "transformers has no product with such weights on CPUs of its own"
NOT_RUN = {PUBLISHED: "it is not run on this file here"}
OF_TRANSFORMERS = {"bf16": "measured in fp32, as the reference", "int8": NO_PRODUCT, "int4": NO_PRODUCT, **NOT_RUN}

OUR_MASK = "its own kernels by `backend.torch.instructions`, PyTorch's by `ATEN_CPU_CAPABILITY` and oneDNN's variable"
PYTORCH_MASK = "`ATEN_CPU_CAPABILITY` and oneDNN's variable; MKL takes what the CPU has"
AVX2_BUILD = "nothing to hide: its package is built for AVX2"

GRAPHS = {
    "backend.torch.layout": "padded",
    "backend.torch.compile": "buckets",
    "bucketing.name": "linear",
    **{
        f"bucketing.linear.{name}": value
        for name, value in {
            "prompt_query_min": 128,
            "prompt_query_step": 128,
            "prompt_query_max": 1024,
            "prompt_ctx_step": 16,
            "decode_bs_step": 8,
            "decode_block_step": 256,
        }.items()
    },
}
"""Eight query lengths and seven batch sizes: each costs seconds of a compiler at the first start. Blocks are no size with our attention."""

ENGINES = {
    engine.name: engine
    for engine in (
        Engine(name=OURS, label="Trencadís", driver="ours", files=FILES, mask=OUR_MASK),
        Engine(name=AGAIN, label="Trencadís again (A/A)", driver="ours", files=FILES, mask=OUR_MASK),
        Engine(
            name=COMPILED,
            label="Trencadís, torch.compile",
            driver="ours",
            files={name: kind for name, kind in FILES.items() if name != PUBLISHED},
            lacks=NOT_RUN,
            mask=PYTORCH_MASK,
            options=GRAPHS,
        ),
        Engine(
            name=REFERENCE,
            label="transformers, static batch",
            home="transformers",
            driver="transformers_static",
            files=FP32_ONLY,
            lacks=OF_TRANSFORMERS,
            mask=PYTORCH_MASK,
        ),
        Engine(
            name="transformers_continuous",
            label="transformers, continuous batching",
            home="transformers",
            driver="transformers_continuous",
            files=FP32_ONLY,
            lacks=OF_TRANSFORMERS,
            mask=PYTORCH_MASK,
        ),
        Engine(
            name="vllm",
            label="vLLM, CPU build",
            home="vllm",
            driver="vllm_cpu",
            files=FP32_ONLY,
            env={"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"},
            lacks={
                "bf16": "measured in fp32",
                **dict.fromkeys(("int8", "int4"), "vLLM reads quantised checkpoints; none is made here"),
                **NOT_RUN,
            },
            mask=PYTORCH_MASK,
        ),
        Engine(
            name="llama_cpp",
            label="llama.cpp, its server (xllamacpp)",
            home="llama_cpp",
            driver="llama_server",
            files=GGUF,
            mask=AVX2_BUILD,
        ),
        Engine(
            name="ik_llama",
            label="ik_llama.cpp, as a library",
            home="ik_llama",
            driver="ik_llama",
            files=GGUF,
            mask=AVX2_BUILD,
        ),
        Engine(
            name="openvino",
            label="OpenVINO GenAI",
            home="openvino",
            driver="openvino_genai",
            files=dict.fromkeys(PRECISIONS, "openvino"),
            lacks=NOT_RUN,
            mask="oneDNN's variable: fp32 layers obey it (oneDNN's log names their code), rounded ones fail; what the plugin compiles "
            "itself (attention, element-wise code) takes what the CPU has",
        ),
    )
}
