"""transformers: its continuous batching with a paged cache (``generate_batch``)."""

from __future__ import annotations

from peers.drivers.protocol import Opened, Wanted, drive, versions_of

PAGE_SIZE = 128
MAX_BATCH_TOKENS = 2048


def open_engine(wanted: Wanted) -> Opened:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    torch.set_num_threads(wanted.threads)
    model = AutoModelForCausalLM.from_pretrained(wanted.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    if not hasattr(model, "generate_batch"):
        raise ValueError("this version of transformers has no continuous batching")
    # Without numbers of its own it would take most of the memory of the machine for its cache.
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=max(2, -(-wanted.max_num_tokens // PAGE_SIZE)) + wanted.max_num_seqs,
        max_batch_tokens=MAX_BATCH_TOKENS,
        allow_block_sharing=False,
    )

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        config = GenerationConfig(max_new_tokens=output_len, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = model.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=batching)
        ordered = sorted(outputs.items(), key=lambda item: int(item[0].rsplit("_", 1)[-1]))
        return [list(output.generated_tokens) for _, output in ordered]

    return Opened(versions_of("transformers", "torch"), generate)


if __name__ == "__main__":
    drive(open_engine)
