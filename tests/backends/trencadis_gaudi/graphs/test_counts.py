from __future__ import annotations

import attrs
import numpy as np
import pytest

from trencadis.clock import SystemClock
from trencadis.records import Bucket, Phase, UnifiedBucket
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.graphs.counts import Watch, configuration
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.runner import empty_pass

PROMPT, DECODE = Bucket(1, 512, 4), Bucket(8, 1, 24, Phase.DECODE)


@pytest.fixture
def habana():
    return load_habana(GaudiConfig(device="emulated", mode="lazy"), clock=SystemClock())


def make(habana, **options):
    return Watch(habana, **{"counts_compilations": True, "logs_passes": False, **options})


def one_pass(bucket, *query_lens):
    return attrs.evolve(empty_pass(bucket), query_lens=np.array(query_lens, np.int32))


def test_bucket_that_was_not_warmed_up_is_warned_about_once_in_the_vendors_words(habana, caplog):
    watch = make(habana)
    watch.warmed_up(DECODE)
    for _ in range(3):
        watch.note(one_pass(PROMPT, 300))
        watch.note(one_pass(DECODE, 1))
    assert [record.getMessage() for record in caplog.records] == [
        "Configuration: ('prompt', 1, 512, 4) was not warmed-up!"
    ]
    assert watch.num_unwarmed == 1


def test_names_of_configurations_are_the_vendors():
    assert configuration(PROMPT) == ("prompt", 1, 512, 4)
    assert configuration(DECODE) == ("decode", 8, 1, 24)


def test_unified_bucket_is_named_with_shared_and_unique_blocks(habana, caplog):
    watch = make(habana)
    watch.warmed_up(UnifiedBucket(8, 4, 9, False))
    for bucket in (UnifiedBucket(8, 4, 9, False), UnifiedBucket(8, 4, 10, False), UnifiedBucket(8, 4, 9, True)):
        watch.note(one_pass(bucket, 1, 1))
    assert [record.getMessage() for record in caplog.records] == [
        "Configuration: (query, shared_blocks, unique_blocks) (8, 4, 10), (not causal) was not warmed-up!",
        "Configuration: (query, shared_blocks, unique_blocks) (8, 4, 9), (causal) was not warmed-up!",
    ]


def test_passes_are_logged_on_request(habana, caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    watch = make(habana, logs_passes=True)
    watch.warmed_up(DECODE)
    watch.note(one_pass(DECODE, 1))
    assert "[fwd] ('decode', 8, 1, 24)" in caplog.text


def test_compilations_of_a_block_are_counted_and_warned_about(habana, caplog):
    watch = make(habana)
    with watch.compilations(warns=False) as expected:
        habana.emulated.need_recipe(b"a", what="A")
    assert (expected.number, watch.num_recompilations, caplog.text) == (1, 0, "")
    with watch.compilations() as found:
        habana.emulated.need_recipe(b"a", what="A")
        habana.emulated.need_recipe(b"b", what="B")
    assert (found.number, watch.num_recompilations) == (1, 1)
    assert "graph compilation detected: [('TotalNumber', 1)" in caplog.text


def test_nothing_is_counted_if_nobody_asks(habana):
    watch = make(habana, counts_compilations=False)
    with watch.compilations() as found:
        habana.emulated.need_recipe(b"a", what="A")
    assert found.number == watch.num_recompilations == 0


def test_metrics_show_padding_by_phase_hits_by_bucket_and_graphs(habana):
    watch = make(habana)
    watch.warmed_up(DECODE)
    watch.note(one_pass(PROMPT, 300))
    watch.note(one_pass(DECODE, 1, 1, 1))
    watch.note(one_pass(DECODE, 1, 1))
    watch.graphs(7, 4096)
    text = watch.metrics()
    for line in (
        'trencadis_gaudi_positions_total{kind="padding",phase="prompt"} 212.0',
        'trencadis_gaudi_positions_total{kind="real",phase="decode"} 5.0',
        'trencadis_gaudi_positions_total{kind="padding",phase="decode"} 11.0',
        'trencadis_gaudi_bucket_passes_total{batch_size="8",num_blocks="24",phase="decode",query_len="1"} 2.0',
        "trencadis_gaudi_unwarmed_buckets_total 1.0",
        "trencadis_gaudi_recompilations_total 0.0",
        "trencadis_gaudi_graphs 7.0",
        "trencadis_gaudi_graph_bytes 4096.0",
    ):
        assert line in text
