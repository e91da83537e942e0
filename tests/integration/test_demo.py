"""The embedded model through the whole engine."""

from __future__ import annotations

import pytest
import torch

from trencadis import LLM, SamplingParams
from trencadis.text import resolve_model_path

SHARED = "The old man looked at the sea and the sea looked at the old man, and the old man said to the sea: "
PROMPTS = [
    SHARED + "who",
    SHARED + "what is it",
    "Alice was beginning to get very tired of",
    "KING RICHARD II:\nWhat says",
    "x",
]
NUM_TOKENS = 32


def generate(**backend: object) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """Return prompts and greedy tokens; prompts share a prefix, and small steps cut them into chunks."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    tables = {"cache": {"num_blocks": 256}, "engine": {"max_num_batched_tokens": 24}, "backend": {"torch": backend}}
    with LLM({"path": "demo", "dtype": "float32"}, **tables) as llm:
        first = llm.generate(PROMPTS, params, use_progress=False)
        again = llm.generate(PROMPTS, params, use_progress=False)  # from the prefix cache
    texts = [[list(output.outputs[0].token_ids) for output in outputs] for outputs in (first, again)]
    assert texts[0] == texts[1]
    return [tuple(output.prompt_token_ids) for output in first], texts[0]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Greedy tokens of transformers, which ours are."""
    from transformers import AutoModelForCausalLM

    prompts, found = generate()
    model = AutoModelForCausalLM.from_pretrained(str(resolve_model_path("demo")), dtype=torch.float32).eval()
    sizes = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS}
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **sizes)
        assert tokens == out[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("kv_dtype", ["auto", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_greedy_text_is_that_of_transformers_and_a_narrow_cache_begins_it_alike(
    expected: list[list[int]], attention: str, kv_dtype: str
) -> None:
    """Rounding may turn a near tie, and then the rest differs: counted are the tokens up to there."""
    _, found = generate(attention=attention, kv_dtype=kv_dtype)
    same = [
        next((i for i, pair in enumerate(zip(one, other, strict=True)) if len(set(pair)) > 1), NUM_TOKENS)
        for one, other in zip(found, expected, strict=True)
    ]
    assert sum(same) >= (1.0 if kv_dtype in ("auto", "float16") else 0.5) * NUM_TOKENS * len(PROMPTS)


def test_chat_has_the_shape_of_a_reply_and_follows_from_its_seed() -> None:
    def said(llm: LLM, seed: int) -> str:
        (output,) = llm.chat(
            [{"role": "user", "content": "Where is the king?"}], SamplingParams(max_tokens=20, seed=seed)
        )
        assert output.finished
        return output.outputs[0].text.strip()

    with LLM("demo", cache={"num_blocks": 512}) as llm:
        assert said(llm, 3) == said(llm, 3) != said(llm, 4)


def test_two_conversations_find_their_prompts_again_where_only_one_runs_at_a_time() -> None:
    """A cache that is cut to the blocks of one sequence of full length, 128, holds one of the two."""
    prompts = [[5 + (i * step + i * i % 11) % 200 for i in range(1948)] for step in (37, 41)]
    params = SamplingParams(max_tokens=2, temperature=0.0)
    with LLM("demo", engine={"max_num_seqs": 1, "warmup": False}) as llm:
        found = [llm.generate([prompts[i % 2]], params)[0].num_cached_tokens for i in range(4)]
    assert found == [0, 0, 1936, 1936]
