"""What ``/metrics`` of a server on the emulated Gaudi says: padding, buckets, compilations, graphs, blocks that moved."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.server.live_server import running
from trencadis import AsyncLLM

TIMEOUT_S = 60
GAUDI = {"device": "emulated", "check_model": False, "contiguous": True, "warmup_required": 1, "warmup_quiet_s": 0.0}
TABLES = {
    "backend": {"name": "gaudi", "gaudi": {**GAUDI, "mode": "lazy"}},
    "bucketing": {"exponential": {"prompt_query_limit": 2}},
    "defragmenter": {"threshold": 0},
    "engine": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
    "cache": {"num_blocks": 24, "block_size": 16},
    "observer": {"names": ["prometheus"]},
}
NEVER = (
    *("trencadis_compilations_total", "trencadis_gaudi_recompilations_total", "trencadis_gaudi_unwarmed_buckets_total"),
    *("trencadis_unprepared_buckets_total", "trencadis_bucket_fallbacks_total"),
)
"""What a request would have waited for."""


def samples(url):
    text = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.slow
def test_padding_buckets_graphs_and_blocks_that_moved_are_told():
    with running(lambda: AsyncLLM({"path": "demo", "max_model_len": 64}, **TABLES)) as server:
        before = samples(server.url)
        for length in (40, 3, 20):
            body = {"model": "demo", "prompt": list(range(5, 5 + length)), "max_tokens": 6, "temperature": 0, "n": 3}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S).status_code == 200
        after = samples(server.url)
    for phase, num_real in (("prompt", 3 * (40 + 3 + 20)), ("decode", 3 * 3 * 5)):
        padding, real = (after["trencadis_gaudi_positions_total", kind, phase] for kind in ("padding", "real"))
        assert real == num_real
        assert after["trencadis_gaudi_padding_ratio", phase] == pytest.approx(padding / (padding + real))
        assert padding > 0
    assert [name for name in NEVER if after[(name,)]] == []
    num_passes = sum(value for (name, *_), value in after.items() if name == "trencadis_gaudi_bucket_passes_total")
    assert before["trencadis_bucket_hits_total",] == 0
    assert after["trencadis_bucket_hits_total",] == num_passes > 0
    assert before["trencadis_gaudi_graph_bytes",] > 0
    assert before["trencadis_gaudi_warmup_seconds_total",] > 0
    prepared, deferred = (
        [page["trencadis_gaudi_warmup_buckets", state] for page in (before, after)]
        for state in ("prepared", "deferred")
    )
    assert prepared[0] + deferred[0] == prepared[1] + deferred[1]
    assert 1 <= prepared[0] <= prepared[1] == after["trencadis_gaudi_graphs",]
    for name in ("trencadis_block_swaps_total", "trencadis_bucket_substitutions_total"):
        assert before[(name,)] == 0 <= after[(name,)]
