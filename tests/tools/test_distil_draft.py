"""The trainer of the distilled draft model: what it learns from, and that it learns."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from demo import answers
from demo.training import Budget, Shape

VOCABULARY = 16


def small_model(*, seed: int) -> "transformers.LlamaForCausalLM":
    torch.manual_seed(seed)
    model = Shape(hidden=32, layers=1, heads=2, mlp=32).build(vocab=VOCABULARY, end_id=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0)
    return model


def test_an_answer_follows_its_prompt_and_no_token_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "ANSWER_TOKENS", 12)
    found = answers.write_answers(small_model(seed=1), [[3, 4], [5, 6, 7]], seed=0, log=lambda _: None)
    # Prompts of a group are cut to the shortest, from the front.
    assert [text[:2] for text in found] == [[3, 4], [6, 7]]
    assert {len(text) for text in found} == {14}


@pytest.mark.nightly
def test_a_model_comes_to_say_what_the_target_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "BATCH_TOKENS", 64)
    monkeypatch.setattr(answers, "ROW_LENGTH", 16)
    target, draft = small_model(seed=1), small_model(seed=2)
    rng = torch.Generator().manual_seed(0)
    texts = torch.randint(1, VOCABULARY, (16, 16), generator=rng).tolist()
    batches = answers.say(target, texts, seed=0)
    assert batches[0][1].shape == (4, 16, answers.CANDIDATES)
    budget = Budget(steps=120, seconds=1e6, learning_rate=1e-2, dropout=0.0, check_every_steps=40)
    lines: list[str] = []
    steps, _ = answers.imitate(draft, batches, budget, seed=0, log=lines.append)
    losses = [float(line.rsplit(maxsplit=1)[1]) for line in lines]
    assert steps == 120
    assert losses[-1] < 0.9 * losses[0]


def test_questions_are_chats_that_wait_for_an_answer(tmp_path: Path) -> None:
    demo = Path(__file__).resolve().parents[2] / "core" / "trencadis" / "demo"
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(demo / "target", local_files_only=True)
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps({"question": "Who is there?", "answer": "I"}) + "\n\n")
    (ids,) = answers.read_questions(path, tokenizer)
    assert tokenizer.decode(ids) == "<|user|>Who is there?<|end|><|assistant|>"
