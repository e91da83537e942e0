"""Text for models that can read: the decisions of this repository, as a model's tokenizer cuts them; and what engines are to score."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

__all__ = ["scored_texts", "token_ids"]

NUM_BYTES = 260
"""Token ids below may be single bytes, whose probability a server that waits for whole characters does not tell."""
TEXTS = Path(__file__).resolve().parents[2] / "docs" / "decisions"


def token_ids(model: Path) -> tuple[list[int], list[int]]:
    """Return all decisions as token ids, one after the other.

    Args:
        model: Directory with a tokenizer, or a GGUF file.

    Returns:
        What the model expects before any text, and the text.
    """
    from trencadis.text import load_tokenizer

    tokenizer = load_tokenizer(str(model))
    text = "\n\n".join(file.read_text() for file in sorted(TEXTS.glob("[0-9]*.md")))
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    word = tokenizer.encode("a", add_special_tokens=False)
    before = tokenizer.encode("a")
    return list(before[: len(before) - len(word)]), ids


def scored_texts(
    *, num_texts: int, length: int, vocab_size: int, beginning: Sequence[int] = (), text: Sequence[int] = ()
) -> list[list[int]]:
    """Return what every engine is to tell the probability of: passages spread over a text, or tokens drawn evenly. Pure.

    Args:
        num_texts: How many.
        length: Of each, tokens.
        vocab_size: Number of token ids.
        beginning: Tokens that stand before each passage.
        text: Token ids, longer than all passages together, or none.
    """
    if not text:
        source = random.Random("scored")
        return [[source.randrange(NUM_BYTES, vocab_size) for _ in range(length)] for _ in range(num_texts)]
    gap = len(text) // num_texts
    return [[*beginning, *text[at * gap : at * gap + length]] for at in range(num_texts)]
