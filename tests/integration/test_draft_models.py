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

from support.backends.gaudi_engines import serve as serve_many
from support.devices import DEVICE, cpu_only
from support.strategies.draft_models import context_of, draft_model, logits_behind, parallel_draft, save_llama
from trencadis import LLM
from trencadis.client.factory import configure
from trencadis.clock import SystemClock
from trencadis.engine.build import build_engine
from trencadis.engine.engine import Engine
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


def open_demo(speculator: str = "", options: dict[str, Any] | None = None, **tables: Any) -> Engine:
    speculation = {"name": speculator, speculator: options or {}} if speculator else {"name": "none"}
    config, registry = _load({"speculation": speculation, **tables})
    engine = build_engine(config, registry=registry)
    assert isinstance(engine, Engine)
    return engine


def _load(tables: dict[str, Any]) -> Any:
    cache = {"block_size": 16, "num_blocks": 64, **tables.pop("cache", {})}
    engine = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **tables.pop("engine", {})}
    model = {"path": "demo", "dtype": "float32", "max_model_len": 256}
    rest = {"observer": {"names": []}, "cache": cache, "engine": engine, "draft_length": {"name": "fixed"}, **tables}
    return configure(model, config_file=None, tables=rest)


def serve(
    engine: Engine, params: SamplingParams, prompts: tuple[str, ...] = PROMPTS
) -> tuple[list[list[int]], int, int]:
    """Return the texts, how many steps they took, and how many preemptions."""
    tokenizer = load_tokenizer("demo")
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


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return serve(open_demo(), GREEDY)[0]


