"""What the distilled draft model learns from: texts that the target wrote, and what it says at each of their positions.

Lives here: prompts, the target's answers, the loop that imitates them. Does not live here: files of the package.

Shape legend: B rows of a batch, T tokens of a row, C candidates that are kept of a distribution, V vocabulary.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo.measure import autocast
from demo.training import BATCH_TOKENS, Budget, make_optimiser, rate_share

CANDIDATES = 8
ANSWER_TOKENS = 160
ROW_LENGTH = 256
GREEDY_SHARE = 0.75
# Between the target's distribution (1) and its first choice (0): a draft is judged by its first choice.
GOAL_TEMPERATURE = 0.5


def read_questions(path: Path, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Return the questions of a file with a JSON object a line, `question` in each, as chats that wait for an answer."""
    questions = [json.loads(line)["question"] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    turns = [[{"role": "user", "content": question}] for question in questions]
    texts = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    return [tokenizer.encode(text) for text in texts]


@torch.no_grad()
def write_answers(
    target: LlamaForCausalLM, prompts: Sequence[list[int]], *, seed: int, log: Callable[[str], None]
) -> list[list[int]]:
    """Return each prompt with `ANSWER_TOKENS` tokens of the target after it, most of them its first choices.

    Args:
        target: In evaluation mode.
        prompts: Token ids; those of about one length are answered together.
        seed: Seed of the draws.
        log: Gets a line now and then.
    """
    torch.manual_seed(seed)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    groups = [order[first : first + 64] for first in range(0, len(order), 64)]
    found: list[list[int]] = []
    for number, group in enumerate(groups):
        length = len(prompts[group[0]])  # cut to the shortest, from the front: the end asks for the answer
        inputs = torch.tensor([prompts[index][-length:] for index in group])
        draws = number % 4 >= 4 * GREEDY_SHARE
        options = {"do_sample": True, "temperature": 0.8, "top_k": 0} if draws else {"do_sample": False}
        lengths = {"min_new_tokens": ANSWER_TOKENS, "max_new_tokens": ANSWER_TOKENS}
        # No token ends an answer: what follows the first end is text of the target as well.
        ends = {"eos_token_id": None, "pad_token_id": 0}
        with autocast(enabled=True):
            rows = target.generate(inputs, attention_mask=torch.ones_like(inputs), **lengths, **options, **ends)
        found += rows.tolist()
        log(f"answers {len(found)} of {len(prompts)}")
    return found


@torch.no_grad()
def say(target: LlamaForCausalLM, texts: Sequence[list[int]], *, seed: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return batches of inputs [B, T], the target's likeliest tokens after each [B, T, C], and their logits.

    Texts are shuffled, put one after another and cut into rows, so that a row may hold the end of one and the start of another.
    """
    shuffled = random.Random(seed).sample(list(texts), len(texts))
    stream = torch.tensor([token for text in shuffled for token in text])
    count = len(stream) // BATCH_TOKENS * BATCH_TOKENS
    batches = []
    for inputs in stream[:count].view(-1, BATCH_TOKENS // ROW_LENGTH, ROW_LENGTH):
        with autocast(enabled=True):
            top = target(input_ids=inputs, use_cache=False).logits.float().topk(CANDIDATES, dim=-1)
        batches.append((inputs.short(), top.indices.short(), top.values.half()))
    return batches


def imitate(
    model: LlamaForCausalLM,
    batches: Sequence[tuple[Tensor, Tensor, Tensor]],
    budget: Budget,
    *,
    seed: int,
    log: Callable[[str], None],
) -> tuple[int, float]:
    """Train a model to say what the target says; return the number of steps and the seconds they took.

    Args:
        model: Trained in place.
        batches: As `say` returns them; shown in a new order each round.
        budget: Its steps, seconds and learning rate.
        seed: Seed of the orders.
        log: Gets a line now and then.
    """
    optimiser = make_optimiser(model, budget.learning_rate)
    started, step, losses = time.monotonic(), 0, list[float]()
    while (progress := max(step / budget.steps, (time.monotonic() - started) / budget.seconds)) < 1.0:
        for group in optimiser.param_groups:
            group["lr"] = budget.learning_rate * rate_share(step, progress)
        turn, index = divmod(step, len(batches))
        order = random.Random(f"{seed}:{turn}").sample(range(len(batches)), len(batches))
        losses.append(_step(model, optimiser, *batches[order[index]]))
        step += 1
        if step % budget.check_every_steps == 0:
            log(f"step {step} progress {progress:.3f} loss {sum(losses) / len(losses):.4f}")
            losses.clear()
    return step, time.monotonic() - started


def _step(
    model: LlamaForCausalLM, optimiser: torch.optim.Optimizer, inputs: Tensor, candidates: Tensor, logits: Tensor
) -> float:
    """Take one optimiser step; return the cross entropy against the target's sharpened candidates, nats per token."""
    model.train()
    with autocast(enabled=True):
        said = model(input_ids=inputs.long(), use_cache=False).logits
    goal = (logits.float() / GOAL_TEMPERATURE).softmax(-1)
    loss = -(goal * said.float().log_softmax(-1).gather(-1, candidates.long())).sum(-1).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return float(loss.detach())
