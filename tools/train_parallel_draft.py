"""Train the demo's parallel draft model from its draft model, and write it where the package keeps it.

Example: `python tools/train_parallel_draft.py --corpus ../shared/data/corpus --demo core/trencadis/demo`

Run `tools/train_demo.py` first: this tool reads its `target/` and `draft/`, adds `parallel/` beside them and says so
in its card. One thread is enough (`--threads 1`); with glibc, MALLOC_MMAP_THRESHOLD_=4000000000 and
MALLOC_TRIM_THRESHOLD_=4000000000 keep large buffers between steps, which made a step a third faster.

    corpus -> lessons (what the target says ahead of every position) -> draft + mask token -> parallel draft -> card
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo.ahead import Acceptance, measure
from demo.corpus import Corpus, load_corpus
from demo.lessons import Lesson, keep_lessons, load_lessons, write_lessons
from demo.measure import held_out_loss
from demo.parallel import add_mask_token, train_parallel
from demo.parallel_card import extend_card
from demo.publish import Result, save_model
from demo.training import BATCH_TOKENS, Budget, Trained
from train_demo import UNLIMITED_STEPS, token_ids, token_source

DEPTH = 8
PEAK_LEARNING_RATE = 2e-3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training from the command line; return the exit status."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    corpus = load_corpus(options.corpus, seed=options.seed)
    target, draft = (_load(options.demo / name) for name in ("target", "draft"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.demo / "draft", local_files_only=True)
    held_out = [token_ids(tokenizer, texts) for texts in corpus.held_out.values()]

    lessons = _lessons(options, corpus, tokenizer)
    parallel = _load(options.demo / "draft")
    mask_id = add_mask_token(parallel)
    result = _train(options, parallel, lessons, corpus, held_out)
    save_model(parallel, tokenizer, options.demo / "parallel", result.dtype)

    ours, theirs = _measure([(parallel, mask_id), (draft, None)], target, held_out, options)
    command = shlex.join(
        ["python", "tools/train_parallel_draft.py", *(sys.argv[1:] if arguments is None else arguments)]
    )
    extend_card(options.demo / "README.md", result, ours, theirs, lessons=len(lessons), command=command)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="directory of .txt files")
    parser.add_argument("--demo", type=Path, required=True, help="directory with target/, draft/ and README.md")
    parser.add_argument("--lessons", type=int, default=200, help=f"lessons of {BATCH_TOKENS} tokens to learn from")
    parser.add_argument("--steps", type=int, default=UNLIMITED_STEPS, help="most optimiser steps")
    parser.add_argument("--minutes", type=float, default=15.0, help="training time, without the writing of lessons")
    parser.add_argument("--seed", type=int, default=0, help="seed of rows, orders and layouts")
    parser.add_argument(
        "--checkpoints", type=Path, help="directory to keep lessons and unfinished runs in, and to resume them from"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    return parser.parse_args(arguments)


def _load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype).eval()


def _lessons(options: argparse.Namespace, corpus: Corpus, tokenizer: PreTrainedTokenizerFast) -> list[Lesson]:
    """Return the kept lessons, or write them first."""
    kept = _kept(options, "lessons.pt")
    if kept is not None and kept.exists():
        return load_lessons(kept)
    target = _load(options.demo / "target", torch.bfloat16)
    source = token_source(corpus, tokenizer, options.seed + 2)
    lessons = write_lessons(target, source, count=options.lessons, depth=DEPTH, log=_log)
    if kept is not None:
        keep_lessons(kept, lessons)
    return lessons


def _train(
    options: argparse.Namespace,
    model: LlamaForCausalLM,
    lessons: list[Lesson],
    corpus: Corpus,
    held_out: list[list[int]],
) -> Result:
    """Train the model, round its weights as they are saved, and measure it."""
    budget = Budget(steps=options.steps, seconds=options.minutes * 60, learning_rate=PEAK_LEARNING_RATE, dropout=0.0)
    checkpoint = _kept(options, "parallel.pt")
    steps, seconds = train_parallel(model, lessons, budget, seed=options.seed, checkpoint=checkpoint, log=_log)
    model.eval().load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
    size = sum(len(text.encode()) for texts in corpus.held_out.values() for text in texts)
    rounds = math.ceil(steps / len(lessons))
    trained = Trained(model, steps, steps, steps * BATCH_TOKENS, rounds, seconds)
    return Result(trained, held_out_loss(model, held_out, fast=False), size, torch.bfloat16)


def _measure(
    drafts: list[tuple[LlamaForCausalLM, int | None]],
    target: LlamaForCausalLM,
    held_out: list[list[int]],
    options: argparse.Namespace,
) -> list[Acceptance]:
    found = measure(drafts, target, held_out, DEPTH)
    for (_, mask_id), one in zip(drafts, found, strict=True):
        shares = " ".join(f"{share:.3f}" for share in one.conditional)
        _log(f"{'draft' if mask_id is None else 'parallel'} accepted after accepted ones: {shares}")
    return found


def _kept(options: argparse.Namespace, name: str) -> Path | None:
    """Return where something of an unfinished run is kept, None if nothing is."""
    if options.checkpoints is None:
        return None
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    return Path(options.checkpoints) / name


def _log(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
