"""Train the demo's EAGLE-3 head: it drafts from the target's hidden states what the target itself writes.

Example: `python tools/train_head.py --corpus ../shared/data/corpus --questions ../shared/data/prompts/gsm8k_test.jsonl`

Run `tools/train_demo.py` first: this tool reads its `target/`, and adds `head/` beside it. The prompts and the answers are those
of `tools/distil_draft.py`.

    prompts -> the target's answers -> its hidden states, and what it says at each position -> head
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo.answers import ANSWER_TOKENS
from demo.eagle import EagleHead, frequent_tokens, observe, save_head, train_head
from demo.training import Budget
from distil_draft import add_options, kept_answers, log

PEAK_LEARNING_RATE = 2e-3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training from the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--vocabulary", type=int, default=1024, help="draft tokens, the most frequent ones")
    parser.add_argument("--mlp", type=int, default=384, help="size of the head's MLP")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    place = options.demo / "target"
    target = LlamaForCausalLM.from_pretrained(place, local_files_only=True, dtype=torch.float32).eval()
    answers = kept_answers(options, target, PreTrainedTokenizerFast.from_pretrained(place, local_files_only=True))
    target_ids, share = frequent_tokens([text[-ANSWER_TOKENS:] for text in answers], options.vocabulary)
    log(f"{len(target_ids)} draft tokens are {share:.1%} of the answers")
    head = EagleHead(target, target_ids, mlp=options.mlp)
    budget = Budget(steps=options.steps, seconds=options.minutes * 60, learning_rate=PEAK_LEARNING_RATE, dropout=0.0)
    steps, seconds = train_head(head, observe(target, answers, seed=options.seed), budget, seed=options.seed, log=log)
    save_head(head.eval(), options.out or options.demo / "head")
    log(f"{steps} steps in {seconds / 60:.1f} minutes, {sum(p.numel() for p in head.parameters()):,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
