"""Draft models in whole engines: right drafts are accepted, wrong ones cost nothing but time, and drawn ones keep the distribution."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from support.backends import gaudi_engines
from support.chi_square import chi_square_fails
from support.devices import DEVICE, cpu_only
from support.strategies.draft_models import context_of, draft_model, logits_behind, parallel_draft, save_llama
from trencadis.client.factory import configure
from trencadis.clock import SystemClock
from trencadis.engine.build import build_engine
from trencadis.interfaces import AcceptanceRule, Sampler, Speculator
from trencadis.records import Drafts, FinishedSequence, ModelFacts, ModelSource, Request, SamplingParams
from trencadis.text import load_tokenizer
from trencadis_plugins.acceptance.block import Block
from trencadis_plugins.acceptance.token import Token
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.standard import StandardSampler
from trencadis_testing.engines import make_engine
from trencadis_torch.backend import TorchBackend
from trencadis_torch.config import TorchConfig

PROMPTS = ("The old man looked at the sea and", "said the Queen, said the King, said the", "Alice was beginning to")
NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(autouse=True)
def _nobody_gives_up(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An engine goes on without a speculator that failed: its text would still be right."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelname == "ERROR"] == []


def serve(
    speculator: str = "none",
    options: dict[str, Any] | None = None,
    params: SamplingParams = GREEDY,
    prompts: tuple[str, ...] = PROMPTS,
    **cache: Any,
) -> tuple[list[list[int]], int, int]:
    """Return the demo's texts, how many steps they took, and how many preemptions."""
    tables = {
        "observer": {"names": []},
        "cache": {"block_size": 16, "num_blocks": 64, **cache},
        "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
        "draft_length": {"name": "fixed"},
        "speculation": {"name": speculator, **({speculator: options} if options else {})},
    }
    model = {"path": "demo", "dtype": "float32", "max_model_len": 256}
    config, registry = configure(model, config_file=None, tables=tables)
    engine, tokenizer = build_engine(config, registry=registry), load_tokenizer("demo")
    for number, prompt in enumerate(prompts):
        engine.add(Request(request_id=str(number), prompt_token_ids=tokenizer.encode(prompt), params=params))
    ends: dict[str, FinishedSequence] = {}
    num_steps = 0
    while engine.has_work:
        ends.update((end.request_id, end) for end in engine.step().finished)
        num_steps += 1
    engine.close()
    assert not any(end.error for end in ends.values())
    texts = [ends[str(number)].token_ids.tolist() for number in range(len(prompts))]
    return texts, num_steps, sum(end.num_preemptions for end in ends.values())


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return serve()[0]


ITSELF = {"model": "demo", "max_draft_tokens": 4, "min_probability": 0.0, "precision": "exact"}
TREE = {"model": "demo", "max_draft_tokens": 9, "tree": "top_k", "tree_width": 2, "tree_depth": 4}


