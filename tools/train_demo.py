"""Train the demo model, its draft model and their tokenizer, and write them where the package keeps them.

Example: `python tools/train_demo.py --corpus ../shared/data/corpus --out core/trencadis/demo --minutes 45`

On cores that others use too, set OMP_WAIT_POLICY=PASSIVE or `--threads 1`: threads that spin while they wait for
each other made a run more than ten times slower.

    corpus -> tokenizer -> target (next token) -> draft (next token, then the target's distribution) -> card
"""

import argparse
import random
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo.corpus import END, Corpus, load_corpus
from demo.measure import greedy_agreement, held_out_loss
from demo.publish import Result, build_tokenizer, save_model, write_card
from demo.training import Budget, Shape, TokenSource, Trained, train

TARGET = Shape(hidden=256, layers=5, heads=8, mlp=640)
DRAFT = Shape(hidden=128, layers=2, heads=4, mlp=320)
TARGET_SHARE = 0.75
# bfloat16 is what accelerators compute in; float16 is taken only where bfloat16 would cost held-out loss.
BFLOAT16_TOLERANCE = 0.002
UNLIMITED_STEPS = 10**9


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the whole training from the command line; return the exit status."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    corpus = load_corpus(options.corpus, seed=options.seed)
    tokenizer = build_tokenizer(passage.text for passage in corpus.passages)
    held_out = [token_ids(tokenizer, texts) for texts in corpus.held_out.values()]
    options.out.mkdir(parents=True, exist_ok=True)

    target = _train_target(options, corpus, tokenizer, held_out)
    target_result = _publish(target, corpus, tokenizer, held_out, options.out / "target")
    draft = _train_draft(options, corpus, tokenizer, held_out, target.model)
    draft_result = _publish(draft, corpus, tokenizer, held_out, options.out / "draft")

    write_card(
        options.out / "README.md",
        target_result,
        draft_result,
        agreement=greedy_agreement(draft.model, target.model, held_out),
        tokenizer=tokenizer,
        command=shlex.join(["python", "tools/train_demo.py", *(sys.argv[1:] if arguments is None else arguments)]),
    )
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="directory of .txt files")
    parser.add_argument("--out", type=Path, required=True, help="directory that gets target/, draft/ and README.md")
    parser.add_argument("--steps", type=int, default=UNLIMITED_STEPS, help="most optimiser steps of a model")
    parser.add_argument("--draft-steps", type=int, help="the same for the draft model alone")
    parser.add_argument("--minutes", type=float, default=45.0, help="training time of both models together")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, shuffles and chats")
    parser.add_argument(
        "--checkpoints", type=Path, help="directory to keep unfinished runs in, and to resume them from"
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    return parser.parse_args(arguments)


def _train_target(
    options: argparse.Namespace, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, held_out: list[list[int]]
) -> Trained:
    model = TARGET.build(vocab=len(tokenizer), end_id=int(tokenizer.eos_token_id))
    seconds = options.minutes * 60 * TARGET_SHARE
    budget = Budget(steps=options.steps, seconds=seconds, learning_rate=1.5e-3, dropout=0.15)
    return train(model, token_source(corpus, tokenizer, options.seed), held_out, budget, **_keeping(options, "target"))


def _train_draft(
    options: argparse.Namespace,
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    held_out: list[list[int]],
    target: LlamaForCausalLM,
) -> Trained:
    model = DRAFT.build(vocab=len(tokenizer), end_id=int(tokenizer.eos_token_id))
    seconds = options.minutes * 60 * (1.0 - TARGET_SHARE)
    steps = options.steps if options.draft_steps is None else options.draft_steps
    budget = Budget(steps=steps, seconds=seconds, learning_rate=3e-3, dropout=0.0, distil_from=0.3)
    source = token_source(corpus, tokenizer, options.seed + 1)
    return train(model, source, held_out, budget, teacher=target.eval(), **_keeping(options, "draft"))


def token_source(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int) -> TokenSource:
    """Return the endless rows of the corpus' training part."""
    passages = [(token_ids(tokenizer, [passage.text]), passage.weight) for passage in corpus.passages]
    chats = [token_ids(tokenizer, [chat.text]) for chat in corpus.chats]
    return TokenSource(passages, chats, random.Random(seed))


def token_ids(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[int]:
    """Return the ids of the texts in a row, the end token after each."""
    return [token for text in texts for token in tokenizer.encode(text + END)]


def _publish(
    trained: Trained, corpus: Corpus, tokenizer: PreTrainedTokenizerFast, held_out: list[list[int]], out: Path
) -> Result:
    """Save the model in the type that keeps its held-out loss, and measure it as saved."""
    exact = {name: value.clone() for name, value in trained.model.state_dict().items()}
    losses = {}
    for dtype in (torch.float16, torch.bfloat16):
        trained.model.load_state_dict({name: value.to(dtype).float() for name, value in exact.items()})
        losses[dtype] = held_out_loss(trained.model, held_out, fast=False)
    gap = losses[torch.bfloat16].per_token - losses[torch.float16].per_token
    dtype = torch.bfloat16 if gap <= BFLOAT16_TOLERANCE else torch.float16
    trained.model.load_state_dict({name: value.to(dtype).float() for name, value in exact.items()})
    save_model(trained.model, tokenizer, out, dtype)
    size = sum(len(text.encode()) for texts in corpus.held_out.values() for text in texts)
    return Result(trained, losses[dtype], size, dtype)


def _keeping(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the arguments of `train` that say where a run is kept and told of."""
    if options.checkpoints is not None:
        options.checkpoints.mkdir(parents=True, exist_ok=True)
    path = None if options.checkpoints is None else options.checkpoints / f"{name}.pt"
    return {"checkpoint": path, "log": lambda line: print(time.strftime("%H:%M:%S"), name, line, flush=True)}


if __name__ == "__main__":
    sys.exit(main())
