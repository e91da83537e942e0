from __future__ import annotations

import numpy as np
import pytest
import torch

from trencadis.errors import ConfigValueError
from trencadis.interfaces import LogitsProcessor
from trencadis.records import SamplingParams
from trencadis_plugins.sampling.chain import PRESETS, build_chain, standard_chain
from trencadis_plugins.sampling.config import ORDERS

_BOUNDARY = 1e-7
"""Float32 weights move a cumulative mass by less; nearer cases are left out, and counted."""

_L = [2.0, 1.0, 0.5, 0.0, -1.0, -2.0]
_P6 = np.log([0.5, 0.2, 0.12, 0.1, 0.05, 0.03]).tolist()
_P5 = np.log([0.35, 0.25, 0.15, 0.10, 0.08, 0.07]).tolist()


@pytest.mark.parametrize(
    ("order", "logits", "params", "distribution"),
    [
        ("vllm", _L, {"temperature": 0.7}, [0.698585, 0.167417, 0.081957, 0.040122, 0.009615, 0.002304]),
        ("vllm", _L, {"temperature": 0.7, "top_k": 3}, [0.736936, 0.176607, 0.086457]),
        ("vllm", _L, {"temperature": 0.7, "top_p": 0.8}, [0.806679, 0.193321]),
        ("llamacpp", _L, {"temperature": 0.7, "top_p": 0.8}, [0.736936, 0.176607, 0.086457]),
        ("vllm", _L, {"temperature": 1.5, "min_p": 0.2}, [0.466224, 0.239367, 0.171514, 0.122895]),
        ("llamacpp", _L, {"temperature": 1.5, "min_p": 0.2}, [0.531548, 0.272906, 0.195546]),
        ("vllm", _P5, {"top_k": 3, "top_p": 0.7}, [0.583333, 0.416667]),
        ("vllm", _P6, {"min_p": 0.199999, "top_p": 0.85}, [0.609756, 0.243902, 0.146341]),
        ("hf", _P6, {"min_p": 0.199999, "top_p": 0.85}, [0.543478, 0.217391, 0.130435, 0.108696]),
        ("vllm", [1.0, 1.0, 1.0, 0.0], {"top_k": 2}, [1 / 3, 1 / 3, 1 / 3]),
    ],
    ids=["V1", "V2", "V3a", "V3b", "V4a", "V4b", "V5", "V6a", "V6b", "V8"],
)
def test_published_vectors_are_reproduced(order, logits, params, distribution, process, start, reference_distribution):
    probabilities = process(standard_chain(order), [logits], [start(0, **params)]).softmax(-1)[0].tolist()
    expected = distribution + [0.0] * (len(logits) - len(distribution))
    assert probabilities == pytest.approx(expected, abs=1e-6)
    assert reference_distribution(np.array(logits), order, SamplingParams(**params))[0] == pytest.approx(
        expected, abs=1e-6
    )


def _random_params(rng, vocab_size):
    return {
        "temperature": float(rng.choice([0.3, 0.7, 1.0, 1.5])),
        "top_k": int(rng.choice([0, -1, 1, 5, 50, vocab_size, 9999])),
        "top_p": float(rng.choice([1.0, 0.999, 0.95, 0.8, 0.5, 0.1])),
        "min_p": float(rng.choice([0.0, 0.0, 0.02, 0.3, 1.0])),
    }


def _batches(seed, num_batches, random_rows, num_rows=16):
    rng = np.random.default_rng(seed)
    for _ in range(num_batches):
        vocab_size = int(rng.choice([8, 33, 100, 513, 1500, 5000]))
        yield (
            str(rng.choice(ORDERS)),
            random_rows(rng, vocab_size, num_rows),
            [_random_params(rng, vocab_size) for _ in range(num_rows)],
        )


def _warp_with_transformers(logits, order, params):
    from transformers.generation.logits_process import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    makers = {
        "T": lambda: TemperatureLogitsWarper(params["temperature"]),
        "K": lambda: TopKLogitsWarper(params["top_k"]) if params["top_k"] > 0 else None,
        "P": lambda: TopPLogitsWarper(params["top_p"]) if params["top_p"] < 1 else None,
        "M": lambda: MinPLogitsWarper(params["min_p"]) if params["min_p"] else None,
    }
    scores = torch.tensor(logits, dtype=torch.float64)[None]
    for step in {"vllm": "TMKP", "hf": "TKPM", "llamacpp": "KPMT"}[order]:
        warper = makers[step]()
        # Float64, so that sums at a boundary are right; the quotient is rounded to float32, as in any float32 chain.
        scores = scores.float() if step == "T" else scores.double()
        scores = scores if warper is None else warper(torch.zeros((1, 1), dtype=torch.int64), scores)
    return scores.double().softmax(-1)[0].numpy()


