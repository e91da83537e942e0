"""OpenVINO GenAI, its continuous batching pipeline, prompts as token ids."""

from __future__ import annotations

from typing import Any

from peers.drivers.protocol import serve, timed, versions_of

CACHE_GB = 4
_loaded: dict[str, Any] = {}


def load(
    model: str,
    precision: str,
    threads: int,
    max_num_seqs: int,
    max_model_len: int,
    max_num_tokens: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    import openvino_genai as genai

    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GB
    scheduling.max_num_seqs = max_num_seqs
    scheduling.enable_prefix_caching = False
    scheduling.dynamic_split_fuse = True
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, **options}
    if precision == "fp32":  # bf16 and an int8 cache are its defaults where the CPU has the instructions
        properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    elif precision == "bf16":
        properties |= {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    _loaded["pipe"] = genai.ContinuousBatchingPipeline(model, scheduling, "CPU", properties)
    return {"versions": versions_of("openvino-genai", "openvino")}


def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    config = genai.GenerationConfig()
    config.max_new_tokens = output_len
    config.min_new_tokens = output_len
    config.ignore_eos = True
    config.do_sample = False
    inputs = [ov.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
    outputs = _loaded["pipe"].generate(inputs, [config] * len(inputs))
    return [list(output.m_generation_ids[0]) for output in outputs]


if __name__ == "__main__":
    serve(load=load, run=timed(generate))
