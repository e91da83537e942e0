"""The trainer of the parallel draft model on a made-up text, and the promises about the weights that ship."""

import itertools
import json
import random
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import train_parallel_draft
from demo import corpus as demo_corpus
from demo.ahead import acceptance, first_choices, look_ahead, measure
from demo.lessons import Lesson, keep_lessons, load_lessons, write_lessons
from demo.parallel import add_mask_token, lay_out, train_parallel
from demo.training import Budget, Shape, TokenSource

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "core" / "trencadis" / "demo"
CORPUS = ROOT.parent / "shared" / "data" / "corpus"


VOCABULARY = 16
DEPTH = 4
SHARE_TOLERANCE = 0.09
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
STORY = "\n\n".join(f"The miller had {count} sacks of flour, and he counted them twice." for count in range(60))


def small_model(*, seed: int = 0) -> "transformers.LlamaForCausalLM":
    """Return a model whose random weights are large enough that its choices depend on what it reads."""
    torch.manual_seed(seed)
    model = Shape(hidden=32, layers=2, heads=2, mlp=32).build(vocab=VOCABULARY, end_id=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12.0)
    return model


def texts(rows: int, length: int) -> "torch.Tensor":
    return torch.randint(1, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(7))


def test_each_position_is_continued_as_if_the_row_ended_there() -> None:
    model, inputs = small_model(), texts(2, 9)
    paths = first_choices(look_ahead(model, inputs, DEPTH), vocabulary=VOCABULARY)
    for row, end in [(0, 1), (0, 9), (1, 5)]:
        seen = inputs[row : row + 1, :end]
        for _ in range(DEPTH):
            seen = torch.cat([seen, model(input_ids=seen).logits[:, -1:].argmax(-1)], dim=1)
        assert paths[row, end - 1].tolist() == seen[0, end:].tolist()


def test_masks_guess_as_in_one_forward_over_the_text_and_the_masks() -> None:
    model, inputs = small_model(), texts(2, 9)
    mask_id = add_mask_token(model)
    stacked = torch.stack(list(look_ahead(model, inputs, DEPTH, mask_id=mask_id)), dim=2)
    for row, end in [(0, 1), (0, 9), (1, 5)]:
        text = torch.cat([inputs[row, :end], torch.full((DEPTH - 1,), mask_id)])
        alone = model(input_ids=text[None]).logits[0, end - 1 :]
        torch.testing.assert_close(stacked[row, end - 1], alone, atol=1e-3, rtol=1e-4)


def test_a_guess_counts_only_behind_right_ones_and_the_mask_token_is_never_one() -> None:
    logits = torch.zeros(1, 1, VOCABULARY + 1)
    logits[..., VOCABULARY], logits[..., 3] = 9.0, 1.0
    assert first_choices([logits], vocabulary=VOCABULARY).item() == 3
    goals = torch.tensor([[1, 2, 3]] * 4)
    guesses = torch.tensor([[1, 2, 3], [1, 2, 9], [1, 9, 3], [9, 2, 3]])
    found = acceptance(guesses, goals)
    assert found.positions == 4
    assert found.agreement == [0.75, 0.75, 0.75]
    assert found.accepted == [0.75, 0.5, 0.25]
    assert found.conditional == pytest.approx([0.75, 2 / 3, 0.5])
    assert [found.tokens_per_step(count) for count in (1, 3)] == [1.75, 2.5]

    assert acceptance(torch.tensor([[9, 2]]), torch.tensor([[1, 2]])).conditional == [0.0, 0.0]

    model = small_model()  # agrees with itself everywhere, and filling is not counted
    (found,) = measure([(model, None)], model, [[1, 2, 3, 4, 5]], DEPTH)
    assert found.accepted == [1.0] * DEPTH
    assert found.positions == 5


def source() -> TokenSource:
    return TokenSource([(texts(1, 3000)[0].tolist(), 1.0)], [], random.Random(0))


def test_answers_follow_the_targets_greedy_text_in_falling_order() -> None:
    target = small_model()
    (lesson,) = write_lessons(target, source(), count=1, depth=2, log=lambda line: None)
    inputs = lesson.inputs.long()
    first = target(input_ids=inputs).logits.topk(8).indices
    # Near-equal logits may change places between two ways to compute; the bulk may not.
    assert (lesson.candidates[:, :, 0] == first).float().mean() > 0.99
    assert bool((lesson.logits.diff(dim=-1) <= 0).all())
    longer = torch.cat([inputs[:, :100], first[:, 99:100, 0]], dim=1)
    second = target(input_ids=longer).logits[:, -1].argmax(-1)
    assert (lesson.candidates[:, 99, 1, 0] == second).float().mean() >= 0.8


