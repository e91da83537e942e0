"""transformers: its continuous batching with a paged cache (``generate_batch``)."""

from __future__ import annotations

from typing import Any

from peers.drivers.protocol import serve, timed, versions_of

PAGE_SIZE = 128
MAX_BATCH_TOKENS = 2048
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
    import torch
    from transformers import AutoModelForCausalLM

    if precision != "fp32":
        raise ValueError(f"precision {precision}: only fp32 is run with transformers here")
    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    if not hasattr(loaded, "generate_batch"):
        raise ValueError("this version of transformers has no continuous batching")
    _loaded["model"] = loaded.eval()
    _loaded["num_blocks"] = max(2, -(-max_num_tokens // PAGE_SIZE)) + max_num_seqs
    return {"versions": versions_of("transformers", "torch")}


def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = GenerationConfig(max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Without numbers of its own it would take most of the memory of the machine for its cache.
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=_loaded["num_blocks"],
        max_batch_tokens=MAX_BATCH_TOKENS,
        allow_block_sharing=False,
    )
    outputs = _loaded["model"].generate_batch(
        inputs=prompts, generation_config=config, continuous_batching_config=batching
    )
    ordered = sorted(outputs.items(), key=lambda item: int(item[0].rsplit("_", 1)[-1]))
    return [list(output.generated_tokens) for _, output in ordered]


if __name__ == "__main__":
    serve(load=load, run=timed(generate))
