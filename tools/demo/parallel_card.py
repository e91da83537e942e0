"""The words of the model card on the parallel draft model.

Lives here: its column of the table and its section. Does not live here: the rest of the card (`demo.publish`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from demo.ahead import Acceptance
from demo.publish import Result

HEADING = "## The parallel draft"
NEXT_HEADING = "## Texts"
COLUMN = "parallel"


def extend_card(
    path: Path, result: Result, parallel: Acceptance, draft: Acceptance, *, lessons: int, command: str
) -> None:
    """Write the model's column and section into a card; those of an earlier run are replaced.

    Args:
        path: A card as `demo.publish.write_card` writes it.
        result: The model as it was saved.
        parallel: Its acceptance on the held-out text.
        draft: The draft model's acceptance on the same text.
        lessons: Lessons it learnt from.
        command: What makes the model again.
    """
    text = _without_earlier(path.read_text(encoding="utf-8"))
    text = _with_column(text, column(result))
    section = SECTION.format(
        heading=HEADING,
        numbers="\n".join(_rows(parallel, draft)),
        positions=parallel.positions,
        guesses=len(parallel.accepted),
        masks=len(parallel.accepted) - 1,
        mask_id=result.trained.model.config.mask_token_id,
        lessons=lessons,
        command=command,
    )
    path.write_text(text.replace(NEXT_HEADING, f"{section}\n{NEXT_HEADING}", 1), encoding="utf-8")


def column(result: Result) -> dict[str, str]:
    """Return the cells of the card's table, by the name of the line."""
    config, trained = result.trained.model.config, result.trained
    return {
        "": COLUMN,
        "---": "---",
        "hidden size": f"{config.hidden_size}",
        "layers": f"{config.num_hidden_layers}",
        "query heads / key-value heads": f"{config.num_attention_heads} / {config.num_key_value_heads}",
        "MLP size": f"{config.intermediate_size}",
        "parameters": f"{trained.model.num_parameters():,}",
        "stored as": str(result.dtype).removeprefix("torch."),
        "training steps (best at)": f"{trained.steps:,} more than draft (the last)",
        "training tokens": f"{trained.tokens:,}",
        "epochs": f"{trained.epochs} over its lessons",
        "training time, minutes": f"{trained.seconds / 60:.1f}",
        "held-out loss, nats per token": f"{result.held_out.per_token:.4f}",
        "held-out perplexity per token": f"{math.exp(result.held_out.per_token):.1f}",
        "held-out bits per byte": f"{result.bits_per_byte:.4f}",
    }


def _without_earlier(text: str) -> str:
    """Return the card as it was before any parallel draft was described."""
    begin, _, rest = text.partition(HEADING)
    if rest:
        text = begin + NEXT_HEADING + rest.partition(NEXT_HEADING)[2]
    if f"| {COLUMN} |" not in text:
        return text
    return "\n".join(re.sub(r"[^|]+\|$", "", line) if cells else line for line, cells in _lines(text))


def _with_column(text: str, cells: Mapping[str, str]) -> str:
    """Return the card with one cell more in each line of its first table."""
    return "\n".join(_longer(line, names, cells) if names else line for line, names in _lines(text))


def _longer(line: str, names: list[str], cells: Mapping[str, str]) -> str:
    cell = cells[names[0]]
    return f"{line}{cell}|" if cell == "---" else f"{line} {cell} |"


def _lines(text: str) -> Iterable[tuple[str, list[str]]]:
    """Yield the card's lines, each with its cells if it belongs to the first table."""
    state = "before"
    for line in text.split("\n"):
        is_row = line.startswith("|")
        if state == "before" and is_row:
            state = "inside"
        elif state == "inside" and not is_row:
            state = "after"
        yield line, [cell.strip() for cell in line.strip("|").split("|")] if state == "inside" else []


def _rows(parallel: Acceptance, draft: Acceptance) -> Iterable[str]:
    """Yield the lines of the section's table."""
    count = len(parallel.accepted)

    def line(name: str, values: Iterable[object]) -> str:
        return f"| {name} | " + " | ".join(map(str, values)) + " |"

    def percents(shares: Iterable[float]) -> list[str]:
        return [f"{share:.1%}" for share in shares]

    yield line("guess", range(1, count + 1))
    yield "|---" * (count + 1) + "|"
    for name, one in (("`parallel`", parallel), ("`draft`", draft)):
        yield line(f"{name}: is the target's token", percents(one.agreement))
        yield line(f"{name}: the same, where all guesses before are right", percents(one.conditional))
        yield line(
            f"{name}: tokens a target step, with so many guesses",
            (f"{one.tokens_per_step(guesses):.2f}" for guesses in range(1, count + 1)),
        )
        yield line(f"{name}: its own forwards for them", range(1, count + 1) if one is draft else [1] * count)


SECTION = """{heading}

`parallel/` is the draft model, trained further to make up to {guesses} guesses in one forward where `draft/` makes one.
After the text it reads up to {masks} mask tokens, all the same one (id {mask_id}, `mask_token_id` in its `config.json`),
at the positions that follow. The output at the last token of the text is the first guess,
that at the j-th mask the guess j tokens further on.
The mask token is the last row of its vocabulary and never a guess: cut its logits to the target's vocabulary.
The tokenizer has no such token.

It learnt from {lessons} lessons of 2,048 tokens: rows of the training texts, one in three of them continued by the target
itself from its first quarter on. The goal at every position was what the target says along its own greedy
continuation of the text so far, sharpened to temperature 0.5; a guess is judged by its first choice.
Only the eight likeliest tokens of each answer were kept, so nothing taught it where the rest of the probability lies:
its held-out loss is poor, and drawing guesses from its distribution is worse than taking its first choice.
The method is PARD (arXiv 2504.18583): one mask token, and at each depth 0.7 of the positions of the depth before.

How often a guess is the target's greedy token, after each of {positions:,} held-out positions
(the target continues each of them by itself, both drafts guess by first choice, float32):

{numbers}

The weights are the last ones; no held-out number chose them. A run limited by minutes does not repeat exactly,
one limited by `--steps` does on the same machine. Made, after the other two, with

```sh
{command}
```
"""
