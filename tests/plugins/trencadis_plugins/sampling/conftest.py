"""Slow references, written from the definitions in numpy, and ways to run processors on a few rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from trencadis.interfaces import LogitsProcessor, SamplingContext
from trencadis.records import RowStart, SamplingParams

_MAX_LEN = 64


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors: two threads would mostly wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make_start(row: int, prompt: Sequence[int] = (0,), output: Sequence[int] = (), **params: Any) -> RowStart:
    tokens = np.array([*prompt, *output], dtype=np.int32)
    seed, eos = params.pop("row_seed", 0), params.pop("eos", ())
    return RowStart(
        row=row,
        token_ids=tokens,
        num_prompt_tokens=len(prompt),
        params=SamplingParams(**params),
        seed=seed,
        eos_token_ids=tuple(eos),
    )


def make_context(starts: Sequence[RowStart]) -> SamplingContext:
    """One logits row for each sequence, at its last token. Unknown places hold -1, as no one may read them."""
    tokens = np.full((max(s.row for s in starts) + 1, _MAX_LEN), -1, dtype=np.int32)
    for start in starts:
        tokens[start.row, : len(start.token_ids)] = start.token_ids
    return SamplingContext(
        rows=tuple(s.row for s in starts),
        positions=tuple(len(s.token_ids) - 1 for s in starts),
        tokens=torch.from_numpy(tokens),
    )


def run_chain(
    chain: LogitsProcessor | Sequence[LogitsProcessor], logits: Any, starts: Sequence[RowStart]
) -> torch.Tensor:
    processed = torch.asarray(logits, dtype=torch.float32).clone()
    context = make_context(starts)
    for processor in [chain] if isinstance(chain, LogitsProcessor) else chain:
        processor.allocate(num_rows=len(context.tokens), vocab_size=processed.shape[1], device=torch.device("cpu"))
        for start in starts:
            processor.start_row(start)
        processed = processor.apply(processed, context)
    return processed


def make_rows(rng: np.random.Generator, vocab_size: int, num_rows: int) -> np.ndarray:
    """Rows with ties, -inf entries and bfloat16 rounding, each row of one kind."""
    logits = rng.normal(0, 1, (num_rows, vocab_size)) * rng.choice([0.5, 2.0, 8.0], (num_rows, 1))
    for row in logits:
        kind = rng.integers(4)
        if kind == 1:
            row[:] = np.round(row * 2) / 2
        elif kind == 2:
            row[rng.random(vocab_size) < 0.4] = -np.inf
            row[rng.integers(vocab_size)] = 1.0
        elif kind == 3:
            row[:] = torch.tensor(row).bfloat16().double().numpy()
    return logits.astype(np.float32)


def assert_distributions_equal(
    changed: torch.Tensor, expected: torch.Tensor, is_near: torch.Tensor | None = None
) -> None:
    """The same tokens kept, and probabilities within 1e-6; rows near a boundary left out, less than one in a hundred."""
    clear = torch.ones(len(changed), dtype=torch.bool) if is_near is None else ~is_near
    assert clear.double().mean() > 0.99
    assert torch.equal(changed[clear] > -torch.inf, expected[clear] > -torch.inf)
    distributions = changed[clear].double().softmax(-1) - expected[clear].double().softmax(-1)
    assert distributions.abs().max() < 1e-6


@pytest.fixture
def random_rows() -> Callable[..., np.ndarray]:
    """``random_rows(rng, vocab_size, num_rows)``: logits with ties, -inf entries and bfloat16 rounding."""
    return make_rows


@pytest.fixture
def assert_same_distribution() -> Callable[..., None]:
    """``assert_same_distribution(changed, expected, is_near)``: the same kept tokens and probabilities."""
    return assert_distributions_equal


@pytest.fixture
def start() -> Callable[..., RowStart]:
    """``start(row, prompt, output, row_seed=..., eos=..., **params)``."""
    return make_start


@pytest.fixture
def context_of() -> Callable[..., SamplingContext]:
    """``context_of(starts)``: one logits row for each sequence, at its last token."""
    return make_context


@pytest.fixture
def process() -> Callable[..., torch.Tensor]:
    """``process(chain, logits, starts)`` returns processed logits."""
    return run_chain


# ------------------------------------------------------------------------------------------------- references


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _top_p(logits: np.ndarray, p: float) -> tuple[np.ndarray, float]:
    """Ascending (of equals, the higher id first), drop while the cumulative mass is at most 1 - p; keep the last."""
    ascending = np.lexsort((-np.arange(len(logits)), logits))
    cumulative = np.cumsum(_softmax(logits)[ascending])
    kept = cumulative > 1 - p
    kept[-1] = True
    result = logits.copy()
    result[ascending[~kept]] = -np.inf
    return result, float(np.abs(cumulative[np.isfinite(logits[ascending])] - (1 - p)).min())


def distribution_by_definition(logits: np.ndarray, order: str, params: SamplingParams) -> tuple[np.ndarray, float]:
    """Return the distribution, and how near a mass came to a boundary where rounding decides."""
    logits, margin = logits.astype(np.float64), 1.0
    steps = {"vllm": "TMKP", "hf": "TKPM", "llamacpp": "KPMT"}[order]
    for step in steps:
        if step == "T":
            # The chain's numbers are float32: a quotient is rounded before anything else looks at it.
            logits = (logits.astype(np.float32) / np.float32(params.temperature)).astype(np.float64)
        elif step == "K" and 0 < params.top_k < len(logits):
            logits = np.where(logits < np.sort(logits)[-params.top_k], -np.inf, logits)
        elif step == "P" and params.top_p < 1:
            logits, near = _top_p(logits, params.top_p)
            margin = min(margin, near)
        elif step == "M" and params.min_p > 0:
            shares = np.exp(logits - logits.max())
            margin = min(margin, float(np.abs(shares[shares < 1] - params.min_p).min(initial=1.0)))
            logits = np.where(shares < params.min_p, -np.inf, logits)
    return _softmax(logits), margin


def philox_by_definition(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Philox4x32-10 in Python's whole numbers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for number in range(10):
        bump0, bump1 = (k0 + number * 0x9E3779B9) % 2**32, (k1 + number * 0xBB67AE85) % 2**32
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ bump0, low1, high0 ^ c3 ^ bump1, low0
    return c0, c1, c2, c3


def _uniform_by_definition(seed: int, position: int, purpose: int, item: int) -> float:
    words = philox_by_definition((position, purpose, item // 2, 0), (seed % 2**32, seed // 2**32))
    high, low = words[2 * (item % 2) : 2 * (item % 2) + 2]
    return ((high * 2**20 + low // 2**12) + 0.5) / 2**52


def draw_by_definition(logits: np.ndarray, seed: int, position: int, purpose: int, block_size: int) -> int:
    """Two heats of an exponential race, one number at a time."""
    weights = np.exp(logits.astype(np.float64) - logits.max())
    blocks = [weights[i : i + block_size] for i in range(0, len(weights), block_size)]

    def winner(items: list[float], first: int) -> int:
        keys = [
            weight / -np.log(_uniform_by_definition(seed, position, purpose, first + i))
            for i, weight in enumerate(items)
        ]
        return int(np.argmax(keys))

    block = winner([float(b.sum()) for b in blocks], block_size)
    return block * block_size + winner(blocks[block].tolist(), 0)


@pytest.fixture
def reference_distribution() -> Callable[..., tuple[np.ndarray, float]]:
    """``reference_distribution(logits, order, params)`` returns the distribution and the distance to the nearest boundary."""
    return distribution_by_definition


@pytest.fixture
def reference_philox() -> Callable[..., tuple[int, ...]]:
    """``reference_philox(counter, key)`` returns four words."""
    return philox_by_definition


@pytest.fixture
def reference_draw() -> Callable[..., int]:
    """``reference_draw(logits, seed, position, purpose, block_size)`` returns a token."""
    return draw_by_definition