def _compare(batches, process, start, reference_distribution):
    """Return how many rows were compared, and how many were left out at a boundary."""
    num_rows = num_left_out = 0
    for order, logits, choices in batches:
        starts = [start(row, **params) for row, params in enumerate(choices)]
        distributions = process(standard_chain(order), logits, starts).double().softmax(-1).numpy()
        for row, params, distribution in zip(logits, choices, distributions, strict=True):
            num_rows += 1
            expected, margin = reference_distribution(row, order, SamplingParams(**params))
            if margin < _BOUNDARY:
                num_left_out += 1
                continue
            assert np.array_equal(distribution > 0, expected > 0), (order, params)
            assert np.abs(distribution - expected).max() < 1e-6
            # Which of several equal tokens stay is nobody's promise but ours: compare with transformers in any order.
            warped = np.sort(_warp_with_transformers(row, order, params))
            assert np.array_equal(np.sort(distribution) > 0, warped > 0), (order, params)
            assert np.abs(np.sort(distribution) - warped).max() < 1e-6
    return num_rows, num_left_out


@pytest.mark.parametrize(
    ("seed", "num_batches"),
    [(0, 65), pytest.param(1, 625, marks=pytest.mark.nightly)],
    ids=["a thousand rows", "ten thousand rows"],
)
def test_distributions_equal_the_definition_and_transformers(
    seed, num_batches, process, start, reference_distribution, random_rows
):
    batches = _batches(seed, num_batches, random_rows)
    num_rows, num_left_out = _compare(batches, process, start, reference_distribution)
    assert num_rows == 16 * num_batches
    assert num_left_out < 0.01 * num_rows, num_left_out


def test_an_unknown_order_is_refused():
    with pytest.raises(KeyError):
        standard_chain("alphabetical")


class Doubled(LogitsProcessor):
    name = "doubled"

    def allocate(self, *, num_rows, vocab_size, device):
        pass

    def start_row(self, start):
        pass

    def apply(self, logits, context):
        return logits * 2


class Tripled(Doubled):
    def apply(self, logits, context):
        return logits * 3


def _kinds(*args, **kwargs):
    return [type(getattr(processor, "inner", processor)).__name__ for processor in build_chain(*args, **kwargs)]


def test_a_list_is_the_chain_and_each_call_makes_it_anew():
    assert _kinds("vllm", chain=["top_p", "temperature"]) == ["TopP", "Temperature"]
    assert _kinds("hf") == [type(getattr(processor, "inner", processor)).__name__ for processor in standard_chain("hf")]
    assert build_chain("vllm")[0] is not build_chain("vllm")[0]


def test_every_preset_has_every_processor_once():
    assert len({frozenset(PRESETS[order]) for order in ORDERS}) == 1
    assert tuple(PRESETS) == ORDERS
    assert all(len(set(names)) == len(names) == 19 for names in PRESETS.values())


def test_processors_from_elsewhere_stand_behind_the_others_but_before_mirostat():
    path = f"{__name__}:Doubled"
    assert _kinds("vllm", processors=[path])[-2:] == ["Doubled", "Mirostat"]
    assert _kinds("vllm", chain=["top_k", path, "temperature"]) == ["TopK", "Doubled", "Temperature"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chain": ["top_q"]}, "names 'top_q': there is no such processor.*Did you mean \"top_"),
        ({"chain": ["top_k", "top_k"]}, "names top_k twice"),
        ({"chain": ["mirostat", "temperature"]}, "has temperature after mirostat"),
        (
            {"processors": [f"{__name__}:Doubled", f"{__name__}:Tripled"]},
            "Doubled and Tripled have the same name, 'doubled'",
        ),
    ],
)
def test_a_chain_that_cannot_be_is_refused_in_words(options, message):
    with pytest.raises(ConfigValueError, match=message):
        build_chain("vllm", **options)
