"""Engines with a head, what they draft, and what they answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trencadis.client.factory import configure
from trencadis.engine.build import build_engine
from trencadis.engine.engine import Engine
from trencadis.records import FinishedSequence, Request, SamplingParams

__all__ = [
    "GREEDY",
    "PROMPTS",
    "SEEDED",
    "TREES",
    "Asked",
    "check_trees",
    "open_engine",
    "serve",
    "texts",
    "tree_tables",
]

RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(3, 97, size).tolist() for size in (5, 41, 23, 70)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=24, ignore_eos=True)

TREES: dict[str, dict[str, Any]] = {
    "top_k": {"tree": "top_k", "max_draft_tokens": 7, "tree_width": 3, "tree_depth": 3},
    "static": {"tree": "static", "max_draft_tokens": 8, "tree_shape": (3, 1, 2)},
    "sequoia": {"tree": "sequoia", "max_draft_tokens": 6},
}
"""Settings of ``[speculation.head]``."""


def tree_tables(tree: str, rule: str = "match") -> dict[str, Any]:
    """Return tables by which a head drafts such trees."""
    return {"speculation": {"name": "head", "head": TREES[tree]}, "acceptance": {"name": rule}}


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
        self.parents: list[list[int]] = []
        self.num_missing = 0
        speculator, inner = engine.stage("speculation")._speculator.strategy, None
        inner = speculator.propose

        def propose(view: Any) -> Any:
            found = inner(view)
            ends = np.cumsum(found.num_drafts)
            for tokens, end, count in zip(view.token_ids, ends, found.num_drafts, strict=True):
                self.num_missing += not count
                if count:
                    self.drafts.append((tokens.tolist(), found.token_ids[end - count : end].tolist()))
                    chain = np.arange(-1, count - 1)
                    self.parents.append((chain if found.parents is None else found.parents[end - count : end]).tolist())
            return found

        speculator.propose = propose  # type: ignore[method-assign]
        engine.stage("speculation")._speculator.strategy = speculator


def serve(engine: Engine, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> dict[str, FinishedSequence]:
    for number, prompt in enumerate(prompts):
        engine.add(Request(request_id=str(number), prompt_token_ids=tuple(prompt), params=params))
    ends: dict[str, FinishedSequence] = {}
    while engine.has_work:
        ends.update((end.request_id, end) for end in engine.step().finished)
    fault = engine.inspect().stages.get("speculation")
    assert not fault, fault
    assert not any(end.error for end in ends.values())
    return ends


def texts(ends: dict[str, FinishedSequence]) -> list[list[int]]:
    return [ends[name].token_ids.tolist() for name in sorted(ends)]


def check_trees(
    asked: Asked, tree: str, logprobs: Callable[[list[int], list[int]], torch.Tensor], *, every: int
) -> None:
    """Compare drafts that branch with those of a slow reference.

    Args:
        asked: The drafts.
        tree: Settings that they were made with.
        logprobs: Log-probabilities of the token after a text and drafts that follow each other.
        every: Which of them.
    """
    settings, num_branching = TREES[tree], 0
    for (tokens, drafts), parents in list(zip(asked.drafts, asked.parents, strict=True))[::every]:
        found = dict[tuple[int, ...], int]()
        paths: list[tuple[int, ...]] = []
        for draft, parent in zip(drafts, parents, strict=True):
            before = () if parent < 0 else paths[parent]
            paths.append((*before, draft))
            found[before] = found.get(before, 0) + 1
        num_branching += any(count > 1 for count in found.values())
        for before, count in found.items():
            likeliest = logprobs(tokens, list(before)).topk(count).indices.tolist()
            assert sorted(path[-1] for path in paths if path[:-1] == before) == sorted(likeliest)
        if tree == "top_k":
            assert set(paths) == _likeliest(tokens, logprobs, settings, len(drafts))
    assert num_branching


def _likeliest(
    tokens: list[int], logprobs: Callable[[list[int], list[int]], torch.Tensor], settings: dict[str, Any], size: int
) -> set[tuple[int, ...]]:
    """Return the likeliest paths among those that grow from the likeliest of each depth."""
    width, scores, level = settings["tree_width"], dict[tuple[int, ...], float](), [((), 0.0)]
    for _ in range(settings["tree_depth"]):
        grown = {}
        for path, score in level:
            top = logprobs(tokens, list(path)).topk(width)
            grown |= {
                (*path, token): score + own
                for token, own in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            }
        scores |= grown
        level = sorted(grown.items(), key=lambda one: -one[1])[:width]
    return {path for path, _ in sorted(scores.items(), key=lambda one: -one[1])[:size]}
