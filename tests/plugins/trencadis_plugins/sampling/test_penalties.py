from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from trencadis_plugins.sampling.penalties import Penalties


def _by_definition(logits, prompt, output, params):
    result = logits.astype(np.float64)
    for token in range(len(result)):
        if token in (*prompt, *output):
            r = params["repetition_penalty"]
            result[token] = result[token] / r if result[token] > 0 else result[token] * r
        count = output.count(token)
        result[token] -= params["frequency_penalty"] * count + params["presence_penalty"] * (count > 0)
    return result


def test_the_published_vector_is_reproduced(process, start):
    row = start(
        0,
        prompt=[0, 1],
        output=[1, 2, 1],
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.6,
    )
    processed = process(Penalties(), [[1, -1, 0.5, 0]], [row])[0].tolist()
    assert processed == pytest.approx([0.769231, -2.7, -0.615385, 0], abs=1e-6)


def test_random_histories_equal_the_definition(process, start):
    rng = np.random.default_rng(0)
    for _ in range(60):
        num_rows, vocab_size = int(rng.integers(1, 5)), int(rng.integers(1, 30))
        logits = rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32)
        logits[rng.random(logits.shape) < 0.1] = -np.inf
        starts, expected = [], []
        for row in range(num_rows):
            prompt = rng.integers(0, vocab_size, rng.integers(1, 20)).tolist()
            output = rng.integers(0, vocab_size, rng.integers(0, 20)).tolist()
            params = {
                "repetition_penalty": float(rng.uniform(0.5, 2)),
                "frequency_penalty": float(rng.uniform(-2, 2)),
                "presence_penalty": float(rng.uniform(-2, 2)),
            }
            starts.append(start(row, prompt, output, **params))
            expected.append(_by_definition(logits[row], prompt, output, params))
        processed = process(Penalties(), logits, starts).numpy()
        np.testing.assert_allclose(processed, np.array(expected), atol=2e-5)


def test_repetition_equals_that_of_transformers(process, start):
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(1)
    for penalty in (0.7, 1.3, 2.0):
        logits = rng.normal(0, 3, (1, 50)).astype(np.float32)
        history = rng.integers(0, 50, 40)
        expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.from_numpy(history)[None], torch.tensor(logits))
        row = start(0, history[:10].tolist(), history[10:].tolist(), repetition_penalty=penalty)
        assert torch.equal(process(Penalties(), logits, [row]), expected)


def test_rows_of_drafts_are_penalised_as_one_token_at_a_time(process, start, context_of):
    params = {"repetition_penalty": 1.7, "frequency_penalty": 0.3, "presence_penalty": 0.2}
    tokens, logits = [3, 1, 4, 1, 5, 1, 2], torch.randn((4, 6), generator=torch.Generator().manual_seed(0))
    whole = start(0, tokens[:2], tokens[2:], **params)
    processor = Penalties()
    process(processor, logits[:1], [whole])
    context = attrs.evolve(context_of([whole]), rows=(0,) * 4, positions=(3, 4, 5, 6))
    together = processor.apply(logits.clone(), context)
    for i, position in enumerate(context.positions):
        apart = process(Penalties(), logits[i : i + 1], [start(0, tokens[:2], tokens[2 : position + 1], **params)])
        assert torch.equal(together[i], apart[0])


def test_tokens_behind_a_rows_position_are_not_read(process, start):
    rows = [start(0, [2], presence_penalty=1.0, repetition_penalty=2.0), start(1, [1] * 30, repetition_penalty=2.0)]
    # Row 0 has 29 unknown places beside row 1's history; the place holder -1 and token 0 must both stay out of it.
    assert process(Penalties(), [[1, 1, 1]] * 2, rows).tolist() == [[1, 1, 0.5], [1, 0.5, 1]]


def test_repetition_equals_transformers(process, start):
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(3)
    logits = torch.randn((200, 40), generator=torch.Generator().manual_seed(3)) * 3
    for penalty in (0.5, 1.3):
        histories = [rng.integers(0, 40, rng.integers(1, 50)).tolist() for _ in range(200)]
        starts = [start(row, history, repetition_penalty=penalty) for row, history in enumerate(histories)]
        one = RepetitionPenaltyLogitsProcessor(penalty)
        expected = [
            one(torch.tensor([history]), row[None]) for history, row in zip(histories, logits.clone(), strict=True)
        ]
        assert torch.allclose(process(Penalties(), logits, starts), torch.cat(expected), rtol=1e-6)
