"""The demo trainer on a made-up text, and the promises about the weights that ship with the package."""

import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

import train_demo
from demo import corpus as demo_corpus
from demo.measure import held_out_loss
from demo.training import Budget, Shape, TokenSource, Trained, train

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "core" / "trencadis" / "demo"
CORPUS = ROOT.parent / "shared" / "data" / "corpus"


LARGEST_TOTAL_BYTES = 18_000_000
LOSS_TOLERANCE = 0.02
STORY = "\n\n".join(
    f"The miller had {count} sacks of\nflour, and he counted them well-\nnigh twice." for count in range(60)
)
PLAY = "\n\n".join(f"MILLER:\nHow many sacks, {count}?\n\nWIFE:\nOne more than {count}." for count in range(60))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of a two-step run on a story and a play of a few kilobytes."""
    texts, out = tmp_path_factory.mktemp("texts"), tmp_path_factory.mktemp("demo")
    (texts / "story.txt").write_text(STORY, encoding="utf-8")
    (texts / "tinyshakespeare.txt").write_text(PLAY, encoding="utf-8")
    train_demo.main(["--corpus", str(texts), "--out", str(out), "--steps", "2", "--seed", "1", "--threads", "1"])
    return out


def load(folder: Path) -> tuple["transformers.LlamaForCausalLM", "transformers.PreTrainedTokenizerFast"]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return model, transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)


@pytest.mark.nightly
def test_saved_models_have_tied_weights_one_tokenizer_its_end_and_losses_on_the_card(trained: Path) -> None:
    for name in ("target", "draft"):
        model, tokenizer = load(trained / name)
        assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
        assert model.config.vocab_size == len(tokenizer)
        end = tokenizer.convert_tokens_to_ids("<|end|>")
        found = (model.config.eos_token_id, model.generation_config.eos_token_id, tokenizer.eos_token_id)
        assert (*found, tokenizer.pad_token_id) == (end, end, end, end)
    assert all(0.0 < loss < 10.0 for loss in stated_losses(trained / "README.md"))


@pytest.mark.nightly
def test_the_tokenizer_gives_texts_back_and_its_template_is_what_chats_were_trained_on(trained: Path) -> None:
    _, tokenizer = load(trained / "target")
    for text in ("The miller", " Trencadís \U0001f9e9 大\n\n\ttail "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    turns = [{"role": "system", "content": "You are Wife."}, {"role": "user", "content": " How many? "}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>You are Wife.<|end|><|user|>How many?<|end|><|assistant|>"
    learnt = demo_corpus.render_chat([("MILLER", "How many?"), ("WIFE", "Two.")], with_system=True)
    answered = [*turns, {"role": "assistant", "content": "Two."}]
    assert learnt + demo_corpus.END == tokenizer.apply_chat_template(answered, tokenize=False)


def test_resumed_run_ends_with_the_weights_of_the_unbroken_one(tmp_path: Path) -> None:
    kept, halfway = tmp_path / "run.pt", tmp_path / "halfway.pt"

    def copy_first_checkpoint(line: str) -> None:
        if line.startswith("step 4 ") and not halfway.exists():
            shutil.copy(kept, halfway)

    unbroken = run(checkpoint=kept, log=copy_first_checkpoint)
    resumed = run(checkpoint=halfway, log=lambda line: None)
    pairs = zip(unbroken.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_held_out_text_is_the_end_and_never_trained_on() -> None:
    kept, held_out = demo_corpus.split_held_out([f"{number:04}" for number in range(100)])
    assert [*kept, *held_out] == [f"{number:04}" for number in range(100)]
    assert len(held_out) == 5


def test_hard_wrapped_prose_becomes_one_line_a_paragraph() -> None:
    text = "It was well-\nnigh  dark,\nand--\nlate.\n\n          A verse\n          of two lines\n"
    assert demo_corpus.clean_prose(text) == ["It was well-nigh dark, and--late.", "A verse\nof two lines"]


def test_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no \.txt file"):
        demo_corpus.load_corpus(tmp_path, seed=0)


def test_all_files_together_stay_under_eighteen_megabytes() -> None:
    total = sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file())
    assert 0 < total <= LARGEST_TOTAL_BYTES


@pytest.mark.parametrize("name", ["target", "draft"])
def test_model_loads_without_a_network_and_continues_a_prompt(name: str) -> None:
    model, tokenizer = load(DEMO / name)
    ids = torch.tensor([tokenizer.encode("The old man looked at the sea and")])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    words = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    assert re.search(r"[a-z]{2}", words)


def test_draft_shares_the_targets_tokenizer() -> None:
    pair = [(DEMO / name / "tokenizer.json").read_bytes() for name in ("target", "draft")]
    assert pair[0] == pair[1]


@pytest.mark.slow
@pytest.mark.skipif(not CORPUS.is_dir(), reason="the training texts are not on this machine")
@pytest.mark.parametrize(("name", "column"), [("target", 0), ("draft", 1)])
@pytest.mark.nightly
def test_held_out_loss_is_what_the_card_says(name: str, column: int) -> None:
    model, tokenizer = load(DEMO / name)
    texts = demo_corpus.load_corpus(CORPUS, seed=0).held_out.values()
    ids = [[token for text in passages for token in tokenizer.encode(text + "<|end|>")] for passages in texts]
    measured = held_out_loss(model.float(), ids, fast=False).per_token
    assert measured == pytest.approx(stated_losses(DEMO / "README.md")[column], abs=LOSS_TOLERANCE)


def run(*, checkpoint: Path, log: Callable[[str], None]) -> Trained:
    """Train the smallest model that has every part for four steps, with a look at the loss after every second."""
    torch.manual_seed(0)
    model = Shape(hidden=32, layers=1, heads=2, mlp=32).build(vocab=16, end_id=0)
    passages = [([word] * 7 + [0], 1.0) for word in range(1, 16)]
    source = TokenSource(passages, [], random.Random(0))
    budget = Budget(steps=4, seconds=1e6, learning_rate=1e-3, dropout=0.0, check_every_steps=2)
    return train(model, source, [[1, 2, 3]], budget, checkpoint=checkpoint, log=log)


def stated_losses(card: Path) -> tuple[float, float]:
    """Return the held-out losses of target and draft from a model card, nats per token."""
    row = re.search(r"\| held-out loss, nats per token \| ([\d.]+) \| ([\d.]+) \|", card.read_text(encoding="utf-8"))
    assert row is not None, f"{card} states no held-out loss"
    return float(row[1]), float(row[2])
