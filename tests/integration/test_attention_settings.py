"""Whole engines under each way to attend and each way to hold keys and values."""

from __future__ import annotations

import pytest
import torch

from trencadis import LLM, SamplingParams
from trencadis.errors import BackendError, TrencadisError
from trencadis.text import resolve_model_path
from trencadis_torch.native_build import find_compiler

SHARED = "The old man looked at the sea and the sea looked at the old man, and the old man said to the sea: "
PROMPTS = [SHARED + "who", SHARED + "what is it", "Alice was beginning to get very tired of", "x"]
NUM_TOKENS = 32

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def generate(**tables) -> tuple[list[tuple[int, ...]], list[list[int]]]:
    """Return prompts and greedy tokens; prompts share a prefix, and small steps cut them into chunks."""
    with LLM("demo", cache={"num_blocks": 256}, engine={"max_num_batched_tokens": 24}, **tables) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        first = llm.generate(PROMPTS, params, use_progress=False)
        again = llm.generate(PROMPTS, params, use_progress=False)  # from the prefix cache
    texts = [[list(output.outputs[0].token_ids) for output in outputs] for outputs in (first, again)]
    assert texts[0] == texts[1]
    return [tuple(output.prompt_token_ids) for output in first], texts[0]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    prompts, _ = generate(backend={"torch": {"attention": "sdpa"}})
    model = AutoModelForCausalLM.from_pretrained(str(resolve_model_path("demo")), dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
        )
        texts.append(out[0, len(prompt) :].tolist())
    return texts


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("native", marks=needs_compiler)])
@pytest.mark.parametrize(
    "speculation",
    [
        {},
        {"speculation": {"name": "ngram"}, "draft_length": {"name": "fixed"}},
        {"speculation": {"name": "suffix"}, "draft_length": {"name": "fixed"}},
    ],
    ids=str,
)
def test_greedy_text_equals_transformers(expected, attention, speculation):
    assert generate(backend={"torch": {"attention": attention}}, **speculation)[1] == expected


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("native", marks=needs_compiler)])
@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "int8"])
def test_narrow_cache_begins_texts_alike(expected, attention, kv_dtype):
    """Rounding may turn a near tie, and then the rest differs: counted are the tokens up to there."""
    _, found = generate(backend={"torch": {"attention": attention, "kv_dtype": kv_dtype}})
    same = [
        next((i for i, pair in enumerate(zip(one, other, strict=True)) if len(set(pair)) > 1), NUM_TOKENS)
        for one, other in zip(found, expected, strict=True)
    ]
    assert sum(same) >= (1.0 if kv_dtype == "float16" else 0.5) * NUM_TOKENS * len(PROMPTS)


@needs_compiler
def test_what_cannot_be_had_stops_the_engine_in_words():
    with pytest.raises(TrencadisError, match=r'attention = "native".*padded') as caught:
        LLM("demo", backend={"torch": {"attention": "native", "layout": "padded"}})
    assert isinstance(caught.value, BackendError)
