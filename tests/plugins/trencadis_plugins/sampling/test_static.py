from __future__ import annotations

import random

import attrs
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trencadis.interfaces import SamplingContext
from trencadis_plugins.sampling import arithmetic
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.config import ORDERS
from trencadis_plugins.sampling.greedy import GreedySampler
from trencadis_plugins.sampling.standard import StandardSampler
from trencadis_plugins.sampling.static import NARROW, StaticChain
from trencadis_plugins.sampling.structured import Structured
from trencadis_plugins.sampling.top_p import TopP
from trencadis_testing.sampling import SamplingConformance

VOCAB_SIZE = 300


class TestStaticSampler(SamplingConformance):
    """The whole conformance suite, with static shapes."""

    def make(self):
        sampler = StandardSampler(standard_chain("vllm"))
        sampler.use_static_shapes()
        return sampler

    def tensor(self, array):
        return torch.from_numpy(array)


class TestStaticGreedy(SamplingConformance):
    def make(self):
        sampler = GreedySampler()
        sampler.use_static_shapes()
        return sampler

    def tensor(self, array):
        return torch.from_numpy(array)


def make_sampler(order="vllm", *, static=True):
    sampler = StandardSampler(standard_chain(order))
    paths = sampler.use_static_shapes() if static else ()
    sampler.allocate(num_rows=8, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    return sampler, paths


_HOST = {
    "typical_p": [0.5, 0.95],
    "epsilon_cutoff": [0.01],
    "eta_cutoff": [0.02],
    "top_n_sigma": [1.0],
    "xtc_probability": [0.7],
    "mirostat_mode": [2],
    "dry_multiplier": [2.0],
    "dry_allowed_length": [1],
    "no_repeat_ngram_size": [1, 2],
    "bad_words_ids": [((7, 9), (4,))],
}


def random_params(rng, *, on_host=True):
    params = {"temperature": rng.choice([0.0, 0.4, 1.0, 1.3])}
    for name, values in {
        "top_k": [1, 5, NARROW, 100, 1000],
        "top_p": [0.1, 0.8, 0.99],
        "min_p": [0.05],
        "presence_penalty": [0.5],
        "repetition_penalty": [1.4],
        "frequency_penalty": [-0.3],
        "logit_bias": [{5: 4.0, 9: -2.0}],
        "bad_token_ids": [(3, 4)],
        "allowed_token_ids": [tuple(range(2, 40))],
        "min_tokens": [7],
        "logprobs": [0, 3],
        **(_HOST if on_host else {}),
    }.items():
        if rng.random() < 0.25:
            params[name] = rng.choice(values)
    return params


@pytest.mark.parametrize("order", ORDERS)
def test_tokens_and_logprobs_are_those_of_the_dynamic_sampler(order, start, context_of):
    for seed in range(12):
        rng = random.Random(seed)
        starts = [
            start(row, [7, 9, 7], [row + 20], row_seed=row + seed, eos=(2,), **random_params(rng)) for row in range(6)
        ]
        logits = torch.randn((6, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed)) * 3
        context, found = context_of(starts), []
        context = SamplingContext(rows=context.rows, positions=context.positions, tokens=context.tokens.clamp(min=0))
        for static in (False, True):
            sampler, _ = make_sampler(order, static=static)
            for one in starts:
                sampler.start_row(one)
            found.append(sampler.sample(logits.clone(), context))
        assert found[0].token_ids.tolist() == found[1].token_ids.tolist()
        for dynamic, fixed in zip(found[0].logprobs, found[1].logprobs, strict=True):
            assert (dynamic.index, dynamic.token_id, dynamic.rank) == (fixed.index, fixed.token_id, fixed.rank)
            assert dynamic.top_token_ids == fixed.top_token_ids
            np.testing.assert_allclose(dynamic.top_logprobs, fixed.top_logprobs, rtol=1e-6)
            np.testing.assert_allclose(dynamic.logprob, fixed.logprob, rtol=1e-6)


class Operations(TorchDispatchMode):
    """Every operation with the shapes and numbers it was given: what a graph compiler would compile anew for."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if "_to_copy" not in str(func):
            self.seen.append((str(func), _shapes(args), _shapes(kwargs or {})))
        return result


def _shapes(value):
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_shapes, value))
    if isinstance(value, dict):
        return tuple((key, _shapes(one)) for key, one in value.items())
    return value


def operations(sampler, starts, context):
    for one in starts:
        sampler.start_row(one)
    with Operations() as recorded:
        sampler.sample(torch.zeros(len(starts), VOCAB_SIZE), context)
    return tuple(recorded.seen)


def eight_rows(context):
    """The context with room for as many rows as the sampler has, as a backend gives it."""
    tokens = torch.zeros(8, context.tokens.shape[1], dtype=torch.int32)
    return SamplingContext(rows=context.rows, positions=context.positions, tokens=tokens)


@pytest.mark.slow
@pytest.mark.parametrize("devices_with_64_bits", [{"cpu"}, set()])
def test_operations_of_any_batch_are_those_of_a_path(devices_with_64_bits, monkeypatch, start, context_of):
    monkeypatch.setattr(arithmetic, "_WITH_64_BITS", devices_with_64_bits)
    sampler, paths = make_sampler()
    known = set()
    for path in paths:
        starts = [start(row, [1], **attrs.asdict(path, recurse=False)) for row in range(5)]
        known.add(operations(sampler, starts, eight_rows(context_of(starts))))
    assert len(known) == len(paths) == 18
    rng, taken = random.Random(3), set()
    for number in range(150):
        values = [random_params(rng, on_host=number % 5 == 0) for _ in range(5)]
        starts = [start(rng.randrange(8), [7] * rng.randrange(1, 9), eos=(2,), **value) for value in values]
        taken.add(operations(sampler, starts, eight_rows(context_of(starts))))
    assert taken <= known
    assert len(taken) > 4


def test_dynamic_sampler_has_far_more(start, context_of):
    """The oracle of the test above sees what it should."""
    sampler, _ = make_sampler(static=False)
    rng, taken = random.Random(3), set()
    for _ in range(30):
        starts = [start(row, [7] * rng.randrange(1, 9), eos=(2,), **random_params(rng)) for row in range(5)]
        taken.add(operations(sampler, starts, eight_rows(context_of(starts))))
    assert len(taken) > 16


def test_a_processor_from_elsewhere_runs_on_the_host_and_another_order_makes_no_promise():
    chain = standard_chain("vllm")
    top_p = next(one for one in chain if isinstance(one, TopP))

    class Mine(TopP):
        pass

    assert not StaticChain.of(chain).on_host[: chain.index(top_p)].all()
    mine = tuple(Mine() if one is top_p else one for one in chain)
    assert StaticChain.of(mine).on_host[chain.index(top_p)]
    assert StaticChain.of(chain[::-1]) is None
    assert StandardSampler(chain[::-1]).use_static_shapes() == ()


def test_narrow_top_k_looks_at_few_tokens_and_a_wide_one_at_all(start, context_of):
    sampler, _ = make_sampler()
    widths = {}
    for name, params in {"narrow": {"top_k": NARROW}, "wide": {"top_k": NARROW + 1}, "top_p": {"top_p": 0.5}}.items():
        starts = [start(0, [1], **params), start(1, [1], temperature=0.0, top_k=200)]
        found = operations(sampler, starts, context_of(starts))
        widths[name] = sum("sort" in operation for operation, *_ in found)
    assert widths["narrow"] == 0
    assert widths["wide"] >= 1
    assert widths["top_p"] >= 1


def test_the_host_path_is_warmed_up_with_every_built_in_processor_that_has_no_static_form(start):
    chain = standard_chain("vllm")
    static = StaticChain.of(chain)
    path = start(0, [1], **attrs.asdict(static.paths()[-1], recurse=False))
    asked = [one.applies_to(path) for one, on_host in zip(chain, static.on_host, strict=True) if on_host]
    assert asked == [
        not isinstance(one, Structured) for one, on_host in zip(chain, static.on_host, strict=True) if on_host
    ]
