"""Speculation never changes a text: drafters, rules, draft lengths, chunk sizes, caches, shapes and policies, every two of them.

Greedy tokens are those of transformers' own generate on the demo model in float32. Seeded tokens at temperature 1 are those of the
engine without speculation where the rule is ``match``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.devices import DEVICE, ON_CUDA
from support.pairwise import Case, pairwise
from trencadis.engine.build import build_engine
from trencadis.records import Request, SamplingParams
from trencadis.registry.startup import load_with_plugins
from trencadis.text import load_tokenizer, resolve_model_path

NUM_TOKENS = 28
TEXTS = (
    "The old man looked at the sea and",
    "said the Queen, said the King, said the Queen, said the King, said the Queen,",
    "Alice",
)
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"speculation.ngram.min_match": 1},
    "suffix": {},
    "suffix tree": {"speculation.suffix.tree": True},
    "draft_model": {"speculation.draft_model.model": "demo-draft"},
    "draft_model drawn": {
        "speculation.draft_model.model": "demo-draft",
        "speculation.draft_model.sampling": "probabilistic",
    },
    "draft_model tree": {"speculation.draft_model.model": "demo-draft", "speculation.draft_model.tree": "top_k"},
    "parallel_draft": {"speculation.parallel_draft.model": "demo-parallel"},
    "head": {"model.head": "demo-head"},
    "head tree": {"model.head": "demo-head", "speculation.head.tree": "top_k"},
    "mixed": {"speculation.mixed.members": ["ngram", "suffix"]},
}
SHAPES: dict[str, dict[str, Any]] = {
    "ragged": {},
    "padded": {"backend.torch.layout": "padded", "bucketing.name": "exponential"},
    "gaudi": {
        "backend.name": "gaudi",
        "backend.gaudi.device": "emulated",
        "backend.gaudi.mode": "lazy",
        "backend.gaudi.check_model": False,
        "bucketing.name": "exponential",
    },
}
if ON_CUDA:
    del SHAPES["gaudi"]  # pinned memory of a process belongs to one accelerator, and emulated it is one
    SHAPES["graphs"] = {**SHAPES["padded"], "backend.torch.graphs": "buckets", "engine.warmup": True}
AXES = {
    "drafter": tuple(DRAFTERS),
    "rule": ("match", "token", "block", "tree", "typical"),
    "k": ("1", "3", "7"),
    "length": ("fixed", "goodput"),
    "budget": ("7", "64", "2048"),
    "prefix": ("on", "off"),
    "shape": tuple(SHAPES),
    "attention": ("auto", "sdpa"),
    "policy": ("fair_share", "fcfs", "priority", "shortest_first", "prefill_first"),
}


def allowed(case: Case) -> bool:
    """Trees need a backend and a rule that take them, heads ragged passes; the padded layouts' smallest pass must fit the budget."""
    if "head" in case["drafter"] and case["shape"] != "ragged":
        return False
    tree = "tree" not in case["drafter"] or (case["shape"] == "ragged" and case["rule"] in ("match", "tree"))
    return tree and (case["budget"] != "7" or case["shape"] == "ragged")


CASES = pairwise(AXES, allowed=allowed)


def overrides(case: Case) -> dict[str, Any]:
    name = case["drafter"].split()[0]
    members = ("ngram", "suffix") if name == "mixed" else (name,)
    return {
        "speculation.name": name,
        **DRAFTERS[case["drafter"]],
        **{f"speculation.{member}.max_draft_tokens": int(case["k"]) for member in members},
        "acceptance.name": case["rule"],
        "draft_length.name": case["length"],
        "engine.max_num_batched_tokens": int(case["budget"]),
        "cache.prefix_caching": case["prefix"] == "on",
        "backend.torch.attention": case["attention"],
        **SHAPES[case["shape"]],
        "scheduling.name": case["policy"],
    }


@contextlib.contextmanager
def opened(options: dict[str, Any]) -> Iterator[Any]:
    """Have an engine."""
    options = {
        "model.path": "demo",
        "model.dtype": "float32",
        "model.max_model_len": 64,
        "cache.num_blocks": 48,
        "engine.max_num_seqs": 4,
        "engine.warmup": False,
        "backend.torch.device": DEVICE,
        "observer.names": [],
        **options,
    }
    resolved, registry = load_with_plugins(environ={}, overrides=options)
    engine = build_engine(resolved.config, registry=registry)
    try:
        yield engine
    finally:
        engine.close()


def said(engine: Any, params: SamplingParams) -> list[list[int]]:
    """Return the tokens of every text; each comes when the one before has begun."""
    tokenizer = load_tokenizer("demo")
    ended = {}
    for index, text in enumerate(TEXTS):
        prompt = tokenizer.encode(text)
        engine.add(Request(request_id=str(index), prompt_token_ids=prompt, params=params))
        engine.step()
    while engine.has_work:
        for finished in engine.step().finished:
            assert not finished.error
            ended[int(finished.request_id)] = finished.token_ids.tolist()
    return [ended[index] for index in range(len(TEXTS))]


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(resolve_model_path("demo"), dtype=torch.float32).eval()
    tokenizer = load_tokenizer("demo")
    texts = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer.encode(text)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        texts.append(out[0, ids.shape[1] :].tolist())
    return texts


@pytest.mark.representatives(2)
@pytest.mark.parametrize(
    "case",
    [
        # The first few have most values of every axis; all have every pair of them.
        pytest.param(case, id="-".join(case.values()).replace(" ", "_"), marks=() if number < 12 else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
)
def test_greedy_text_is_that_of_transformers(case: Case, reference: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with opened(overrides(case)) as engine:
        assert said(engine, params) == reference
    totals = engine.totals
    assert totals.num_drafters_quarantined == 0, "the speculator was switched off, so nothing was shown"
    if case["length"] == "fixed":
        assert totals.num_draft_tokens > 0, "nothing was drafted, so nothing was shown"


@pytest.fixture(scope="module")
def seeded() -> dict[str, tuple[SamplingParams, list[list[int]]]]:
    """Texts without speculation at temperature 1, by kind of request."""
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "truncated": {"top_p": 0.9, "top_k": 40, "min_p": 0.02, "typical_p": 0.95},
        "history": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "no_repeat_ngram_size": 3, "dry_multiplier": 0.5},
        "biased": {"logit_bias": {300: 2.0, 17: -5.0}, "bad_token_ids": (260,), "min_tokens": 5, "mirostat_mode": 2},
    }  # fmt: skip
    made = {}
    with opened({}) as engine:
        for name, fields in kinds.items():
            params = SamplingParams(temperature=1.0, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True, **fields)
            made[name] = params, said(engine, params)
    return made


@pytest.fixture(scope="module", params=[name for name in DRAFTERS if name != "draft_model drawn"])
def drafting(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine with a drafter and the rule ``match``, for every kind of request."""
    case = {"drafter": request.param, "rule": "match", "k": "3", "length": "fixed", "budget": "64", "prefix": "on"}
    with opened(overrides({**case, "shape": "ragged", "attention": "auto", "policy": "fcfs"})) as engine:
        yield engine


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("truncated", "history", "biased"))]
)
def test_seeded_text_is_that_of_no_speculation(seeded, drafting, kind: str) -> None:
    params, texts = seeded[kind]
    num_before = drafting.totals.num_draft_tokens
    assert said(drafting, params) == texts
    assert drafting.totals.num_draft_tokens > num_before
    assert drafting.totals.num_drafters_quarantined == 0
