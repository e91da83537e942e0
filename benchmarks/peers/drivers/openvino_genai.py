"""OpenVINO GenAI, its continuous batching pipeline, prompts as token ids."""

from __future__ import annotations

from typing import Any

from peers.drivers.protocol import Opened, Wanted, drive, versions_of

CACHE_GB = 4


def open_engine(wanted: Wanted) -> Opened:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GB
    scheduling.max_num_seqs = wanted.max_num_seqs
    scheduling.enable_prefix_caching = False
    scheduling.dynamic_split_fuse = True
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": wanted.threads, **wanted.options}
    if wanted.precision == "fp32":  # bf16 and an int8 cache are its defaults where the CPU has the instructions
        properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    elif wanted.precision == "bf16":
        properties |= {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    pipe = genai.ContinuousBatchingPipeline(wanted.model, scheduling, "CPU", properties)

    def tensor(prompt: list[int]) -> Any:
        return ov.Tensor(np.array([prompt], np.int64))

    def config_for(output_len: int) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        return config

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        outputs = pipe.generate(list(map(tensor, prompts)), [config_for(output_len)] * len(prompts))
        return [list(output.m_generation_ids[0]) for output in outputs]

    def score(texts: list[list[int]]) -> list[list[float]]:
        config = config_for(1)
        config.echo, config.logprobs = True, 1
        handles = [pipe.add_request(number, tensor(text), config) for number, text in enumerate(texts)]
        while pipe.has_non_finished_requests():
            pipe.step()
        # The first token of a prompt has no probability, and the last entry is the new token's.
        return [
            handle.read_all()[0].generated_log_probs[1 : len(text)] for handle, text in zip(handles, texts, strict=True)
        ]

    return Opened(versions_of("openvino-genai", "openvino"), generate, score)


if __name__ == "__main__":
    drive(open_engine)
