from __future__ import annotations

import os
import re

import pytest

from trencadis.clock import SystemClock
from trencadis.errors import OutOfMemoryError
from trencadis.records import Bucket, ModelSource
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.memory import MemoryMeter, format_bytes, host_memory, share_memory
from trencadis_gaudi.model import load_model
from trencadis_gaudi.profile_run import measure_activations, profile_bucket

GIB = 2**30
LLAMA_3_8B_BLOCK = 16 * 2**20
"""2 · 32 layers · 128 tokens · 8 heads · 128 elements · 2 bytes."""


def opened(**options):
    return load_habana(GaudiConfig(device="emulated", mode="lazy", **options), clock=SystemClock())


def test_amounts_have_four_digits_in_the_largest_unit_that_leaves_1024_or_less():
    amounts = (0, 1024, 1025, -252 * 1024, 79.16 * GIB, 11.095 * GIB, 3 * 1024 * 2**40)
    expected = ["0 B", "1024 B", "1.001 KiB", "-252 KiB", "79.16 GiB", "11.1 GiB", "3072 TiB"]
    assert [format_bytes(amount) for amount in amounts] == expected


@pytest.mark.parametrize(
    ("free", "utilization", "reserve", "parts"),
    [
        (79.16, 0.5, 0.4, ["39.58 GiB", "15.83 GiB", "23.75 GiB", "39.58 GiB"]),
        (50.0, 0.9, 0.1, ["45 GiB", "4.5 GiB", "40.5 GiB", "5 GiB"]),
        (79.22, 0.9, 0.1, ["71.3 GiB", "7.13 GiB", "64.17 GiB", "7.922 GiB"]),
    ],
)
@pytest.mark.representatives(3)
def test_the_vendors_examples_are_shared_out_alike(free, utilization, reserve, parts):
    shares = share_memory(int(free * GIB), utilization=utilization, graph_reserve=reserve)
    found = (shares.usable_bytes, shares.graph_bytes, shares.kv_bytes, shares.margin_bytes)
    assert [format_bytes(part) for part in found] == parts


def test_the_vendors_example_pays_for_1519_blocks_and_a_share_below_one_block_is_refused_with_the_amounts():
    for padding_bytes, num_blocks in ((0, 1519), (LLAMA_3_8B_BLOCK, 1518)):
        shares = share_memory(int(79.16 * GIB), utilization=0.5, graph_reserve=0.4, padding_bytes=padding_bytes)
        assert shares.num_blocks(LLAMA_3_8B_BLOCK) == num_blocks
    shares = share_memory(2**20, utilization=0.5, graph_reserve=0.0)
    with pytest.raises(OutOfMemoryError, match="512 KiB for the KV cache do not pay for one block of 16 MiB"):
        shares.num_blocks(LLAMA_3_8B_BLOCK)


def test_the_log_line_is_the_vendors():
    shares = share_memory(50 * GIB, utilization=0.9, graph_reserve=0.1, padding_bytes=GIB // 2)
    assert str(shares) == (
        "Free device memory: 50 GiB, 45 GiB usable (gpu_memory_utilization=0.9), 4.5 GiB reserved for HPUGraphs "
        "(VLLM_GRAPH_RESERVED_MEM=0.1), 512 MiB reserved for KV cache dummy block 40 GiB reserved for usable KV cache"
    )


def test_summary_has_the_vendors_words_and_the_devices_numbers():
    habana = opened(emulated_memory_bytes=96 * GIB)
    habana.declare("weights", 15 * GIB)
    meter = MemoryMeter(habana)
    habana.declare("KV cache", 24 * GIB)
    amount = r"-?[\d.e+]+ (?:B|KiB|MiB|GiB|TiB)"
    host = rf"{amount} of host memory \({amount}/{amount} used\)"
    assert re.fullmatch(rf"24 GiB of device memory \(39 GiB/96 GiB used\) and {host}", meter.summary())


def test_host_memory_is_what_linux_says_and_counted_in_pages_elsewhere(tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1000 kB\nMemFree:  100 kB\nMemAvailable:    400 kB\nHugePages_Total:       0\n")
    assert host_memory(str(meminfo)) == (600 * 1024, 1000 * 1024)
    used, total = host_memory(str(tmp_path / "nothing"))
    assert total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < used <= total


@pytest.mark.parametrize(
    ("tokens", "seqs", "model_len", "bucket"),
    [
        (2048, 256, 1024, Bucket(2, 1024, 0)),
        (2048, 1, 1024, Bucket(1, 1024, 0)),
        (8192, 256, 32768, Bucket(1, 8192, 192)),
        (1000, 4, 1129, Bucket(1, 1000, 2)),
    ],
)
@pytest.mark.representatives(4)
def test_profiled_bucket_is_the_largest_prefill(tokens, seqs, model_len, bucket):
    found = profile_bucket(max_num_batched_tokens=tokens, max_num_seqs=seqs, max_model_len=model_len, block_size=128)
    assert found == bucket


def test_activations_grow_with_the_step_and_are_scaled_beyond_what_a_cpu_tries(model_path):
    habana = opened()
    loaded = load_model(ModelSource(path=str(model_path("llama"))), habana, check=False)

    def measure(tokens):
        with habana.active():
            return measure_activations(loaded, habana, block_size=128, max_num_batched_tokens=tokens, max_num_seqs=8)

    # The largest result of a layer: scores of 4 heads, or the projection to 80 numbers, in float32.
    assert measure(64) >= 64 * 80 * 4
    assert measure(128) > measure(64)
    assert measure(1024) == 4 * measure(256)
    assert habana.emulated.used_bytes == loaded.facts.weights_bytes
