from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis_plugins.sampling.dry import MAX_RUN, Dry, repeats


def _longest_runs(history, breakers):
    """From the definition, one token and one length at a time."""
    found = {}
    for token in set(history) - set(breakers):
        for place in range(1, len(history)):
            if history[place] != token:
                continue
            run = 0
            while run < place and history[place - 1 - run] == history[-1 - run] and history[-1 - run] not in breakers:
                run += 1
            found[token] = max(found.get(token, 0), run)
    return {token: run for token, run in found.items() if run}


@pytest.mark.parametrize("breakers", [(), (2,), (0, 3)])
def test_runs_equal_the_definition(breakers):
    rng = np.random.default_rng(6)
    for _ in range(250):
        history = rng.integers(0, 4, rng.integers(1, 30))
        tokens, runs = repeats(history.astype(np.int32), breakers)
        assert dict(zip(tokens.tolist(), runs.tolist(), strict=True)) == _longest_runs(history.tolist(), breakers)


def test_the_penalty_grows_with_the_run_beyond_the_allowed_length(process, start):
    history = [5, 1, 2, 3, 4, 5, 0, 2, 3]
    params = {"dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 2}
    changed = process(Dry(), [[0.0] * 6], [start(0, history[:4], history[4:], **params)])
    assert changed[0].tolist() == pytest.approx([0, 0, 0, 0, -0.8, 0])
    longer = [1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    changed = process(Dry(), [[0.0] * 6], [start(0, longer, **params)])
    assert changed[0].tolist() == pytest.approx([0, 0, 0, 0, 0, -0.8 * 1.5**2])
    assert process(Dry(), [[0.0] * 6], [start(0, longer, **{**params, "dry_allowed_length": 5})]).abs().sum() == 0


def test_only_the_last_tokens_are_looked_at(process, start):
    params = {"dry_multiplier": 1.0, "dry_allowed_length": 1}
    history = [1, 2, 0, 0, 3, 1]
    assert process(Dry(), [[0.0] * 4], [start(0, history, **params)])[0].tolist() == [0, 0, -1, 0]
    assert process(Dry(), [[0.0] * 4], [start(0, history, dry_range=5, **params)]).abs().sum() == 0
    assert process(Dry(), [[0.0] * 4], [start(0, history, dry_range=6, **params)])[0].tolist() == [0, 0, -1, 0]


def test_a_history_of_one_token_has_a_longest_run_and_a_finite_penalty(process, start):
    tokens, runs = repeats(np.zeros(4 * MAX_RUN, np.int32), ())
    assert (tokens.tolist(), runs.tolist()) == ([0], [MAX_RUN])
    changed = process(Dry(), [[1.0, 0.0]], [start(0, [0] * 60, dry_multiplier=100.0, dry_base=100.0)])
    assert torch.isfinite(changed).all()
    assert changed[0, 0] < -1e29
