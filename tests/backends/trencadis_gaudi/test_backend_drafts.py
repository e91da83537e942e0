"""Speculation on the emulated Gaudi: runs of every length in buckets of a few, and nothing compiled after the warm-up."""

from __future__ import annotations

import pytest

from support.backends import gaudi_engines, tiny_models
from support.backends.gaudi_ranks import load_gaudi
from support.strategies.scripted_drafts import EveryLength
from trencadis.interfaces import AllocationPlan
from trencadis_testing.driver import BackendDriver, Work

LAYOUTS = {**gaudi_engines.LAYOUTS, "swapped": {"num_blocks": 9, "preemption": "swap"}}


def open_engine(path, rule, *, drafter="EveryLength", **options):
    tables = {
        "speculation": {"name": f"support.strategies.scripted_drafts:{drafter}"},
        "acceptance": {"name": rule},
        "draft_length": {"name": "fixed"},
    }
    return gaudi_engines.open_engine(path, emulated_frozen=True, tables=tables, **options)


@pytest.fixture(scope="module")
def plain(model_path):
    """What the torch backend generates without speculation; the drafter is told, and is right about half of the time."""
    texts = {}
    for greedy in (True, False):
        engine = gaudi_engines.open_engine(model_path("llama"), backend="torch", strategy="exact", device="cpu")
        served = gaudi_engines.serve(engine, 4, num_requests=40, greedy=greedy)
        engine.close()
        texts[greedy] = gaudi_engines.tokens(served)
    return texts


def serve(engine, texts, monkeypatch, *, greedy):
    """Serve the same requests with drafts; returns the texts, each checked to be no longer than without."""
    monkeypatch.setattr(EveryLength, "texts", texts)
    served = gaudi_engines.serve(engine, 4, num_requests=40, greedy=greedy)
    totals = engine.totals
    assert totals.num_draft_tokens - totals.num_accepted_tokens > 8
    assert totals.num_accepted_tokens > 8
    assert totals.num_compilations == totals.num_unprepared == totals.num_failed_steps == 0
    engine.close()
    return gaudi_engines.tokens(served)


def agree(found, expected):
    """An aborted sequence has more of the text or less, as time allowed, or ended before there was any."""
    return all(
        one[: len(expected[name])] == expected[name][: len(one)] for name, one in found.items() if name in expected
    )


@pytest.mark.representatives(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "greedy"), [("gathered", False), ("contiguous", True), ("unified", False), ("swapped", True)]
)
def test_text_of_matching_drafts_is_that_of_no_speculation(model_path, plain, monkeypatch, greedy, layout):
    """Drawn texts too: masks, penalties, truncation and log-probabilities in every combination."""
    monkeypatch.setattr(EveryLength, "lengths", set())
    few = {} if layout == "unified" else {"strategy_options": {"limit": 1}}
    engine = open_engine(model_path("llama"), "match", **few, **LAYOUTS[layout])
    found = serve(engine, plain[greedy], monkeypatch, greedy=greedy)
    assert agree(found, plain[greedy])
    assert EveryLength.lengths >= set(range(7))


@pytest.mark.representatives(1)
@pytest.mark.slow
@pytest.mark.parametrize(("layout", "drafter"), [("gathered", "EveryLength"), ("unified", "DrawnLengths")])
def test_rules_that_read_distributions_compile_nothing(model_path, plain, monkeypatch, layout, drafter):
    """Drafts that are certain, and drafts that were drawn: their distributions have another number of rows in every step."""
    few = {} if layout == "unified" else {"strategy_options": {"limit": 1}}
    engine = open_engine(model_path("llama"), "token", drafter=drafter, max_num_seqs=2, **few, **LAYOUTS[layout])
    serve(engine, plain[False], monkeypatch, greedy=False)


def test_host_waits_no_more_often_for_drafts_than_for_one_token(model_path):
    """What stands is found on the device: the host waits for the check of the logits, once a pass, and for nothing else."""
    plan = AllocationPlan(
        num_blocks=30, block_size=16, num_rows=4, max_model_len=96, max_num_batched_tokens=64, max_draft_tokens=3
    )
    backend = load_gaudi(model_path("llama"), plan)
    driver = BackendDriver(backend, plan)
    driver.start(0, tiny_models.prompt(20))
    driver.step([Work(0)])
    syncs = []
    for work in (Work(0), Work(0, 0, (5,)), Work(0, 0, (5, 6, 7))):
        before = backend.habana.emulated.num_host_syncs
        driver.step([work])
        syncs.append(backend.habana.emulated.num_host_syncs - before)
    assert syncs == [1, 1, 1]
