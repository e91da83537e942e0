"""Greedy tokens equal transformers' own generate, however the engine is set up."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from support.backends import tiny_models
from support.devices import DEVICE, ON_CUDA
from trencadis.engine.build import build_engine
from trencadis.records import Request, SamplingParams
from trencadis.registry.startup import load_with_plugins

NUM_TOKENS = 20
LENGTHS = (1, 5, 9, 16, 17, 33)
"""Prompt lengths around the window (7 to 9) and the block size (8)."""

BASE = {
    "engine.max_num_seqs": 4,
    "engine.max_num_batched_tokens": 64,
    "cache.block_size": 8,
    "cache.num_blocks": 128,
    "model.max_model_len": 96,
    "model.dtype": "float32",
    "backend.torch.device": DEVICE,
    "observer.names": [],
}
PADDED = {"backend.torch.layout": "padded"}
FEW_BLOCKS = {"cache.num_blocks": 12}
SWAP = {**FEW_BLOCKS, "engine.preemption": "swap"}
SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tiny chunks": {"engine.max_num_batched_tokens": 5},
    "one at a time, no overlap": {"engine.max_num_seqs": 1, "engine.async_scheduling": False},
    "no prefix cache": {"cache.prefix_caching": False},
    "preemption": FEW_BLOCKS,
    "preemption by swap": SWAP,
    "padded exponential": {**PADDED, "bucketing.name": "exponential"},
    "padded linear": {**PADDED, "bucketing.name": "linear", "engine.max_num_batched_tokens": 16},
    "padded exponential of 2025": {**PADDED, "bucketing.name": "exponential", "bucketing.exponential.generation": "2025-07"},
    "padded padding_aware": {**PADDED, "bucketing.name": "padding_aware"},
    "padded unified": {**PADDED, "bucketing.name": "unified", "bucketing.unified.form": "alpha"},
    "padded exact, preemption": {**PADDED, **FEW_BLOCKS, "bucketing.name": "exact"},
    "padded exact, preemption by swap": {**PADDED, **SWAP, "bucketing.name": "exact"},
}  # fmt: skip
if ON_CUDA:
    GRAPHS = {**SETUPS["padded exponential"], "backend.torch.graphs": "buckets", "engine.warmup": True}
    SETUPS["graphs"] = GRAPHS
    SETUPS["gathered"] = {"backend.torch.attention": "sdpa"}
    SETUPS["graphs, gathered"] = {**GRAPHS, "backend.torch.attention": "sdpa"}
    SETUPS["graphs, preemption by swap"] = {**GRAPHS, **SWAP}
    SETUPS["graphs, tiny chunks"] = {**GRAPHS, "engine.max_num_batched_tokens": 16}
REQUIRED = ("llama", "qwen2", "qwen3", "gemma3", "mistral", "phi3", "gpt2", "gpt_neox", "mixtral", "qwen3_moe")
IN_FULL = ("llama", "gemma3")
FEW = ("tiny chunks", "preemption", "padded exponential", *(("graphs",) if ON_CUDA else ()))
MIXTURES = ("mixtral", "qwen3_moe")
"""Their products of experts are no part of a graph in float32."""
CASES = [
    pytest.param(kind, name, id=f"{kind}-{name}", marks=() if name == FEW[1] or kind == "llama" else pytest.mark.slow)
    for kind in REQUIRED
    for name in (SETUPS if kind in IN_FULL else FEW)
    if not (kind in MIXTURES and name.startswith("graphs"))
]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {kind: tiny_models.save_model(kind, directory) for kind in REQUIRED}


def make(path: Path, setup: dict[str, Any]) -> Any:
    options = {**BASE, "model.path": str(path), "engine.warmup": False, **setup}
    resolved, registry = load_with_plugins(environ={}, overrides=options)
    return build_engine(resolved.config, registry=registry)


def check(engine: Any, path: Path) -> None:
    """Serve prompts of which two share a beginning and most join others; they are continued as transformers does it."""
    prompts = {str(n): tiny_models.prompt(n, seed=100 + n) for n in LENGTHS}
    prompts["shares a prefix"] = [*prompts["33"][:20], 7, 9]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    got: dict[str, list[int]] = {}
    for request_id, prompt in prompts.items():
        engine.add(Request(request_id=request_id, prompt_token_ids=prompt, params=params))
        if request_id == "9":
            engine.step()  # later prompts join sequences that already run
    while engine.has_work:
        for end in engine.step().finished:
            assert not end.error
            got[end.request_id] = end.token_ids.tolist()
    for request_id, prompt in prompts.items():
        assert got[request_id] == tiny_models.greedy_reference(path, prompt, NUM_TOKENS), request_id


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_greedy_tokens_equal_transformers(models: dict[str, Path], kind: str, name: str) -> None:
    with contextlib.closing(make(models[kind], SETUPS[name])) as engine:
        check(engine, models[kind])
    if "preemption" in name:
        assert engine.totals.num_preempted > 0
    if "swap" in name:
        assert engine.totals.num_blocks_swapped_in > 0
        assert engine.totals.num_recomputed_tokens == 0


@pytest.mark.slow
def test_decodes_are_replayed_as_captured_graphs(models: dict[str, Path], tmp_path: Path) -> None:
    buckets = tmp_path / "buckets.txt"
    buckets.write_text("(1, 24, [0, 8])\n([1, 2, 4], 1, [16, 32])\n")  # batch size, query length, blocks
    setup = {
        "engine.max_num_batched_tokens": 24,
        "engine.warmup": True,
        "cache.num_blocks": 32,
        "bucketing.name": "from_file",
        "bucketing.from_file.path": str(buckets),
        "backend.torch.layout": "padded",
        "backend.torch.pack": "off",
        "backend.torch.graphs": "buckets" if ON_CUDA else "checked",
    }
    with contextlib.closing(make(models["llama"], setup)) as engine:
        check(engine, models["llama"])
        lines = [line for line in engine.metrics().splitlines() if line.startswith("trencadis_torch_")]
    counts = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
    assert counts["trencadis_torch_captured_graphs"] > 0
    assert sum(value for name, value in counts.items() if "graph_replays_total" in name) >= 6
    assert counts["trencadis_torch_graph_misses_total"] == 0


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_seeded_text_is_independent_of_its_batch(models: dict[str, Path], layout: str) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=10, ignore_eos=True)
    texts = set()
    for neighbours in (0, 3):
        engine = make(models["llama"], {"backend.torch.layout": layout})
        engine.add(Request(request_id="seeded", prompt_token_ids=tiny_models.prompt(9), params=params))
        for i in range(neighbours):
            other = SamplingParams(temperature=1.3, seed=i, max_tokens=6 + i, repetition_penalty=1.2)
            engine.add(Request(request_id=str(i), prompt_token_ids=tiny_models.prompt(4 + i, seed=i), params=other))
        ends = [end for _ in range(60) if engine.has_work for end in engine.step().finished]
        texts.add(next(tuple(end.token_ids.tolist()) for end in ends if end.request_id == "seeded"))
        engine.close()
    assert len(texts) == 1
