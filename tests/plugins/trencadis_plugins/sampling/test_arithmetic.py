"""Devices without 64-bit arithmetic: the tokens of the CPU, whatever becomes of int64 and float64."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from support.strategies.narrow_device import NarrowDevice, With64Bits
from trencadis.interfaces import SamplingContext, Verification
from trencadis.records import RowStart, SamplingParams
from trencadis_plugins.acceptance.block import Block
from trencadis_plugins.acceptance.token import Token
from trencadis_plugins.acceptance.typical import Typical
from trencadis_plugins.sampling import arithmetic
from trencadis_plugins.sampling.arithmetic import float_type, has_64_bits, mass_before, total
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.philox import Purpose, RowNumbers
from trencadis_plugins.sampling.standard import StandardSampler
from trencadis_plugins.speculation.draft_sampler import DraftSampler
from trencadis_torch.verify import verify_drafts

NUM_ROWS, VOCAB_SIZE = 48, 1300


@pytest.fixture
def narrow(monkeypatch):
    """``narrow()`` is a device without 64-bit arithmetic, which says so."""
    monkeypatch.setattr(arithmetic, "_WITH_64_BITS", With64Bits())
    return NarrowDevice


PATHS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "narrow top-k": {"temperature": 1.3, "top_k": 40},
    "wide top-k": {"top_k": 400, "top_p": 0.95},
    "top-p": {"temperature": 1.1, "top_p": 0.9},
    "low top-p": {"temperature": 1.7, "top_p": 0.3},
    "min-p": {"min_p": 0.02},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.2, "repetition_penalty": 1.3, "top_p": 0.97},
    "masks": {"bad_token_ids": (3, 4), "logit_bias": {5: 4.0}, "top_k": 20},
    "host": {"typical_p": 0.9, "xtc_probability": 0.5, "top_p": 0.9},
    "mirostat": {"mirostat_mode": 2},
}


def scene(seed, path):
    """Rows of all lengths and seeds; every fifth is greedy."""
    rng = random.Random(f"{seed} {path}")
    starts = []
    for row in range(NUM_ROWS):
        tokens = np.array([rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(2, 60))], np.int32)
        values = {"temperature": 0.0} if row % 5 == 4 else PATHS[path]
        params = SamplingParams(**{**values, "logprobs": 3 if row % 2 else None})
        starts.append(
            RowStart(row=row, token_ids=tokens, num_prompt_tokens=1, params=params, seed=rng.randrange(2**64))
        )
    history = torch.zeros((NUM_ROWS, 64), dtype=torch.int32)
    for one in starts:
        history[one.row, : len(one.token_ids)] = torch.from_numpy(one.token_ids)
    positions = tuple(len(one.token_ids) - 1 for one in starts)
    context = SamplingContext(rows=tuple(range(NUM_ROWS)), positions=positions, tokens=history)
    logits = torch.randn((NUM_ROWS, VOCAB_SIZE), generator=torch.Generator().manual_seed(seed)) * 2
    return starts, context, logits


def sampled(sampler, starts, context, logits):
    sampler.use_static_shapes()
    sampler.allocate(num_rows=NUM_ROWS, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    for one in starts:
        sampler.start_row(one)
    return sampler.sample(logits.clone(), context)


def standard():
    return StandardSampler(standard_chain("vllm"))


def test_a_cpu_and_a_gpu_have_64_bits_and_any_other_device_has_not():
    assert has_64_bits(torch.device("cpu"))
    assert has_64_bits(torch.device("cuda", 1))
    assert not has_64_bits(torch.device("hpu"))
    assert float_type(torch.device("cpu")) is torch.float64
    assert float_type(torch.device("hpu")) is torch.float32


@pytest.mark.parametrize("path", PATHS)
def test_tokens_are_those_of_the_cpu(path, narrow):
    for seed in range(6):
        starts, context, logits = scene(seed, path)
        expected = sampled(standard(), starts, context, logits)
        with narrow() as device:
            found = sampled(standard(), starts, context, logits)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert (one.index, one.token_id, one.rank) == (other.index, other.token_id, other.rank)
            assert one.top_token_ids == other.top_token_ids
            assert one.logprob == pytest.approx(other.logprob, abs=5e-6)
        assert device.wrapped == []
        assert device.doubles == []


def test_philox_on_such_a_device_draws_something_else(monkeypatch):
    """The oracle of the test above: with 64-bit arithmetic that the device does not have, nearly every token is wrong."""
    starts, context, logits = scene(0, "plain")
    expected = sampled(standard(), starts, context, logits).token_ids
    monkeypatch.setattr(arithmetic, "_WITH_64_BITS", frozenset({"cpu"}))
    with NarrowDevice() as device:
        found = sampled(standard(), starts, context, logits).token_ids
    is_drawn = torch.tensor([not one.params.is_greedy for one in starts])
    assert (found != expected)[is_drawn].double().mean() > 0.9
    assert {"aten.mul", "aten.bitwise_and_"} & set(device.wrapped)


def test_drafts_are_those_of_the_cpu(narrow):
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=300, min_p=0.001)
    starts, context, logits = scene(1, "plain")
    starts = [
        RowStart(row=s.row, token_ids=s.token_ids, num_prompt_tokens=1, params=params, seed=s.seed) for s in starts
    ]
    expected = sampled(DraftSampler(), starts, context, logits)
    with narrow() as device:
        found = sampled(DraftSampler(), starts, context, logits)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert device.wrapped == device.doubles == []


def verified(rule, seed):
    """Tokens that a rule emits of random drafts, three for each of 16 sequences: accepted drafts, and the last token."""
    starts, context, logits = scene(seed, "top-p")
    entries = torch.arange(NUM_ROWS).view(16, 3)
    proposal = (logits + torch.randn(logits.shape, generator=torch.Generator().manual_seed(9))).softmax(-1)[
        entries[:, :2]
    ]
    tokens = proposal.flatten(0, 1).multinomial(1, generator=torch.Generator().manual_seed(seed)).view(16, 2)
    out = []

    def choose(distributions):
        asked = Verification(
            tokens=tokens,
            parents=torch.arange(2).expand(16, -1),
            num_drafts=torch.full((16,), 2),
            is_linear=True,
            target=distributions.probabilities[entries],
            proposal=proposal,
        )
        steps = verify_drafts(asked, rule.accept(asked), distributions.uniforms()[entries])
        last = distributions.draw(rule.last(asked, steps.stops), entries.gather(1, steps.stops[:, None])[:, 0])
        out.extend([steps.num_accepted, last])
        return distributions.probabilities.argmax(-1)

    sampler = standard()
    sampler.use_static_shapes()
    sampler.allocate(num_rows=NUM_ROWS, vocab_size=VOCAB_SIZE, device=torch.device("cpu"))
    for one in starts:
        sampler.start_row(one)
    sampler.verify(logits.clone(), context, choose)
    return torch.stack(out).tolist()


@pytest.mark.representatives(1)
@pytest.mark.parametrize("rule", [Token(), Block(), Typical()])
def test_accepted_drafts_and_the_token_after_them_are_those_of_the_cpu(rule, narrow):
    accepted = set()
    for seed in range(4):
        expected = verified(rule, seed)
        with narrow() as device:
            assert verified(rule, seed) == expected
        assert device.wrapped == device.doubles == []
        accepted |= set(expected[0])
    assert len(accepted) > 1


def test_numbers_of_the_host_are_sent_to_the_device():
    numbers = RowNumbers(keys=np.arange(8).reshape(4, 2), positions=[7] * 4, device=torch.device("meta"))
    for found, shape in ((numbers.times(Purpose.SAMPLE, 5), (4, 5)), (numbers.uniforms(Purpose.ACCEPT), (4,))):
        assert (found.device.type, found.dtype, tuple(found.shape)) == ("meta", torch.float32, shape)


def test_numbers_of_the_host_are_those_of_the_cpu_rounded_to_float32():
    rng = np.random.default_rng(0)
    keys, positions = rng.integers(0, 2**32, (40, 2)), rng.integers(0, 10**6, 40)
    rounds = rng.integers(0, 2**32, 40)
    here, there = (RowNumbers(keys=keys, positions=positions, rounds=rounds, device=torch.device("cpu")) for _ in "ab")
    there._is_on_host, there._words = True, there._words.numpy()
    index = torch.tensor([3, 3, 39])
    for number in Purpose:
        assert torch.equal(there.uniforms(number), here.uniforms(number).float())
        # Logarithms of numpy and torch differ by 2**-52, which float32 shows once in 2**28.
        assert torch.equal(there.times(number, 600), here.times(number, 600).float())
        assert torch.equal(there.times(number, 9, index), here.times(number, 9, index).float())


def test_no_number_is_rounded_to_1(monkeypatch):
    numbers = RowNumbers(keys=np.zeros((1, 2), np.int64), positions=[0], device=torch.device("cpu"))
    numbers._is_on_host, numbers._words = True, numbers._words.numpy()
    monkeypatch.setattr("trencadis_plugins.sampling.philox.uniforms", lambda *_, **__: np.array([[1 - 2.0**-53]]))
    assert numbers.uniforms(Purpose.ACCEPT).tolist() == [1 - 2.0**-24]


@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0, 8.0])
def test_sums_in_two_stages_are_within_their_error(scale, narrow):
    """4.6e-5 at most for 128k numbers; in the worst order 3e-6 here, where one stage has up to 5e-4."""
    values = (
        (torch.randn((2, 128_000), generator=torch.Generator().manual_seed(0)) * scale).sort(descending=True).values
    )
    peaks = values[:, :1].clone()
    exact_total, exact = total((values - peaks).exp()), mass_before(values, peaks)
    with narrow():
        sums, before = total((values - peaks).exp()), mass_before(values, peaks)
    assert sums.dtype is before.dtype is torch.float32
    assert ((sums - exact_total).abs() / exact_total).max() < 4e-6
    assert ((before - exact).abs() / exact_total).max() < 4e-6