def test_a_model_that_drafts_for_itself_is_right_every_time(plain: list[list[int]]) -> None:
    options = {"model": "demo", "max_draft_tokens": 4, "min_probability": 0.0, "precision": "exact"}
    texts, num_steps, _ = serve(open_demo("draft_model", options), GREEDY)
    assert texts == plain
    assert num_steps == 1 + -(-(NUM_TOKENS - 1) // 5)


def test_a_tree_is_never_wrong_where_a_line_is_right(plain: list[list[int]]) -> None:
    options = {"model": "demo", "max_draft_tokens": 9, "tree": "top_k", "tree_width": 2, "tree_depth": 4}
    texts, num_steps, _ = serve(open_demo("draft_model", options), GREEDY, PROMPTS[:1])
    assert texts == plain[:1]
    # The best path alone is at most as deep as the tree, and most of it stands.
    assert num_steps <= 1 + -(-(NUM_TOKENS - 1) // 3)


@pytest.mark.slow
@pytest.mark.parametrize("speculator", ["draft_model", "parallel_draft"])
def test_the_demo_s_draft_models_save_steps(speculator: str, plain: list[list[int]]) -> None:
    texts, num_steps, _ = serve(open_demo(speculator, {"max_draft_tokens": 3}), GREEDY)
    assert texts == plain
    assert num_steps < NUM_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preempted_sequences_are_drafted_for_again(prefix_caching: bool) -> None:
    params = attrs.evolve(GREEDY, max_tokens=100)
    cache = {"num_blocks": 16, "prefix_caching": prefix_caching}
    prompts = tuple(f"{PROMPTS[0]} {i}" for i in range(4))
    expected, _, _ = serve(open_demo(cache={"num_blocks": 64}), params, prompts)
    texts, num_steps, num_preemptions = serve(
        open_demo("draft_model", {"max_draft_tokens": 3}, cache=cache, engine={"max_num_seqs": 4}), params, prompts
    )
    assert num_preemptions > 0, "the cache was too large"
    assert texts == expected
    assert num_steps < 4 * 60


@pytest.mark.slow
def test_completions_of_one_prompt_are_those_without_drafts() -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True)
    found = []
    for name in ("none", "draft_model"):
        model = {"path": "demo", "dtype": "float32"}
        with LLM(model, speculation={"name": name}, cache={"num_blocks": 64}, observer={"names": []}) as llm:
            found.append([completion.text for completion in llm.generate(PROMPTS[0], params)[0].outputs])
    assert len(set(found[0])) == 3
    assert found[0] == found[1]


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


def is_likely(cells: np.ndarray, distribution: np.ndarray) -> bool:
    """Chi-square at one in a million, by the normal approximation of Wilson and Hilferty; rare cells are one."""
    counts, expected = np.bincount(cells, minlength=len(distribution)).astype(float), distribution * len(cells)
    order = np.argsort(expected)
    num_rare = int((expected[order].cumsum() < 20).sum()) + 1
    rare, often = order[:num_rare], order[num_rare:]
    counts, expected = (np.append(part[rare].sum(), part[often]) for part in (counts, expected))
    spread = 2 / (9 * (len(counts) - 1))
    critical = (len(counts) - 1) * (1 - spread + 4.753 * spread**0.5) ** 3
    return bool(((counts - expected) ** 2 / expected).sum() < critical)


@pytest.fixture(autouse=True)
def _nobody_gives_up(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """An engine goes on without a speculator that failed: its text would still be right."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelname == "ERROR"] == []


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [pytest.param(Token(), id="token", marks=pytest.mark.slow), pytest.param(Block(), id="block")]
)
@pytest.mark.parametrize("make", [draft_model, parallel_draft], ids=["draft_model", "parallel_draft"])
@pytest.mark.representatives(1)
def test_drawn_drafts_keep_the_distribution_of_the_target(
    pair: tuple[Path, Path], make: Any, rule: AcceptanceRule
) -> None:
    target, draft = pair
    prompt = [3, 4, 3]
    speculator = make(draft, limits=None, context=_small(), **_options(make))
    assert is_likely(texts_of(target, speculator, rule, prompt), distribution_of(target, prompt))


@pytest.mark.slow
def test_a_distribution_that_is_not_the_one_that_was_drawn_by_would_be_found(pair: tuple[Path, Path]) -> None:
    target, draft = pair
    prompt = [3, 4, 3]
    made = draft_model(draft, limits=None, context=_small(), **_options(draft_model))
    assert not is_likely(texts_of(target, Lying(made), Token(), prompt), distribution_of(target, prompt))


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


def _options(make: Any) -> dict[str, Any]:
    mask = {"mask_token_id": VOCAB_SIZE - 1} if make is parallel_draft else {}
    return {"sampling": "probabilistic", "max_draft_tokens": 2, **mask}


def _small() -> Any:
    context = context_of()
    assert context.model is not None
    return attrs.evolve(context, model=attrs.evolve(context.model, vocab_size=VOCAB_SIZE))


# ----------------------------------------------------------------------------------------------------------------- gaudi


@cpu_only
@pytest.mark.slow
@pytest.mark.parametrize(
    ("speculator", "layout", "bucketing"),
    [
        ("draft_model", "padded", "exponential"),
        ("parallel_draft", "padded", "exponential"),
        ("draft_model", "unified", "unified"),
    ],
)
@pytest.mark.representatives(1)
def test_nothing_is_compiled_for_a_draft_model_after_the_warm_up(
    speculator: str, layout: str, bucketing: str, tmp_path: Path
) -> None:
    path = save_llama(tmp_path / "model", vocab_size=131, mask_token_id=130)
    gaudi = {"device": "emulated", "mode": "lazy", "check_model": False, "emulated_frozen": True, "layout": layout}
    config, registry = configure(
        {"path": str(path), "max_model_len": 96},
        config_file=None,
        tables={
            "backend": {"name": "gaudi", "gaudi": gaudi},
            "bucketing": {"name": bucketing},
            "cache": {"block_size": 16, "num_blocks": 12},
            "engine": {"max_num_seqs": 2, "max_num_batched_tokens": 32},
            "observer": {"names": []},
            "speculation": {
                "name": speculator,
                speculator: {"model": str(path), "tokenizer": "same", "max_draft_tokens": 3},
            },
        },
    )
    engine = build_engine(config, registry=registry)
    assert isinstance(engine, Engine)
    ends = serve_many(engine, 4, num_requests=5, greedy=True)
    engine.close()
    assert not [end.error for end in ends.values() if end.error]
