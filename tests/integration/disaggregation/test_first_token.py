"""The first token comes from the engine that computes the prompt, the others from the one that has the request: with the demo model, a text
is what one engine says alone."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from support.kv.p2p_ends import LOOPBACK_PEERS, SECRET
from trencadis.client.factory import configure
from trencadis.engine.build import build_engine
from trencadis.records import FinishedSequence, Request, SamplingParams, TokenLogprobs

PROMPT = tuple(5 + (41 + i * 37 + i * i % 11) % 200 for i in range(100))
PATIENCE_S = 120.0
BASE: dict[str, Any] = {
    "observer": {"names": []},
    "engine": {"max_num_batched_tokens": 64, "seed": 11},
    "cache": {"num_blocks": 128, "block_size": 16},
}


def engine_of(seed: int = 11, sampling: dict[str, Any] | None = None, **p2p: Any) -> Any:
    tables = {**BASE, "engine": {**BASE["engine"], "seed": seed}, "sampling": sampling or {}}
    if p2p:
        tables["kv_connector"] = {"name": "p2p", "p2p": {"secret": SECRET, "peers": list(LOOPBACK_PEERS), **p2p}}
    config, registry = configure("demo", config_file=None, tables=tables)
    return build_engine(config, registry=registry)


class Pair:
    """An engine that generates and one that computes prompts for it, stepped by turns; and one that does both alone."""

    def __init__(self, *, sampling: dict[str, Any] | None = None) -> None:
        # What is drawn without a seed must not be drawn alike by accident.
        self.prefill = engine_of(seed=12, connect_timeout_s=30.0, sampling=sampling)
        port = self.prefill.stage("transfer").transfers.connector.strategy._node.server.port
        self.decode = engine_of(
            prefill_engines=[f"127.0.0.1:{port}"],
            min_remote_tokens=32,
            max_slowdown=1e9,
            connect_timeout_s=30.0,
            pull_timeout_s=60.0,
            prefill_timeout_s=60.0,
        )
        self.alone = engine_of()
        self.node = self.decode.stage("transfer").transfers.connector.strategy._node
        self._number = 0
        until_s = time.monotonic() + PATIENCE_S
        while not self.node.prefill_pool.ready():
            assert time.monotonic() < until_s
            threading.Event().wait(0.01)

    @property
    def num_loaded(self) -> int:
        """Loads of the engine that generates."""
        loaded: int = self.decode.stage("transfer").transfers.num_loaded
        return loaded

    @property
    def num_taken(self) -> int:
        taken: int = self.decode.stage("transfer").first_tokens.results["taken"]
        return taken

    def run(
        self, engine: Any, params: SamplingParams, *, prompt: tuple[int, ...] = PROMPT, num: int = 1
    ) -> list[tuple[FinishedSequence, list[TokenLogprobs]]]:
        """Return what an engine says of a prompt that its cache has not seen, so many times at once."""
        self._number += 1
        slots: dict[int, str] = {}
        ends: dict[str, FinishedSequence] = {}
        for i in range(num):
            name = f"request {self._number}.{i}"
            request = Request(request_id=name, prompt_token_ids=prompt, params=params, cache_salt=str(self._number))
            slots[engine.add(request)] = name
        found: dict[str, list[TokenLogprobs]] = {name: [] for name in slots.values()}
        until_s = time.monotonic() + PATIENCE_S
        while len(ends) < num:
            assert time.monotonic() < until_s
            deltas = engine.step()
            for entry in deltas.logprobs:
                found[slots[int(deltas.slots[entry.index])]].append(entry)
            ends.update({end.request_id: end for end in deltas.finished})
            if engine is self.decode and self.prefill.has_work:
                self.prefill.step()
            if engine.is_stalled:
                threading.Event().wait(0.001)
        return [(ends[name], found[name]) for name in slots.values()]

    def close(self) -> None:
        for engine in (self.decode, self.prefill, self.alone):
            engine.close()


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    one = Pair()
    yield one
    one.close()


EXACT: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 4},
    "seeded and cut": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "seed": 5},
    "penalties": {"temperature": 0.7, "seed": 6, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "masks and bias": {
        "temperature": 1.0,
        "seed": 7,
        "logit_bias": {40: 4.0},
        "allowed_token_ids": tuple(range(20, 60)),
    },
    "min tokens": {"temperature": 1.5, "seed": 8, "min_tokens": 6, "stop_token_ids": tuple(range(0, 300, 2))},
    "xtc": {"temperature": 1.0, "seed": 9, "xtc_probability": 0.9, "xtc_threshold": 0.02},
    "bad words": {"temperature": 0.0, "no_repeat_ngram_size": 2, "bad_words_ids": ((260,), (300, 301))},
    "json": {"temperature": 0.9, "seed": 10, "structured": {"kind": "json_object"}},
    "choice": {"temperature": 1.2, "seed": 12, "structured": {"kind": "choice", "choices": ["yes", "no", "perhaps"]}},
}


@pytest.mark.representatives(1)
@pytest.mark.parametrize("params", EXACT.values(), ids=EXACT)
def test_text_is_token_by_token_what_one_engine_says(pair: Pair, params: dict[str, Any]) -> None:
    """Drawn by the seed and the position, wherever that is done."""
    wanted = SamplingParams(max_tokens=12, **params)
    taken = pair.num_taken
    ((end, _),) = pair.run(pair.decode, wanted)
    ((true, _),) = pair.run(pair.alone, wanted)
    assert end.token_ids.tolist() == true.token_ids.tolist()
    assert (end.finish_reason, end.stop_token_id) == (true.finish_reason, true.stop_token_id)
    assert pair.num_taken == taken + 1


def test_what_carries_a_state_is_chosen_here_and_is_the_same(pair: Pair) -> None:
    wanted = SamplingParams(max_tokens=12, mirostat_mode=2, seed=3)
    taken, loaded = pair.num_taken, pair.num_loaded
    ((end, _),) = pair.run(pair.decode, wanted)
    ((true, _),) = pair.run(pair.alone, wanted)
    assert end.token_ids.tolist() == true.token_ids.tolist()
    assert pair.num_taken == taken
    assert pair.num_loaded == loaded + 1, "its prompt was computed there all the same"


@pytest.mark.nightly
def test_draws_without_a_seed_have_the_distribution_of_one_engine(pair: Pair) -> None:
    """Two samples of 240; a chi-square test of homogeneity over the likelier tokens, which a right engine fails once in 1000 runs."""
    wanted = SamplingParams(max_tokens=1, temperature=0.8, top_k=4)
    taken = pair.num_taken
    here, there = (
        Counter(int(end.token_ids[0]) for _ in range(15) for end, _ in pair.run(engine, wanted, num=16))
        for engine in (pair.alone, pair.decode)
    )
    assert pair.num_taken == taken + 240
    tokens = sorted(set(here) | set(there))
    assert 2 <= len(tokens) <= 4
    chi2 = sum((here[t] - there[t]) ** 2 / (here[t] + there[t]) for t in tokens)
    limit = {2: 10.83, 3: 13.82, 4: 16.27}[len(tokens)]  # 0.999 quantiles of chi-square, len - 1 degrees of freedom
    assert chi2 < limit


@pytest.mark.nightly
def test_engine_whose_sampler_is_made_up_otherwise_computes_the_prompt_only() -> None:
    """Its penalty would come in another order: the token would be another one."""
    one = Pair(sampling={"name": "greedy"})
    try:
        wanted = SamplingParams(max_tokens=8, temperature=1.0, seed=21)
        ((end, _),) = one.run(one.decode, wanted)
        ((true, _),) = one.run(one.alone, wanted)
        assert end.token_ids.tolist() == true.token_ids.tolist()
        assert (one.num_taken, one.num_loaded) == (0, 1)
        assert one.node.metrics.value("prefill_responses_total", token="none") == 1
    finally:
        one.close()
