"""Train the demo's distilled draft model: its draft model, taught further on what the target itself writes.

Example: `python tools/distil_draft.py --corpus ../shared/data/corpus --questions ../shared/data/prompts/gsm8k_test.jsonl`

Run `tools/train_demo.py` first: this tool reads its `target/` and `draft/`, and adds `distilled/` beside them. Drafts are
asked for in the target's own text, which is plainer than its books: that text is what the model learns from.

    prompts -> the target's answers -> what it says at each position -> draft -> distilled draft
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo.answers import imitate, read_questions, say, write_answers
from demo.corpus import load_corpus
from demo.publish import save_model
from demo.training import Budget
from train_demo import UNLIMITED_STEPS, token_source

PEAK_LEARNING_RATE = 2e-3
PROMPT_LENGTHS = (8, 96)
"""Tokens of a prompt from the corpus: fewest and most."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training from the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    target, draft = (
        LlamaForCausalLM.from_pretrained(options.demo / name, local_files_only=True, dtype=torch.float32).eval()
        for name in ("target", "draft")
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.demo / "draft", local_files_only=True)
    answers = kept_answers(options, target, tokenizer)
    budget = Budget(steps=options.steps, seconds=options.minutes * 60, learning_rate=PEAK_LEARNING_RATE, dropout=0.0)
    steps, seconds = imitate(draft, say(target, answers, seed=options.seed), budget, seed=options.seed, log=log)
    save_model(draft.eval(), tokenizer, options.out or options.demo / "distilled", torch.bfloat16)
    log(f"{steps} steps in {seconds / 60:.1f} minutes over {sum(map(len, answers)):,} tokens")
    return 0


def kept_answers(
    options: argparse.Namespace, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> list[list[int]]:
    """Return the kept answers, or write them first."""
    kept: Path | None = options.answers
    if kept is not None and kept.exists():
        found: list[list[int]] = json.loads(kept.read_text(encoding="utf-8"))
        return found
    answers = write_answers(target, _prompts(options, tokenizer), seed=options.seed, log=log)
    if kept is not None:
        kept.write_text(json.dumps(answers), encoding="utf-8")
    return answers


def _prompts(options: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Return the questions, and as many beginnings of rows of the corpus."""
    questions = read_questions(options.questions, tokenizer)[: options.prompts]
    source = token_source(load_corpus(options.corpus, seed=options.seed), tokenizer, options.seed + 3)
    rng, (least, most) = random.Random(options.seed), PROMPT_LENGTHS
    beginnings = [source.rows(1, rng.randint(least, most))[0, :-1].tolist() for _ in questions]
    return [*questions, *beginnings]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a tool that teaches a drafter what the target writes."""
    parser.add_argument("--corpus", type=Path, required=True, help="directory of .txt files")
    parser.add_argument("--questions", type=Path, required=True, help="a JSON object a line with a question")
    parser.add_argument(
        "--demo", type=Path, default=Path("core/trencadis/demo"), help="directory with target/ and draft/"
    )
    parser.add_argument("--out", type=Path, help="directory of the result; by default beside the target")
    parser.add_argument("--prompts", type=int, default=1319, help="most questions, and as many other prompts")
    parser.add_argument("--answers", type=Path, help="file to keep the target's answers in, and to read them from")
    parser.add_argument("--steps", type=int, default=UNLIMITED_STEPS, help="most optimiser steps")
    parser.add_argument("--minutes", type=float, default=15.0, help="training time, without the writing of answers")
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts, draws and orders")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")


def log(line: str) -> None:
    """Write a line with the time."""
    print(time.strftime("%H:%M:%S"), line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
