"""Whole engines on the emulated Gaudi, and requests of every kind for them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from trencadis.client.factory import configure
from trencadis.engine.build import build_engine
from trencadis.engine.engine import Engine
from trencadis.records import FinishedSequence, Request, SamplingParams

MAX_MODEL_LEN = 96
VOCAB_SIZE = 131
LAYOUTS: dict[str, dict[str, Any]] = {
    "gathered": {"max_prefill_batch_size": 2},
    "contiguous": {"contiguous": True, "defragmenter": {"threshold": 0}},
    "merged": {"merged_prefill": True, "max_prefill_batch_size": 3},
    "unified": {"layout": "unified", "strategy": "unified"},
}
"""Options of the ways in which blocks and passes are laid out."""


def open_engine(
    path: Path,
    *,
    backend: str = "gaudi",
    strategy: str = "exponential",
    defragmenter: dict[str, Any] | None = None,
    max_num_seqs: int = 4,
    num_blocks: int = 24,
    prefix_caching: bool = True,
    warmup: bool = True,
    preemption: str = "recompute",
    strategy_options: dict[str, Any] | None = None,
    tables: dict[str, Any] | None = None,
    ranks: int = 1,
    **options: Any,
) -> Engine:
    """Return an engine with blocks of 16 tokens on a tiny model; ``options`` are of the backend's table, ``tables`` of others.

    Several ``ranks`` are threads, see ``gaudi_ranks.py``.
    """
    if backend == "gaudi":
        options = {"device": "emulated", "mode": "lazy", "check_model": False, **options}
    tables = {
        **(tables or {}),
        "backend": {"name": backend, backend: options}
        if ranks == 1
        else {"name": "support.backends.gaudi_ranks:ranked_gaudi", "options": {"size": ranks, **options}},
        "bucketing": {"name": strategy, strategy: strategy_options or {}},
        "cache": {"block_size": 16, "num_blocks": num_blocks, "prefix_caching": prefix_caching},
        "defragmenter": defragmenter or {},
        "engine": {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": 64,
            "warmup": warmup,
            "preemption": preemption,
        },
        "observer": {"names": []},
    }
    config, registry = configure({"path": str(path), "max_model_len": MAX_MODEL_LEN}, config_file=None, tables=tables)
    engine = build_engine(config, registry=registry)
    assert isinstance(engine, Engine)
    return engine


_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 3},
    {"temperature": 1.1, "top_k": 100},
    {"top_p": 0.8, "logprobs": 4},
    {"min_p": 0.1, "presence_penalty": 1.0, "logit_bias": {5: 3.0}},
    {"temperature": 0.0, "bad_token_ids": (4, 5), "min_tokens": 1, "logprobs": 0},
    {"temperature": 0.5, "top_k": 5, "top_p": 0.9},
    {"temperature": 0.0, "allowed_token_ids": tuple(range(10, 60)), "repetition_penalty": 1.3},
    {"frequency_penalty": 0.4, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "logprobs": 2},
    # The vendor's configurations that are none of those above.
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.3, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.2, "top_p": 0.8, "top_k": 100},
    {"temperature": 0.8, "top_p": 0.85},
)


def serve(
    engine: Engine, seed: int, *, num_requests: int = 14, greedy: bool = False, scores_prompts: bool = False
) -> dict[str, FinishedSequence]:
    """Run random requests of all lengths, arriving a few at a time; returns what became of each."""
    rng = random.Random(seed)
    shared = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(40))
    finished: list[FinishedSequence] = []
    for index in range(num_requests):
        length = rng.randrange(1, MAX_MODEL_LEN - 12)
        prompt = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(length))
        if rng.random() < 0.3:
            prompt = (*shared, *prompt)[:length]
        kind = _KINDS[0] if greedy else rng.choice(_KINDS)
        if scores_prompts and rng.random() < 0.5:
            kind = {**kind, "prompt_logprobs": rng.choice((0, 1, 50))}
        params = SamplingParams(max_tokens=rng.randrange(1, 12), ignore_eos=rng.random() < 0.5, **kind)
        engine.add(Request(request_id=f"{seed}/{index}", prompt_token_ids=prompt, params=params))
        for _ in range(rng.randrange(4)):
            finished += engine.step().finished
        if rng.random() < 0.1:
            engine.abort(f"{seed}/{index}")
    while engine.has_work:
        finished += engine.step().finished
    return {one.request_id: one for one in finished}


def tokens(served: dict[str, FinishedSequence]) -> dict[str, list[int]]:
    """Return the tokens of each request, none of which failed."""
    assert not {one.error for one in served.values()} - {""}
    return {name: one.token_ids.tolist() for name, one in served.items()}
