"""Ranks of the emulated Gaudi in processes: the tokens of one process, and nothing compiled after the warm-up on either."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path

import pytest

from support.backends import gaudi_engines, tiny_models

SETUPS = {
    "lazy": {},
    "lazy, gloo, experts": {"kind": "qwen3_moe", "expert": 2, "collective": "gloo"},
    "torch.compile": {"mode": "compile"},
    "unified, drafts": {
        "layout": "unified",
        "strategy": "unified",
        "tables": {"speculation": {"name": "ngram"}, "draft_length": {"name": "fixed"}},
    },
    "phi3": {"kind": "phi3"},
    "gemma3": {"kind": "gemma3", "preemption": "swap", "num_blocks": 9},
    "mixtral": {"kind": "mixtral"},
    "gpt_oss": {"kind": "gpt_oss"},
    "put off": {"warmup_required": 1, "warmup_quiet_s": 0.0},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """``path(kind)`` saves a tiny model and returns its directory."""
    root = tmp_path_factory.mktemp("models")
    return functools.cache(lambda kind: tiny_models.save_model(kind, root))


def served(path, tables=None, **options):
    """Serve a fixed trace; returns its tokens, the engine's counts, and what was prepared."""
    engine = gaudi_engines.open_engine(path, tables=tables, **options)
    try:
        found = gaudi_engines.serve(engine, 11)
        while engine.work_ahead() is not None:
            pass
        found |= gaudi_engines.serve(engine, 12)
        assert not {one.error for one in found.values()} - {""}
        return {name: one.token_ids.tolist() for name, one in found.items()}, engine.totals, engine.metrics()
    finally:
        engine.close()


@pytest.mark.nightly  # as threads: tests/backends/trencadis_gaudi/parallel/test_ranks.py
@pytest.mark.parametrize("setup", SETUPS)
def test_two_processes_serve_a_trace_as_one_does_and_compile_nothing_late(path, setup):
    options = {"strategy_options": {"limit": 1}, "max_num_seqs": 2, **SETUPS[setup]}
    if "strategy" in options:
        del options["strategy_options"]
    expert, collective = options.pop("expert", 1), options.pop("collective", "auto")
    model, tables = path(options.pop("kind", "llama")), options.pop("tables", {})
    expected, *_ = served(model, tables, **{**options, "mode": "lazy"}, warmup=False)
    ranks = {
        "executor": {"name": "processes", "processes": {"collective": collective}},
        "parallel": {"tensor": 2, "expert": expert},
    }
    found, totals, metrics = served(model, {**tables, **ranks}, **options, emulated_frozen=True)
    assert found == expected
    assert totals.num_compilations == totals.num_unprepared == totals.num_failed_steps == 0
    assert "trencadis_gaudi_recompilations_total 0.0" in metrics
    assert 'trencadis_gaudi_warmup_buckets{state="deferred"} 0.0' in metrics
    assert not list(Path("/dev/shm").glob(f"trencadis-{os.getpid()}-*"))


@pytest.mark.nightly
def test_a_rank_that_is_killed_is_started_and_warmed_up_again(path):
    options = {"strategy_options": {"limit": 1}, "max_num_seqs": 2}
    engine = gaudi_engines.open_engine(path("llama"), warmup=False, **options)
    expected = {name: one.token_ids.tolist() for name, one in gaudi_engines.serve(engine, 11, greedy=True).items()}
    engine.close()
    ranks = {"executor": {"name": "processes"}, "parallel": {"tensor": 2}}
    engine = gaudi_engines.open_engine(path("llama"), tables=ranks, emulated_frozen=True, **options)
    victim = engine._executor._ranks[1].pid
    os.kill(victim, signal.SIGKILL)
    found = gaudi_engines.serve(engine, 11, greedy=True)
    assert engine._executor._ranks[1].pid != victim
    assert engine.totals.num_compilations == engine.totals.num_unprepared == 0
    engine.close()
    # Steps that were lost let fewer tokens come before an abort.
    for name, one in found.items():
        tokens = one.token_ids.tolist()
        assert not one.error
        assert tokens == expected[name][: len(tokens)]
        assert len(tokens) == len(expected[name]) or one.finish_reason.value == "abort"
