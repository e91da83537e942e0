"""Which requests begin alike, and for how long: all that a record needs to know of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from trencadis.records import Int32Array

__all__ = ["shared_beginnings"]


def shared_beginnings(texts: Sequence[Int32Array]) -> list[tuple[int, int]]:
    """Return for each text another one, and how many first tokens of it are the same; -1 and 0 for none. Pure.

    In alphabetical order a text has its longest beginning in common with its predecessor, of all that come before it. So what any two
    have in common follows from the answer: of texts with these beginnings, and otherwise of tokens that nothing else has, every pair
    begins alike for as long as here. Following the other text leads to one without, never in a circle.

    Args:
        texts: Token ids, int32.
    """
    # Of big-endian numbers the order of the bytes is that of the tokens.
    keys = [text.astype(">u4").tobytes() for text in texts]
    order = sorted(range(len(texts)), key=keys.__getitem__)
    found = [(-1, 0)] * len(texts)
    for before, after in itertools.pairwise(order):
        one, other = texts[before], texts[after]
        length = min(len(one), len(other))
        differs = np.flatnonzero(one[:length] != other[:length])
        num_alike = int(differs[0]) if differs.size else length
        if num_alike:
            found[after] = before, num_alike
    return found
