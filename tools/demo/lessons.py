"""What the parallel draft model learns from: rows of text, and what the target says ahead of every position.

Lives here: the rows, the target's answers, their file. Does not live here: the training loop.

Shape legend: B rows of a batch, T tokens of a row, K tokens ahead, C candidates that are kept of a distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from demo.ahead import look_ahead
from demo.training import BATCH_TOKENS, TokenSource

CANDIDATES = 8
ROW_LENGTH = 256
# Every so many lessons one has rows this long, so that masks far from the start of a text are learnt too.
LONG_ROW_LENGTH, LONG_EVERY = 1024, 16
# Drafts are asked for in the target's own text, which is plainer than its books: two lessons in six are written by it.
WRITTEN_BY_TARGET = {4: 0.0, 5: 0.8}
PROMPT_SHARE = 0.25


@dataclass(frozen=True)
class Lesson:
    """Rows and the target's answers along its greedy continuation of each of their positions.

    `inputs` [B, T] and `candidates` [B, T, K, C] are token ids, likeliest candidate first; `logits` [B, T, K, C] are
    the candidates' logits. Ids are kept in 16 bits: the vocabulary has 4096.
    """

    inputs: Tensor
    candidates: Tensor
    logits: Tensor


def write_lessons(
    target: LlamaForCausalLM, source: TokenSource, *, count: int, depth: int, log: Callable[[str], None]
) -> list[Lesson]:
    """Return `count` lessons of `BATCH_TOKENS` tokens, some over the corpus and some over text of the target's own.

    Args:
        target: In evaluation mode; bfloat16 is precise enough and three times as fast as float32.
        source: Rows of the corpus.
        count: Lessons to write.
        depth: Tokens to look ahead of each position.
        log: Gets a line now and then.
    """
    lessons = []
    for inputs in _batches(target, source, count):
        tops = [logits.topk(CANDIDATES, dim=-1) for logits in look_ahead(target, inputs, depth)]
        candidates = torch.stack([top.indices for top in tops], dim=2)
        values = torch.stack([top.values for top in tops], dim=2)
        lessons.append(Lesson(inputs.short(), candidates.short(), values.half()))
        if len(lessons) % 20 == 0:
            log(f"lesson {len(lessons)} of {count}")
    return lessons


def _batches(target: LlamaForCausalLM, source: TokenSource, count: int) -> Iterator[Tensor]:
    """Yield inputs [B, T]."""
    for index in range(count):
        length = LONG_ROW_LENGTH if index % LONG_EVERY == LONG_EVERY - 1 else ROW_LENGTH
        rows = source.rows(BATCH_TOKENS // length, length)[:, :-1]
        temperature = WRITTEN_BY_TARGET.get(index % 6)
        yield rows if temperature is None else _rewrite(target, rows, temperature)


def _rewrite(target: LlamaForCausalLM, rows: Tensor, temperature: float) -> Tensor:
    """Return rows [B, T] that begin as the given ones and go on as the target does."""
    prompt = rows[:, : int(rows.shape[1] * PROMPT_SHARE)]
    options = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    wanted = rows.shape[1] - prompt.shape[1]
    lengths = {"min_new_tokens": wanted, "max_new_tokens": wanted}
    text: Tensor = target.generate(prompt, attention_mask=torch.ones_like(prompt), **lengths, **options)
    return text


def keep_lessons(path: Path, lessons: list[Lesson]) -> None:
    """Write lessons to a file that `load_lessons` reads; a reader never sees half of it."""
    fresh = path.with_suffix(".new")
    torch.save([(one.inputs, one.candidates, one.logits) for one in lessons], fresh)
    fresh.replace(path)


def load_lessons(path: Path) -> list[Lesson]:
    """Read what `keep_lessons` wrote."""
    return [Lesson(*parts) for parts in torch.load(path, weights_only=True)]
