"""The trainer of the demo's head: what it computes is what is served, and it learns."""

from pathlib import Path

import pytest
import torch
import transformers

from demo import eagle
from demo.training import Budget
from support.strategies.heads import reference_logprobs, save_verifier

IDS = torch.arange(3, 97, 2)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_verifier(tmp_path_factory.mktemp("target"), num_layers=5)


def opened(place: Path) -> "transformers.LlamaForCausalLM":
    return transformers.LlamaForCausalLM.from_pretrained(place, dtype=torch.float32).eval()


@torch.no_grad()
def test_unrolled_drafts_are_those_of_the_files_served(place: Path, tmp_path: Path) -> None:
    """Each unrolled step at each position, against a text that ends there and drafts that follow it, one after the other in float64."""
    torch.manual_seed(4)
    target = opened(place)
    head = eagle.EagleHead(target, IDS, mlp=48)
    for name, weight in head.named_parameters():
        weight.add_(torch.randn_like(weight) * 0.2 * (name != "lm_head.weight"))
    head = head.bfloat16().float()
    eagle.save_head(head, tmp_path / "head")
    tokens = torch.randint(3, 97, (1, 12))
    states = target(tokens, output_hidden_states=True).hidden_states
    found = head.unrolled(torch.cat([states[i] for i in eagle.STATE_LAYERS], -1)[:, :-1], tokens[:, 1:], 4)
    ids = tokens[0].tolist()
    for k, logits in enumerate(found):
        for i in range(k, 11, 3):
            known = i + 2 - k
            expected = reference_logprobs(place, tmp_path / "head", ids[:known], ids[known : i + 2])
            torch.testing.assert_close(logits[0, i].log_softmax(-1).double(), expected[IDS], atol=2e-3, rtol=0)


@pytest.mark.nightly
def test_a_head_comes_to_draft_what_the_target_says(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eagle, "ROW_LENGTH", 16)
    target = opened(place)
    texts = torch.randint(3, 97, (16, 16), generator=torch.Generator().manual_seed(0)).tolist()
    batches = eagle.observe(target, texts, seed=0)
    assert batches[0].states.shape == (2, 16, 96)
    budget = Budget(steps=160, seconds=1e6, learning_rate=1e-2, dropout=0.0, check_every_steps=40)
    lines: list[str] = []
    steps, _ = eagle.train_head(eagle.EagleHead(target, IDS, mlp=48), batches, budget, seed=0, log=lines.append)
    losses = [[float(part) for part in line.split("loss ")[1].split()] for line in lines]
    assert steps == 160
    assert all(last < 0.9 * first for first, last in zip(losses[0], losses[-1], strict=True))


def test_the_most_frequent_tokens_are_ascending() -> None:
    ids, share = eagle.frequent_tokens([[5, 5, 5, 2], [2, 9]], 2)
    assert ids.tolist() == [2, 5]
    assert share == pytest.approx(5 / 6)
