"""Engines with a head, what they draft, and what they answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from trencadis.client.factory import configure
from trencadis.engine.build import build_engine
from trencadis.engine.engine import Engine
from trencadis.records import FinishedSequence, Request, SamplingParams

__all__ = ["GREEDY", "PROMPTS", "SEEDED", "Asked", "open_engine", "serve", "texts"]

RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(3, 97, size).tolist() for size in (5, 41, 23, 70)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True)


def open_engine(verifier: Path, head: Path | str | None, *, speculator: str = "head", **tables: Any) -> Engine:
    speculation = {"name": "none"} if head is None else {"name": speculator, "head": {"max_draft_tokens": 4}}
    config, registry = configure(
        {"path": str(verifier), "tokenizer": "none", "head": "" if head is None else str(head), "max_model_len": 200},
        config_file=None,
        tables={
            "speculation": speculation,
            "draft_length": {"name": "fixed"},
            "observer": {"names": []},
            **tables,
            "cache": {"block_size": 4, "num_blocks": 128, **tables.get("cache", {})},
            "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 32, **tables.get("engine", {})},
        },
    )
    engine = build_engine(config, registry=registry)
    assert isinstance(engine, Engine)
    return engine


class Asked:
    """Keeps what the head drafted after which text."""

    def __init__(self, engine: Engine) -> None:
        self.drafts: list[tuple[list[int], list[int]]] = []
        self.num_missing = 0
        speculator, inner = engine._drafting._speculator.strategy, None
        inner = speculator.propose

        def propose(view: Any) -> Any:
            found = inner(view)
            ends = np.cumsum(found.num_drafts)
            for tokens, end, count in zip(view.token_ids, ends, found.num_drafts, strict=True):
                self.num_missing += not count
                if count:
                    self.drafts.append((tokens.tolist(), found.token_ids[end - count : end].tolist()))
            return found

        speculator.propose = propose  # type: ignore[method-assign]


def serve(engine: Engine, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> dict[str, FinishedSequence]:
    for number, prompt in enumerate(prompts):
        engine.add(Request(request_id=str(number), prompt_token_ids=tuple(prompt), params=params))
    ends: dict[str, FinishedSequence] = {}
    while engine.has_work:
        ends.update((end.request_id, end) for end in engine.step().finished)
    fault = engine.inspect().speculation_fault
    assert not fault, fault
    assert not any(end.error for end in ends.values())
    return ends


def texts(ends: dict[str, FinishedSequence]) -> list[list[int]]:
    return [ends[name].token_ids.tolist() for name in sorted(ends)]