@pytest.mark.representatives(2, ci=4)
@pytest.mark.parametrize(
    ("speculator", "options", "most_steps"),
    [
        ("draft_model", ITSELF, 1 + -(-(NUM_TOKENS - 1) // 5)),
        # The best path alone is at most as deep as the tree, and most of it stands.
        ("draft_model", TREE, 1 + -(-(NUM_TOKENS - 1) // 3)),
        ("draft_model", {"max_draft_tokens": 3}, NUM_TOKENS - 1),
        ("parallel_draft", {"max_draft_tokens": 3}, NUM_TOKENS - 1),
    ],
    ids=["itself", "itself, in trees", "the demo's", "the demo's, in parallel"],
)
def test_drafts_save_steps_and_change_no_text(
    plain: list[list[int]], speculator: str, options: dict[str, Any], most_steps: int
) -> None:
    prompts = PROMPTS[:1] if options is TREE else PROMPTS
    texts, num_steps, _ = serve(speculator, options, GREEDY, prompts)
    assert texts == plain[: len(prompts)]
    assert num_steps <= most_steps


@pytest.mark.representatives(1)
@pytest.mark.slow
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_sequences_are_drafted_for_again(prefix_caching: bool) -> None:
    params, prompts = attrs.evolve(GREEDY, max_tokens=100), tuple(f"{PROMPTS[0]} {i}" for i in range(4))
    cache = {"num_blocks": 16, "prefix_caching": prefix_caching}
    texts, num_steps, num_preemptions = serve("draft_model", {"max_draft_tokens": 3}, params, prompts, **cache)
    assert num_preemptions > 0, "the cache was too large"
    assert texts == serve("none", None, params, prompts)[0]
    assert num_steps < 4 * 60


# ------------------------------------------------------------------------------------------------------------------ distributions

VOCAB_SIZE, LENGTH = 6, 3
COUNT = 5000
"""Texts: a total variation of .07 among 8 cells is found with probability .999, at one in a million to fail by accident."""


class SampledBackend(TorchBackend):
    """A backend of a given model, with the standard sampler."""

    def __init__(self, path: Path) -> None:
        super().__init__(TorchConfig(device=DEVICE, check_model=False), clock=SystemClock())
        self._path = path

    def load(self, source: ModelSource, *, sampler: Sampler) -> ModelFacts:
        source = ModelSource(path=str(self._path), dtype="float32")
        return super().load(source, sampler=StandardSampler(standard_chain("vllm")))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft model of 6 tokens that disagree."""
    folder = tmp_path_factory.mktemp("pair")
    return tuple(
        save_llama(folder / name, vocab_size=VOCAB_SIZE, seed=seed, spread=0.15)
        for name, seed in (("target", 3), ("draft", 4))
    )  # type: ignore[return-value]


def distribution_of(path: Path, prompt: list[int]) -> np.ndarray:
    """Return the exact distribution of the next tokens, ``[VOCAB_SIZE ** LENGTH]``."""
    distribution = []
    for text in itertools.product(range(VOCAB_SIZE), repeat=LENGTH):
        probabilities = logits_behind(path, [*prompt, *text[:-1]], LENGTH).double().softmax(-1)
        distribution.append(float(np.prod([probabilities[i, token] for i, token in enumerate(text)])))
    return np.array(distribution)


def texts_of(path: Path, speculator: Speculator, rule: AcceptanceRule, prompt: list[int]) -> np.ndarray:
    engine = make_engine(
        speculator=speculator,
        acceptance=rule,
        backend=SampledBackend(path),
        clock=SystemClock(),
        num_blocks=2048,
        block_size=16,
        max_num_seqs=250,
        max_num_batched_tokens=4000,
    )
    params = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True)
    for number in range(COUNT):
        seeded = attrs.evolve(params, seed=number)
        engine.add(Request(request_id=str(number), prompt_token_ids=tuple(prompt), params=seeded))
    found = []
    while engine.has_work:
        found += [end.token_ids for end in engine.step().finished]
    engine.close()
    weights = VOCAB_SIZE ** np.arange(LENGTH - 1, -1, -1)
    return np.array(found) @ weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "rule", "is_honest"),
    [
        (draft_model, Block(), True),
        (draft_model, Token(), False),
        (draft_model, Token(), True),
        (parallel_draft, Token(), True),
        (parallel_draft, Block(), True),
    ],
)
@pytest.mark.representatives(1)
def test_drawn_drafts_keep_the_distribution_of_the_target_and_another_one_would_be_found(
    pair: tuple[Path, Path], make: Any, rule: AcceptanceRule, is_honest: bool
) -> None:
    target, draft = pair
    prompt, context = [3, 4, 3], context_of()
    context = attrs.evolve(context, model=attrs.evolve(context.model, vocab_size=VOCAB_SIZE))
    mask = {"mask_token_id": VOCAB_SIZE - 1} if make is parallel_draft else {}
    speculator = make(draft, limits=None, context=context, sampling="probabilistic", max_draft_tokens=2, **mask)
    cells = texts_of(target, speculator if is_honest else Lying(speculator), rule, prompt)
    assert chi_square_fails(cells, distribution_of(target, prompt)) is not is_honest


class Lying(Speculator):
    """Says that everything was drawn evenly."""

    def __init__(self, honest: Speculator) -> None:
        self.max_draft_tokens = honest.max_draft_tokens
        self._honest = honest
        self.allocate = honest.allocate  # type: ignore[method-assign]

    def propose(self, view: Any) -> Drafts:
        drafts = self._honest.propose(view)
        if drafts.distributions is None:
            return drafts
        even = torch.full_like(drafts.distributions.probabilities, 1 / VOCAB_SIZE)
        return attrs.evolve(drafts, distributions=attrs.evolve(drafts.distributions, probabilities=even))


@cpu_only
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["exponential", "unified"])
@pytest.mark.representatives(1)
def test_nothing_is_compiled_for_a_parallel_draft_model_after_the_warm_up_of_a_gaudi(
    strategy: str, tmp_path: Path
) -> None:
    """A draft model that says one token after the other: ``tests/backends/trencadis_gaudi/test_feature_pairs.py``."""
    path = save_llama(tmp_path / "model", vocab_size=131, mask_token_id=130)
    options = {"model": str(path), "tokenizer": "same", "max_draft_tokens": 3}
    engine = gaudi_engines.open_engine(
        path,
        strategy=strategy,
        layout="unified" if strategy == "unified" else "padded",
        emulated_frozen=True,
        num_blocks=12,
        max_num_seqs=2,
        tables={"speculation": {"name": "parallel_draft", "parallel_draft": options}},
    )
    ends = gaudi_engines.serve(engine, 4, num_requests=5, greedy=True)
    engine.close()
    assert not [end.error for end in ends.values() if end.error]
