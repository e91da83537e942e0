"""What ``/metrics`` of a server on the emulated Gaudi says: padding, buckets, compilations, graphs, blocks that moved."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.server.live_server import running
from trencadis import AsyncLLM

TIMEOUT_S = 60
CONFIG = """
[model]
max_model_len = 64
[backend]
name = "gaudi"
[backend.gaudi]
device = "emulated"
check_model = false
contiguous = true
warmup_required = 1
warmup_quiet_s = 0.0
[bucketing.exponential]
prompt_query_limit = 2
[defragmenter]
threshold = 0
[engine]
max_num_seqs = 4
max_num_batched_tokens = 64
[cache]
num_blocks = 24
block_size = 16
[observer]
names = ["prometheus"]
"""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Samples before the first request, and after some."""
    config = tmp_path_factory.mktemp("gaudi") / "gaudi.toml"
    config.write_text(CONFIG)
    # Said here and not in the file: the environment, which counts more than that, may still have the mode of an engine before.
    with running(lambda: AsyncLLM("demo", config_file=config, **{"backend.gaudi.mode": "lazy"})) as server:
        yield observed(server.url.removesuffix("/v1"))


def observed(url):
    before = samples(url)
    for length in (40, 3, 20):
        body = {"model": "demo", "prompt": list(range(5, 5 + length)), "max_tokens": 6, "temperature": 0, "n": 3}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=TIMEOUT_S).status_code == 200
    return before, samples(url)


def samples(url):
    text = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_padding_is_told_by_phase(served):
    _, after = served
    for phase, num_real in (("prompt", 3 * (40 + 3 + 20)), ("decode", 3 * 3 * 5)):
        padding = after["trencadis_gaudi_positions_total", "padding", phase]
        real = after["trencadis_gaudi_positions_total", "real", phase]
        assert real == num_real
        assert after["trencadis_gaudi_padding_ratio", phase] == pytest.approx(padding / (padding + real))
        assert 0 < after["trencadis_gaudi_padding_ratio", phase] < 1


def test_no_request_waited_for_a_compilation(served):
    _, after = served
    for name in (
        "trencadis_compilations_total",
        "trencadis_gaudi_recompilations_total",
        "trencadis_gaudi_unwarmed_buckets_total",
        "trencadis_unprepared_buckets_total",
        "trencadis_bucket_fallbacks_total",
    ):
        assert after[(name,)] == 0, name


def test_every_pass_is_a_hit_and_is_counted_by_its_bucket(served):
    before, after = served
    num_passes = sum(value for (name, *_), value in after.items() if name == "trencadis_gaudi_bucket_passes_total")
    assert before["trencadis_bucket_hits_total",] == 0
    assert after["trencadis_bucket_hits_total",] == num_passes > 0


def test_warm_up_and_graphs_are_told(served):
    before, after = served
    assert before["trencadis_gaudi_graphs",] >= 1
    assert before["trencadis_gaudi_graph_bytes",] > 0
    assert before["trencadis_gaudi_warmup_seconds_total",] > 0
    num_buckets = sum(before["trencadis_gaudi_warmup_buckets", state] for state in ("prepared", "deferred"))
    assert num_buckets == sum(after["trencadis_gaudi_warmup_buckets", state] for state in ("prepared", "deferred"))
    assert after["trencadis_gaudi_warmup_buckets", "prepared"] >= before["trencadis_gaudi_warmup_buckets", "prepared"]
    assert after["trencadis_gaudi_graphs",] == after["trencadis_gaudi_warmup_buckets", "prepared"]


@pytest.mark.parametrize("name", ["trencadis_block_swaps_total", "trencadis_bucket_substitutions_total"])
def test_what_may_not_have_happened_is_there_from_the_start(served, name):
    before, after = served
    assert before[(name,)] == 0 <= after[(name,)]