def test_some_rows_are_continued_by_the_target_itself() -> None:
    target = small_model()
    lessons = write_lessons(target, source(), count=5, depth=1, log=lambda line: None)

    def share_of_own_choices(lesson: Lesson) -> float:
        return float((lesson.candidates[:, 70:-1, 0, 0] == lesson.inputs[:, 71:]).float().mean())

    assert share_of_own_choices(lessons[0]) < 0.5
    assert share_of_own_choices(lessons[4]) > 0.95


def test_kept_lessons_come_back(tmp_path: Path) -> None:
    lesson = made_up_lesson()
    keep_lessons(tmp_path / "lessons.pt", [lesson])
    (found,) = load_lessons(tmp_path / "lessons.pt")
    for name in ("inputs", "candidates", "logits"):
        assert torch.equal(getattr(found, name), getattr(lesson, name))


def test_a_training_row_computes_what_each_text_with_its_masks_would() -> None:
    model, inputs = small_model(), texts(1, 8)
    mask_id = add_mask_token(model)
    layout = lay_out(8, DEPTH, torch.Generator().manual_seed(3))
    masks = torch.full((1, len(layout.anchors) - 8), mask_id)
    together = model(
        input_ids=torch.cat([inputs, masks], dim=1),
        position_ids=(layout.anchors + layout.depths)[None],
        attention_mask=layout.sees[None, None],
    ).logits[0]
    for place, (anchor, depth) in enumerate(zip(layout.anchors.tolist(), layout.depths.tolist(), strict=True)):
        text = torch.cat([inputs[0, : anchor + 1], torch.full((depth,), mask_id)])
        torch.testing.assert_close(together[place], model(input_ids=text[None]).logits[0, -1], atol=1e-3, rtol=1e-4)


def test_a_position_kept_at_a_depth_was_kept_before_and_fewer_are() -> None:
    layout = lay_out(64, DEPTH, torch.Generator().manual_seed(0))
    kept = [set(layout.anchors[layout.depths == depth].tolist()) for depth in range(DEPTH)]
    assert kept[0] == set(range(64))
    assert all(later < earlier for earlier, later in itertools.pairwise(kept))


def test_the_mask_token_is_new_and_told_of_in_the_configuration() -> None:
    model = small_model()
    before = model.get_input_embeddings().weight.detach().clone()
    assert add_mask_token(model) == VOCABULARY
    after = model.get_input_embeddings().weight
    assert torch.equal(after[:VOCABULARY], before)
    torch.testing.assert_close(after[VOCABULARY], before.mean(0))
    assert model.lm_head.weight.data_ptr() == after.data_ptr()
    assert (model.config.vocab_size, model.config.mask_token_id) == (VOCABULARY + 1, VOCABULARY)


@pytest.mark.slow
def test_each_mask_learns_the_answer_of_its_own_depth() -> None:
    torch.manual_seed(0)
    model = Shape(hidden=32, layers=1, heads=2, mlp=32).build(vocab=VOCABULARY, end_id=0)
    mask_id, lesson = add_mask_token(model), made_up_lesson()
    budget = Budget(steps=300, seconds=1e6, learning_rate=1e-2, dropout=0.0)
    train_parallel(model, [lesson], budget, seed=0, checkpoint=None, log=lambda line: None)
    paths = look_ahead(model.eval(), lesson.inputs.long(), DEPTH, mask_id=mask_id)
    guesses = first_choices(paths, vocabulary=VOCABULARY)
    assert (guesses == lesson.candidates[..., 0]).float().mean() > 0.95


