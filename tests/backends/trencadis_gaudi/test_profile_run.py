from __future__ import annotations

import pytest

from trencadis.clock import SystemClock
from trencadis.records import Bucket, ModelSource
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.model import load_model
from trencadis_gaudi.profile_run import measure_activations, profile_bucket


@pytest.mark.parametrize(
    ("tokens", "seqs", "model_len", "bucket"),
    [
        (2048, 256, 1024, Bucket(2, 1024, 0)),
        (2048, 1, 1024, Bucket(1, 1024, 0)),
        (8192, 256, 32768, Bucket(1, 8192, 192)),
        (1024, 4, 1024, Bucket(1, 1024, 0)),
        (1000, 4, 1129, Bucket(1, 1000, 2)),
    ],
)
def test_profiled_bucket_is_the_largest_prefill(tokens, seqs, model_len, bucket):
    found = profile_bucket(max_num_batched_tokens=tokens, max_num_seqs=seqs, max_model_len=model_len, block_size=128)
    assert found == bucket


def test_activations_grow_with_the_step_and_are_scaled_beyond_what_a_cpu_tries(model_path):
    habana = load_habana(GaudiConfig(device="emulated", mode="lazy"), clock=SystemClock())
    loaded = load_model(ModelSource(path=str(model_path("llama"))), habana, check=False)

    def measure(tokens):
        with habana.active():
            return measure_activations(loaded, habana, block_size=128, max_num_batched_tokens=tokens, max_num_seqs=8)

    # The largest result of a layer: scores of 4 heads, or the projection to 80 numbers, in float32.
    assert measure(64) >= 64 * 80 * 4
    assert measure(128) > measure(64)
    assert measure(1024) == 4 * measure(256)
    assert habana.emulated.used_bytes == loaded.facts.weights_bytes
