from __future__ import annotations

import pytest

from trencadis.records import Bucket, Phase, SamplingParams
from trencadis_gaudi.graphs.sampler_warmup import CONFIGURATIONS, dummy_drafts, sampler_sizes, warm_up_sampler
from trencadis_testing.doubles import Matching

DECODE = Phase.DECODE


def test_sizes_are_rows_and_logits_of_each_of_every_bucket_once():
    buckets = [Bucket(1, 128, 0), Bucket(1, 256, 2), Bucket(4, 1, 8, DECODE), Bucket(4, 1, 16, DECODE)]
    assert sampler_sizes(buckets) == [(1, 1), (4, 1)]
    assert sampler_sizes([*buckets, Bucket(4, 3, 16, DECODE)]) == [(1, 1), (4, 1), (4, 3)]


def test_rule_that_reads_distributions_is_shown_drafts_that_were_drawn_too():
    class Reads(Matching):
        needs_distributions = True

    assert dummy_drafts(4, 1, vocab_size=9, rule=Reads()) == (None,)
    assert dummy_drafts(4, 3, vocab_size=9, rule=Matching()) == (None,)
    none, drawn = dummy_drafts(4, 3, vocab_size=9, rule=Reads())
    assert none is None
    assert drawn.num_drafts.tolist() == [2] * 4
    assert len(drawn.token_ids) == len(drawn.distributions.rows) == 8
    assert drawn.distributions.probabilities.shape == (1, 9)
    assert float(drawn.distributions.probabilities.sum()) == pytest.approx(1)


def test_twelve_configurations_are_logged_in_the_vendors_order_and_words(caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    warm_up_sampler([(1, 1), (138, 1)], (), sample=lambda *_: None)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "Warming up sampler with batch sizes: [1, 138] and following configs:"
    assert lines[1] == "temp=0.0, top_p=1.0, top_k=0, batch_changed=True"
    assert lines[6] == "temp=0.8, top_p=0.85, top_k=0, batch_changed=True"
    assert lines[7] == "temp=0.0, top_p=1.0, top_k=0, batch_changed=False"
    assert lines[13:] == ["Starting sampler warmup...", "Sampler warmup completed successfully"]


def test_every_configuration_runs_changed_and_unchanged_and_every_path_once():
    seen = []
    paths = (SamplingParams(top_k=3), SamplingParams(logprobs=1))
    number = warm_up_sampler([(1, 1), (4, 2)], paths, sample=lambda *call: seen.append(call))
    assert number == len(seen) == 2 * (12 + 2)
    of_four = [params for batch_size, steps, params in seen if (batch_size, steps) == (4, 2)]
    assert of_four[1] is None
    assert [(one.temperature, one.top_p, one.top_k) for one in of_four[0:12:2]] == list(CONFIGURATIONS)
    assert of_four[12:] == list(paths)
