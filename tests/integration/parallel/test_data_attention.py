"""Engines whose ranks have sequences of their own, in threads and in processes: the answers of one process, whatever comes when."""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path

import pytest

from support.backends.mixtures import ranks_in_threads, save_mixture
from support.parallel_requests import PROMPTS, answers
from trencadis import LLM, SamplingParams
from trencadis.errors import TrencadisError
from trencadis.records import Request
from trencadis.text import load_tokenizer

KINDS = ("mixtral", "qwen3_moe", "gpt_oss")
TOKENS = 8
NIGHTLY = pytest.mark.nightly
PRESSED = {"cache.num_blocks": 6, "model.max_model_len": 96}
"""So few blocks a rank that running sequences are preempted."""

SETUPS = {
    "two": (2, {}),
    "two, drafts": (2, {"speculation.name": "ngram"}),
    "two, preemption": (2, PRESSED),
    "two, preemption by swap": (2, {**PRESSED, "engine.preemption": "swap"}),
    "two, defragmentation": (2, {"cache.num_blocks": 24, "defragmenter.enabled": "on"}),
    "two, padded": (2, {"backend.torch.layout": "padded", "backend.torch.max_prefill_batch_size": 2}),
    "four": (4, {}),
    "four, padded": (4, {"backend.torch.layout": "padded"}),
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """Return a function that saves a tiny mixture once."""
    root = tmp_path_factory.mktemp("mixtures")
    return functools.cache(lambda kind: save_mixture(kind, root / kind))


@pytest.fixture(scope="module")
def expected(mixture):
    """Return a function that gives the answers of one process."""
    return functools.cache(lambda kind: answers(TOKENS, **{"model.path": str(mixture(kind))}))


def in_threads(monkeypatch, path, size, overrides):
    """Return a configuration; keys of the backend become options of those that are ranks."""
    prefix = "backend.torch."
    options = {name.removeprefix(prefix): one for name, one in overrides.items() if name.startswith(prefix)}
    others = {name: one for name, one in overrides.items() if not name.startswith(prefix)}
    return {"cache.num_blocks": 48, **ranks_in_threads(monkeypatch, path, size, **options), **others}


@pytest.mark.parametrize("kind", [*KINDS[:1], *(pytest.param(kind, marks=NIGHTLY) for kind in KINDS[1:])])
def test_answers_are_those_of_one_process(mixture, expected, monkeypatch, kind):
    assert answers(TOKENS, **in_threads(monkeypatch, mixture(kind), 2, {})) == expected(kind)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("setup", list(SETUPS)[1:])
def test_answers_are_those_of_one_process_with_whatever_else_is_asked(mixture, expected, monkeypatch, kind, setup):
    size, overrides = SETUPS[setup]
    assert answers(TOKENS, **in_threads(monkeypatch, mixture(kind), size, overrides)) == expected(kind)


@pytest.mark.nightly
@pytest.mark.parametrize("setup", SETUPS)
def test_ranks_in_processes_give_the_answers_of_one(mixture, expected, setup):
    size, overrides = SETUPS[setup]
    layout = {"parallel.tensor": size, "parallel.expert": size, "parallel.attention": "data"}
    config = {"model.path": str(mixture("mixtral")), "executor.name": "processes", "cache.num_blocks": 48, **layout}
    assert answers(TOKENS, **{**config, **overrides}) == expected("mixtral")
    assert not list(Path("/dev/shm").glob(f"trencadis-{os.getpid()}-*"))


# ------------------------------------------------------------------------------------------------- histories


def request(encode, number, draw):
    params = SamplingParams(
        temperature=draw.choice([0.0, 0.8]), seed=number, max_tokens=draw.randint(1, 30), ignore_eos=True, logprobs=1
    )
    prompt = (PROMPTS[number % 2] + PROMPTS[draw.randrange(len(PROMPTS))])[: draw.randint(1, 220)]
    return Request(request_id=f"r{number}", prompt_token_ids=tuple(encode(prompt)), params=params)


def history(config, encode, seed):
    """Return the tokens of requests that come and go at random, as far as they came, and what the engine counted."""
    draw, leaving = random.Random(seed), random.Random(seed + 1)
    told: dict[str, list[int]] = {}
    with LLM(**config) as llm:
        engine = llm._frontend.engine.engine
        left = [request(encode, number, draw) for number in range(30)]
        while left or engine.has_work:
            while left and leaving.random() < 0.6:
                one = left.pop(0)
                told[one.request_id] = []
                engine.add(one)
            names = {slot: name for name, slot in engine._state.slot_of.items()}
            if names and leaving.random() < 0.03:
                engine.abort(leaving.choice(sorted(names.values())))
            deltas = engine.step()
            tokens = iter(deltas.token_ids.tolist())
            for slot, number in zip(deltas.slots.tolist(), deltas.num_tokens.tolist(), strict=True):
                told[names[slot]] += [next(tokens) for _ in range(number)]
        return told, engine.totals


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"engine.preemption": "swap"},
        {"speculation.name": "ngram"},
        {"backend.torch.layout": "padded", "scheduling.name": "priority"},
    ],
)
def test_requests_that_come_and_go_at_random_have_the_tokens_of_one_process(mixture, monkeypatch, kind, more):
    path = mixture(kind)
    encode = load_tokenizer(str(path)).encode
    common = {"engine.max_num_seqs": 6, "engine.max_num_batched_tokens": 24, "observer.names": [], **more}
    alone, _ = history({"model.path": str(path), "cache.num_blocks": 96, **common}, encode, 5)
    pressed = {**common, "cache.num_blocks": 12, "model.max_model_len": 96, "cache.block_size": 8}
    found, totals = history(in_threads(monkeypatch, path, 2, pressed), encode, 5)
    assert totals.num_preempted > 0
    assert totals.num_prompt_tokens_cached > 0
    for name in alone:
        length = min(len(found[name]), len(alone[name]))  # some were given up sooner
        assert found[name][:length] == alone[name][:length], name
    assert sum(map(len, found.values())) > 100


@pytest.mark.nightly
def test_one_request_after_another_leaves_a_rank_idle_all_the_time(mixture, expected):
    layout = {"parallel.tensor": 2, "parallel.expert": 2, "parallel.attention": "data"}
    config = {"executor.name": "processes", "cache.num_blocks": 48, "observer.names": [], **layout}
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(str(mixture("mixtral")), **config) as llm:
        for prompt in PROMPTS:
            (output,) = llm.generate([prompt], params)
            assert output.outputs[0].token_ids == expected("mixtral")[f"greedy: {prompt}"][0][0]


@pytest.mark.nightly
def test_a_rank_that_leaves_out_an_exchange_is_reported_in_processes_too(mixture, monkeypatch):
    config = {
        **in_threads(monkeypatch, mixture("mixtral"), 2, {}),
        "backend.name": "support.backends.mixtures:idle_rank_leaves_out",
        "backend.options": {},
        "executor.name": "processes",
        "executor.processes.max_restarts": 1,
        "observer.names": [],
    }
    with (
        pytest.raises(TrencadisError, match="lost its ranks"),
        LLM(**config) as llm,
    ):
        llm.generate([PROMPTS[0]], SamplingParams(temperature=0.0, max_tokens=2))