def test_resumed_run_ends_with_the_weights_of_the_unbroken_one(tmp_path: Path) -> None:
    kept, halfway = tmp_path / "run.pt", tmp_path / "halfway.pt"
    lessons = [made_up_lesson(), made_up_lesson(seed=1)]
    budget = Budget(steps=4, seconds=1e6, learning_rate=1e-3, dropout=0.0, check_every_steps=2)

    def run(checkpoint: Path) -> "transformers.LlamaForCausalLM":
        model = small_model()
        add_mask_token(model)
        steps, _ = train_parallel(
            model, lessons, budget, seed=0, checkpoint=checkpoint, log=lambda line: save_halfway()
        )
        assert steps == 4
        return model

    def save_halfway() -> None:
        if kept.exists() and not halfway.exists():
            shutil.copy(kept, halfway)

    pairs = zip(run(kept).parameters(), run(halfway).parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the shipped demo to which a two-step run was told to add twice."""
    corpus, out = tmp_path_factory.mktemp("texts"), tmp_path_factory.mktemp("demo")
    (corpus / "story.txt").write_text(STORY, encoding="utf-8")
    for name in ("target", "draft"):
        shutil.copytree(DEMO / name, out / name)
    shutil.copy(DEMO / "README.md", out / "README.md")
    options = ["--corpus", str(corpus), "--demo", str(out), "--lessons", "1", "--steps", "2", "--threads", "1"]
    for _ in range(2):
        train_parallel_draft.main([*options, "--checkpoints", str(out / "kept")])
    return out


@pytest.mark.nightly
def test_the_directory_is_a_llama_with_one_token_more_and_the_card_is_extended_once(trained: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(trained / "parallel", local_files_only=True)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert (model.config.vocab_size, model.config.mask_token_id, model.dtype) == (4097, 4096, torch.bfloat16)
    for name in TOKENIZER_FILES:
        assert (trained / "parallel" / name).read_bytes() == (DEMO / "draft" / name).read_bytes()
    old, card = ((folder / "README.md").read_text(encoding="utf-8") for folder in (DEMO, trained))
    table = [line for line in card.split("\n\n")[2].splitlines() if line.startswith("|")]
    assert table[0] == "| | target | draft | parallel |"
    assert {line.count("|") for line in table} == {5}
    assert "| 869,120 |" in card
    assert card.count("## The parallel draft") == card.count("## Texts") == 1
    assert len(stated_shares(trained / "README.md", "parallel")) == train_parallel_draft.DEPTH
    assert card.partition("## Texts")[2] == old.partition("## Texts")[2]
    assert card.partition("| | target")[0] == old.partition("| | target")[0]


def test_the_shipped_model_has_the_targets_tokenizer_and_a_mask_token_behind_it() -> None:
    ours, theirs = (json.loads((DEMO / name / "config.json").read_text()) for name in ("parallel", "target"))
    assert ours["mask_token_id"] == theirs["vocab_size"] == ours["vocab_size"] - 1

    for name in TOKENIZER_FILES:
        assert (DEMO / "parallel" / name).read_bytes() == (DEMO / "target" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.skipif(not CORPUS.is_dir(), reason="the training texts are not on this machine")
def test_acceptance_on_a_part_of_the_held_out_text_is_about_what_the_card_says() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO / "target", local_files_only=True)
    passages = demo_corpus.load_corpus(CORPUS, seed=0).held_out["tinyshakespeare"]
    ids = [token for text in passages for token in tokenizer.encode(text + "<|end|>")][:1024]
    parallel, draft, target = (
        transformers.AutoModelForCausalLM.from_pretrained(DEMO / name, local_files_only=True).float().eval()
        for name in ("parallel", "draft", "target")
    )
    found = measure([(parallel, 4096), (draft, None)], target, [ids], 3)
    for name, one in zip(("parallel", "draft"), found, strict=True):
        assert one.conditional == pytest.approx(stated_shares(DEMO / "README.md", name)[:3], abs=SHARE_TOLERANCE)


def made_up_lesson(*, seed: int = 0) -> Lesson:
    """Return a lesson whose answer at depth d behind any token x is (x + d) mod V, with certainty."""
    inputs = torch.randint(1, VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(seed))
    answers = (inputs[:, :, None] + torch.arange(DEPTH)) % VOCABULARY
    candidates = torch.stack([answers, (answers + 1) % VOCABULARY], dim=-1)
    logits = torch.tensor([20.0, 0.0]).expand(candidates.shape)
    return Lesson(inputs.short(), candidates.short(), logits.half())


def stated_shares(card: Path, name: str) -> list[float]:
    """Return the shares (0 .. 1) of guesses accepted after accepted ones from a model card, by guess."""
    row = re.search(rf"\| `{name}`: the same, [^|]*\|([^\n]*)\|\n", card.read_text(encoding="utf-8"))
    assert row is not None, f"{card} states no acceptance of {name}"
    return [float(cell.strip().rstrip("%")) / 100 for cell in row[1].split("|")]
