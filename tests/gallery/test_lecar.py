"""The policy of docs/gallery/eviction.md is an eviction policy, and the one of its paper."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from examples.gallery.eviction.lecar import LeCaR, trencadis_eviction_policies

from support.strategies.block_histories import ReferenceCache, conversations, hits_of
from support.strategies.gallery_pages import page_of
from trencadis.clock import SimulatedClock
from trencadis.interfaces import ComponentContext
from trencadis_testing.eviction import EvictionConformance


class TestLeCaR(EvictionConformance):
    make = LeCaR


class Reference(ReferenceCache):
    """Algorithms 1 and 2 of the paper over lists of contents, searched from end to end; lots are evicted after a request."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.recency: list[int] = []
        self.uses: dict[int, int] = {}
        self.histories: list[list[tuple[int, int, int]]] = [[], []]
        self.weights = [0.5, 0.5]
        self.draws = random.Random(0)
        self.time = 0

    def hits(self, requests: list) -> int:  # type: ignore[type-arg]
        """Count uses in chain order, before blocks join the list in the order in which they are freed."""
        num_hits = 0
        for request in requests:
            for content in request.contents:
                if content not in self.uses:
                    break
                num_hits += 1
            for content in request.contents:
                self.time += 1
                if content in self.uses:
                    self.uses[content] += 1
                    continue
                self.uses[content] = self.learn(content) + 1
            for content in reversed(request.contents):
                if content in self.recency:
                    self.recency.remove(content)
                self.recency.append(content)
            while len(self.uses) > self.capacity:
                self.evict_one()
        return num_hits

    def learn(self, content: int) -> int:
        for expert, history in enumerate(self.histories):
            for entry in history:
                if entry[0] == content:
                    history.remove(entry)
                    regret = 0.005 ** ((self.time - entry[1]) / self.capacity)
                    self.weights[expert] *= math.exp(-0.45 * regret)
                    share = min(0.99, max(1 - 0.99, self.weights[0] / sum(self.weights)))
                    self.weights = [share, 1 - share]
                    return entry[2]
        return 0

    def evict_one(self) -> int:
        least = [self.recency[0], min(self.recency, key=self.uses.__getitem__)]
        expert = 0 if self.draws.random() < self.weights[0] else 1
        content = least[expert]
        self.recency.remove(content)
        num_uses = self.uses.pop(content)
        if least[0] != least[1]:
            self.histories[expert] = [*self.histories[expert], (content, self.time, num_uses)][-self.capacity :]
        return content


@pytest.mark.representatives(3)
@pytest.mark.parametrize("capacity", [10, 30, 60])
@pytest.mark.parametrize("seed", range(3))
def test_hits_are_those_of_the_papers_algorithm(seed: int, capacity: int) -> None:
    requests = conversations(seed, num_requests=500)
    assert hits_of(LeCaR, requests, capacity) == Reference(capacity).hits(requests) > 0


def test_an_expert_whose_victim_comes_back_at_once_loses_weight_by_the_papers_factor() -> None:
    policy = LeCaR()
    for block, key in enumerate((b"a", b"a", b"b"), start=-1):
        policy.on_use([max(block, 0)], keys=[key], depths=[0], salt="", now_s=0.0)
    policy.on_free([0, 1], depths=[0, 0], now_s=0.0)
    policy._weights = [1.0, 0.0]
    policy.victims(1)  # recency: a, which was used twice; frequency would have taken b
    assert policy._histories[0] == {b"a": (3, 2)}
    policy._weights = [0.5, 0.5]
    policy.on_use([2], keys=[b"a"], depths=[0], salt="", now_s=0.0)
    lowered = math.exp(-0.45 * 0.005 ** (1 / 1))
    assert policy._weights[0] == pytest.approx(lowered / (1 + lowered))
    assert policy._num_uses[2] == 3, "it goes on from where it was"


def test_draws_follow_the_seed_of_the_engine() -> None:
    requests = conversations(3, num_requests=300)

    def hits(seed: int) -> int:
        context = ComponentContext(clock=SimulatedClock(), seed=seed)
        return hits_of(lambda: LeCaR(context=context), requests, 20)

    assert hits(1) == hits(1)
    assert len({hits(seed) for seed in range(6)}) > 1


def test_it_is_a_plugin_too_and_says_that_it_is_experimental() -> None:
    (component,) = trencadis_eviction_policies()
    assert (component.name, component.stability) == ("lecar", "experimental")
    made = component.factory(component.config(learning_rate=0.1), ComponentContext(clock=SimulatedClock(), seed=0))
    assert isinstance(made, LeCaR)
    assert made._learning_rate == 0.1


def test_the_page_shows_the_results_that_are_kept() -> None:
    root = Path(__file__).parents[2]
    page = page_of("eviction").replace("*", "")
    for trace in ("conversation", "synthetic"):
        results = json.loads((root / "examples" / "gallery" / "eviction" / f"{trace}.json").read_text())["results"]
        for policy, shown in (("lru", "`lru`"), ("arc", "`arc`"), ("s3_fifo", "`s3_fifo`"), ("lecar:LeCaR", "LeCaR")):
            ratios = [f"{row['hit_ratio']:.4f}"[1:] for row in results if row["policy"].endswith(policy)]
            assert f"| {shown} | {' | '.join(ratios)} |" in page, (trace, policy)
