"""Window hashes against their definition."""

from __future__ import annotations

import numpy as np
import pytest

from trencadis_kv.connectors.blend.prompt import WindowHash

PRIME = 2**31 - 1


def by_definition(tokens, window, base):
    return [
        sum(tokens[i + k] * pow(base, k, PRIME) for k in range(window)) % PRIME for i in range(len(tokens) - window + 1)
    ]


@pytest.mark.parametrize("length", [0, 1, 4, 5, 6, 200])
@pytest.mark.parametrize("base", [2, 12345, PRIME - 2])
def test_hashes_are_those_of_the_definition(length, base):
    tokens = np.random.default_rng(length).integers(0, 2**31 - 1, length).astype(np.int32)
    found = WindowHash(5, base=base).of(tokens)
    assert found.tolist() == by_definition(tokens.tolist(), 5, base)


def test_hash_of_a_run_does_not_depend_on_where_it_stands():
    windows = WindowHash(16)
    run = np.random.default_rng(0).integers(0, 50_000, 16).astype(np.int32)
    for before in (0, 1, 999, 70_000):
        text = np.concatenate([np.full(before, 7, np.int32), run, np.full(3, 9, np.int32)])
        assert windows.of(text)[before] == windows.of(run)[0]


def test_base_is_drawn_anew_each_time():
    """Two processes, or two connectors, do not share it: a collision found in one is none in the other."""
    tokens = np.arange(1, 9, dtype=np.int32)
    assert len({int(WindowHash(8).of(tokens)[0]) for _ in range(8)}) == 8
