"""Text for models that can read: the decisions of this repository, as a model's tokenizer cuts them."""

from __future__ import annotations

from pathlib import Path

__all__ = ["token_ids"]

TEXTS = Path(__file__).resolve().parents[2] / "docs" / "decisions"


def token_ids(model: Path) -> list[int]:
    """Return all decisions as token ids, one after the other.

    Args:
        model: Directory with ``tokenizer.json``.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "\n\n".join(file.read_text() for file in sorted(TEXTS.glob("[0-9]*.md")))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids
