"""transformers: ``generate`` on one padded batch; the prompts here are equally long, so nothing is padded."""

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
    import torch
    from transformers import AutoModelForCausalLM

    if precision != "fp32":
        raise ValueError(f"precision {precision}: only fp32 is run with transformers here")
    torch.set_num_threads(threads)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    loaded.generation_config.eos_token_id = None
    loaded.generation_config.pad_token_id = 0
    _loaded["model"] = loaded.eval()
    return {"versions": versions_of("transformers", "torch")}


def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
    import torch

    input_ids = torch.tensor(prompts)
    with torch.inference_mode():
        found = _loaded["model"].generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=output_len,
            min_new_tokens=output_len,
            do_sample=False,
        )
    rows: list[list[int]] = found[:, input_ids.shape[1] :].tolist()
    return rows


if __name__ == "__main__":
    serve(load=load, run=timed(generate))
