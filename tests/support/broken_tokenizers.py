"""Tokenizers of the demo model that panic: their Rust raises a class beside ``Exception``."""

from __future__ import annotations

import shutil
from pathlib import Path

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, pre_tokenizers

from trencadis.text.tokenizer import resolve_model_path

__all__ = ["panics_at_a_token", "panics_at_texts"]


def panics_at_texts(directory: Path) -> str:
    """Make a tokenizer that panics at each text, and return its directory."""
    rust = _demo(directory)
    rust.pre_tokenizer = pre_tokenizers.FixedLength(0)
    rust.save(str(directory / "tokenizer.json"))
    return str(directory)


def panics_at_a_token(directory: Path, token: str) -> str:
    """Make a tokenizer that panics when it decodes a token of one character, and return its directory."""
    rust = _demo(directory)
    rust.decoder = decoders.Sequence([decoders.Strip(token, 0, 5), decoders.ByteLevel()])
    rust.save(str(directory / "tokenizer.json"))
    return str(directory)


def _demo(directory: Path) -> RustTokenizer:
    demo = Path(resolve_model_path("demo"))
    directory.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo / name, directory)
    return RustTokenizer.from_file(str(demo / "tokenizer.json"))
