"""The embedded model through the whole engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trencadis import LLM, SamplingParams
from trencadis.text import resolve_model_path

PROMPTS = [
    "The old man looked at the sea and",
    "Alice was beginning to get very tired of",
    "To be, or not to be: that is",
    "Of Man's first disobedience, and the fruit",
    "KING RICHARD II:\nWhat says",
    "x",
]
QUESTIONS = Path(__file__).parents[3] / "shared" / "data" / "prompts" / "mt_bench.jsonl"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def llm():
    with LLM({"path": "demo", "dtype": "float32"}, cache={"num_blocks": 512}) as made:
        yield made


def transformers_greedy(prompts: list[tuple[int, ...]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(resolve_model_path("demo")), dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def check(llm: LLM, prompts: list[str]) -> None:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS), use_progress=False)
    expected = transformers_greedy([output.prompt_token_ids for output in outputs])
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_greedy_text_of_real_prompts_equals_transformers(llm: LLM) -> None:
    check(llm, PROMPTS)


@pytest.mark.slow
def test_greedy_text_of_benchmark_questions_equals_transformers(llm: LLM) -> None:
    if not QUESTIONS.exists():
        pytest.skip(f"{QUESTIONS} is not there: the shared data folder is not part of the repository")
    lines = [json.loads(line) for line in QUESTIONS.read_text().splitlines()[:8]]
    check(llm, [line["turns"][0] for line in lines])


def test_same_seed_same_text_and_another_seed_another(llm: LLM) -> None:
    def text(seed: int) -> str:
        params = SamplingParams(temperature=0.8, seed=seed, max_tokens=NUM_TOKENS)
        return llm.generate(PROMPTS[0], params, use_progress=False)[0].outputs[0].text

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_chat_has_the_shape_of_a_reply(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "Where is the king?"}], SamplingParams(max_tokens=20, seed=3))
    assert output.finished
    assert output.outputs[0].text.strip()


def test_two_conversations_find_their_prompts_again_where_only_one_runs_at_a_time() -> None:
    """A cache that is cut to the blocks of one sequence of full length, 128, holds one of the two."""
    prompts = [[5 + (i * step + i * i % 11) % 200 for i in range(1948)] for step in (37, 41)]
    params = SamplingParams(max_tokens=2, temperature=0.0)
    with LLM("demo", engine={"max_num_seqs": 1, "warmup": False}) as llm:
        found = [llm.generate([prompts[i % 2]], params)[0].num_cached_tokens for i in range(4)]
    assert found == [0, 0, 1936, 1936]
