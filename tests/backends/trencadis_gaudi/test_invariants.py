"""Promises over the whole backend: the torch backend's tokens, and nothing compiled after the warm-up."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.backends import gaudi_engines
from trencadis.errors import StepFailedError
from trencadis_plugins.sampling import arithmetic

BUCKETS = """
([1, 2], [16, 32, 64], [0, 1, 2, 4, 6])
([1, 2, 4], 1, [4, 8, 16, 24])
"""


TRACE = "".join(
    f'{{"timestamp": {index * 40}, "input_length": {5 + 11 * index % 80}, "output_length": {1 + index % 9}}}\n'
    for index in range(30)
)


def strategy_options(strategy, tmp_path_factory):
    """What a strategy that reads a file needs; the trace knows but a part of what the workloads ask for."""
    if strategy not in {"from_file", "fitted"}:
        return {"generation": "2025-07"} if "2025" in strategy else None
    name, text = ("path", BUCKETS) if strategy == "from_file" else ("trace", TRACE)
    path = tmp_path_factory.mktemp("buckets") / f"{name}.jsonl"
    path.write_text(text)
    return {name: str(path)}


WAYS = {
    **gaudi_engines.LAYOUTS,
    "unified": {"layout": "unified"},
    "scored": {"prompt_logprobs": True},
    "scarce": {"num_blocks": 9, "mark_layers": 0},
    "budgeted": {"capture": "budgeted", "emulated_memory_bytes": 3_500_000, "graph_reserve": 0.5},
}
CASES = [
    ("exponential", "contiguous"),
    ("fitted", "gathered"),
    ("exponential", "gathered"),
    ("exponential", "merged"),
    ("exponential", "scarce"),
    ("exponential", "budgeted"),
    ("exponential of 2025", "gathered"),
    ("fitted", "contiguous"),
    ("linear", "gathered"),
    ("padding_aware", "gathered"),
    ("padding_aware", "contiguous"),
    ("from_file", "gathered"),
    ("unified", "gathered"),
    ("exponential", "scored"),
    ("unified", "unified"),
]
"""Strategies and layouts; the first and the last ones run by day."""


@pytest.fixture(scope="module")
def greedy_tokens(model_path):
    """What the torch backend generates for the random workload of a seed."""
    found = {}

    def tokens(kind, seed):
        if (kind, seed) not in found:
            engine = gaudi_engines.open_engine(model_path(kind), backend="torch", strategy="exact", device="cpu")
            served = gaudi_engines.serve(engine, seed, greedy=True)
            engine.close()
            found[kind, seed] = gaudi_engines.tokens(served)
        return found[kind, seed]

    return tokens


def whole(tokens, served):
    """The expected tokens of what was served: an aborted sequence has a prefix of them, as long as time allowed."""
    return all(
        one.token_ids.tolist() == tokens[name][: len(one.token_ids)]
        and (one.finish_reason.value == "abort" or len(one.token_ids) == len(tokens[name]))
        for name, one in served.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "way"), CASES)
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
def test_greedy_tokens_are_those_of_the_torch_backend(model_path, greedy_tokens, tmp_path_factory, kind, strategy, way):
    """Layers with a sliding window and without, under every strategy and layout; compiled as they come."""
    options = strategy_options(strategy, tmp_path_factory)
    engine = gaudi_engines.open_engine(
        model_path(kind), strategy=strategy.partition(" ")[0], strategy_options=options, warmup=False, **WAYS[way]
    )
    assert whole(greedy_tokens(kind, 1), gaudi_engines.serve(engine, 1, greedy=True))
    engine.close()


@pytest.mark.representatives(1, ci=2)
@pytest.mark.parametrize(("strategy", "way"), CASES)
def test_greedy_tokens_after_the_warm_up_are_those_of_the_torch_backend(greedy_tokens, frozen, strategy, way):
    """Replayed graphs included."""
    engine = frozen(strategy, way)
    assert whole(greedy_tokens("llama", 1), gaudi_engines.serve(engine, 1, greedy=True))
    assert engine.totals.num_compilations == 0


@pytest.mark.slow
def test_preemption_by_swap_compiles_nothing_and_computes_nothing_twice(model_path, greedy_tokens):
    """Under blocks so scarce that sequences lose theirs all the time."""
    engine = gaudi_engines.open_engine(
        model_path("llama"), preemption="swap", emulated_frozen=True, **WAYS["contiguous"], num_blocks=9
    )
    assert whole(greedy_tokens("llama", 1), gaudi_engines.serve(engine, 1, greedy=True))
    totals = engine.totals
    assert totals.num_blocks_swapped_in > 0
    assert (totals.num_recomputed_tokens, totals.num_compilations, totals.num_failed_steps) == (0, 0, 0)
    engine.close()


def test_greedy_tokens_in_eager_mode(model_path, greedy_tokens):
    engine = gaudi_engines.open_engine(model_path("gemma3"), mode="eager", contiguous=True)
    assert whole(greedy_tokens("gemma3", 1), gaudi_engines.serve(engine, 1, greedy=True))
    engine.close()


@pytest.mark.nightly  # with layers that are compiled by themselves: test_feature_pairs.py
def test_greedy_tokens_with_torch_compile_of_a_table_that_is_compiled_before_the_first_request(
    model_path, greedy_tokens
):
    """Few sizes, for each is traced anew."""
    engine = gaudi_engines.open_engine(
        model_path("llama"), mode="compile", regional=False, strategy_options={"limit": 1}, emulated_frozen=True
    )
    served = gaudi_engines.serve(engine, 1, greedy=True)
    assert engine.totals.num_compilations == 0
    assert engine.totals.num_failed_steps == 0
    engine.close()
    assert whole(greedy_tokens("llama", 1), served)


@pytest.fixture(scope="module")
def frozen(model_path, tmp_path_factory):
    """``frozen(strategy, way)``: an engine on a device that refuses to compile after the warm-up; one for all examples."""
    engines = {}

    def make(strategy, way):
        if (strategy, way) not in engines:
            options = strategy_options(strategy, tmp_path_factory)
            engines[strategy, way] = gaudi_engines.open_engine(
                model_path("llama"),
                strategy=strategy.partition(" ")[0],
                strategy_options=options,
                emulated_frozen=True,
                **WAYS[way],
            )
        return engines[strategy, way]

    yield make
    for engine in engines.values():
        engine.close()


@pytest.mark.representatives(1, ci=2)
@pytest.mark.parametrize(("strategy", "way"), CASES)
@settings(
    max_examples=2,  # the first is the simplest there is; both are the same in every case
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(min_value=0, max_value=2**20))
def test_after_the_warm_up_a_random_workload_compiles_nothing(frozen, strategy, way, seed):
    engine = frozen(strategy, way)
    before = engine.totals.num_finished
    served = gaudi_engines.serve(engine, seed, scores_prompts=way == "scored")
    assert not {one.error for one in served.values()} - {""}
    assert engine.totals.num_compilations == engine.totals.num_unprepared == 0
    assert engine.totals.num_failed_steps == 0
    assert engine.totals.num_finished - before == 14


@pytest.mark.representatives(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "way", "seed", "num_pieces"),
    [
        ("exponential", "gathered", 71_203, (1, 26, 4)),
        ("unified", "unified", 405_119, (9, 33)),
    ],
)
def test_no_request_waits_for_a_bucket_that_is_prepared_later(
    model_path, greedy_tokens, strategy, way, seed, num_pieces
):
    """From the first request on, whatever is prepared between two of them; larger buckets stand in."""
    engine = gaudi_engines.open_engine(
        model_path("llama"), strategy=strategy, emulated_frozen=True, warmup_required=1, warmup_quiet_s=0.0, **WAYS[way]
    )
    served = gaudi_engines.serve(engine, seed)
    assert engine.totals.num_substituted
    for number in num_pieces:
        assert all(engine.work_ahead() in (0.0, None) for _ in range(number))
        served |= gaudi_engines.serve(engine, seed + 1)
    while engine.work_ahead() is not None:
        pass
    substituted = engine.totals.num_substituted
    assert whole(greedy_tokens("llama", 1), gaudi_engines.serve(engine, 1, greedy=True))
    assert engine.totals.num_substituted == substituted
    assert not {one.error for one in served.values()} - {""}
    assert engine.totals.num_compilations == engine.totals.num_unprepared == 0
    text = engine.metrics()
    assert f'trencadis_gaudi_warmup_buckets{{state="prepared"}} {len(engine.warm_up.buckets)}.0' in text
    assert 'trencadis_gaudi_warmup_buckets{state="deferred"} 0.0' in text
    engine.close()


@pytest.mark.slow
def test_workloads_meet_what_is_hard(model_path):
    """Preempted sequences, moved blocks and prefix hits occur in the runs above; else they would prove little."""
    scarce, contiguous, gathered = (
        gaudi_engines.open_engine(model_path("llama"), warmup=False, **WAYS[way])
        for way in ("scarce", "contiguous", "gathered")
    )
    for engine in (scarce, contiguous, gathered):
        gaudi_engines.serve(engine, 5)
        engine.close()
    assert scarce.totals.num_preempted
    assert contiguous.totals.num_block_swaps
    assert not contiguous.totals.num_prompt_tokens_cached
    assert gathered.totals.num_prompt_tokens_cached


@pytest.mark.nightly
def test_random_numbers_of_the_host_compile_nothing_and_give_the_same_tokens(model_path, monkeypatch):
    """A device without 64-bit arithmetic, as a Gaudi in lazy mode is; drafts with a rule that needs random numbers, too."""
    tables = {
        "speculation": {"name": "ngram", "ngram": {"max_draft_tokens": 2, "min_match": 1}},
        "draft_length": {"name": "fixed"},
        "acceptance": {"name": "token"},
    }
    tokens = []
    for devices in ({"cpu"}, set()):
        monkeypatch.setattr(arithmetic, "_WITH_64_BITS", devices)
        engine = gaudi_engines.open_engine(model_path("llama"), emulated_frozen=True, tables=tables)
        served = [gaudi_engines.serve(engine, seed) for seed in (3, 4)]
        engine.close()
        tokens.append([*map(gaudi_engines.tokens, served)])
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_device_does_notice_what_was_not_warmed_up(model_path):
    """The oracle of the test above: without the small buckets, the same run fails."""
    engine = gaudi_engines.open_engine(
        model_path("llama"), emulated_frozen=True, strategy_options={"prompt_query_limit": 1}, max_prefill_batch_size=2
    )
    engine.warm_up  # noqa: B018 - its table has the longest query only
    backend = engine._executor._rank.backend
    backend._capture.graphs.clear()
    backend._adapter.clear_cache()
    served = gaudi_engines.serve(engine, 3)
    engine.close()
    assert any("compiled after the warm-up" in one.error for one in served.values())


@pytest.mark.slow
def test_dynamic_sampler_would_compile(model_path, monkeypatch):
    from trencadis_plugins.sampling.standard import StandardSampler

    monkeypatch.setattr(StandardSampler, "use_static_shapes", lambda self: ())
    engine = gaudi_engines.open_engine(model_path("llama"), emulated_frozen=True)
    served = gaudi_engines.serve(engine, 3)
    engine.close()
    errors = {one.error for one in served.values()}
    assert any(StepFailedError.__name__ in error or "compiled after the warm-up" in error for error in errors)
