"""transformers: ``generate`` on one padded batch; the prompts here are equally long, so nothing is padded."""

from __future__ import annotations

from peers.drivers.protocol import Opened, Wanted, drive, versions_of


def open_engine(wanted: Wanted) -> Opened:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(wanted.threads)
    model = AutoModelForCausalLM.from_pretrained(wanted.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def generate(prompts: list[list[int]], output_len: int) -> list[list[int]]:
        input_ids = torch.tensor(prompts)
        lengths = {"max_new_tokens": output_len, "min_new_tokens": output_len}
        with torch.inference_mode():
            found = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, **lengths)
        rows: list[list[int]] = found[:, input_ids.shape[1] :].tolist()
        return rows

    def score(texts: list[list[int]]) -> list[list[float]]:
        with torch.inference_mode():
            return [_logprobs(model(torch.tensor([text])).logits[0], text) for text in texts]

    def _logprobs(logits: torch.Tensor, text: list[int]) -> list[float]:
        found: list[float] = logits[:-1].log_softmax(-1).gather(1, torch.tensor(text[1:])[:, None])[:, 0].tolist()
        return found

    return Opened(versions_of("transformers", "torch"), generate, score)


if __name__ == "__main__":
    drive(open_engine)
