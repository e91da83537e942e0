from __future__ import annotations

import re
from typing import ClassVar

import attrs
import numpy as np
import pytest

from support.backends import gaudi_engines, tiny_models
from support.backends.gaudi_ranks import load_gaudi, make_gaudi
from trencadis.clock import SystemClock
from trencadis.errors import BackendError, ConfigValueError, OutOfMemoryError
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, ModelSource, Phase, Request, SamplingParams
from trencadis_gaudi.backend import GaudiBackend
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.memory import format_bytes
from trencadis_testing.backend import ArgmaxSampler, BackendConformance
from trencadis_testing.driver import BackendDriver, Work

PLAN = AllocationPlan(num_blocks=30, block_size=16, num_rows=4, max_model_len=96, max_num_batched_tokens=64)
BUCKETS = [Bucket(1, 32, 0), Bucket(1, 32, 4), Bucket(4, 1, 30, Phase.DECODE), Bucket(4, 3, 30, Phase.DECODE)]


class Conformance(BackendConformance):
    kind, block_size = "gemma3", 16
    options: ClassVar = {}

    @pytest.fixture(autouse=True)
    def _model(self, model_path):
        self.path = model_path(self.kind)
        self.source = ModelSource(path=str(self.path))

    def make(self):
        return make_gaudi(**self.options)

    def reference(self, prompt, num_tokens):
        return tiny_models.greedy_reference(self.path, prompt, num_tokens)


class TestLazy(Conformance):
    options: ClassVar = {"max_prefill_batch_size": 2}


class TestEager(Conformance):
    kind = "llama"
    options: ClassVar = {"mode": "eager", "fused_sdpa": False}


class TestContiguous(Conformance):
    kind = "qwen3"
    options: ClassVar = {"contiguous": True}

    def padding(self, shape):
        """Ranges up to the whole cache: scattered blocks lie anywhere in it."""
        bucket = super().padding(shape)
        return attrs.evolve(bucket, num_blocks=96) if bucket.phase is Phase.DECODE else bucket


class WithDrafts(GaudiBackend):
    """As an engine with a speculator allocates it."""

    def allocate(self, plan):
        super().allocate(attrs.evolve(plan, max_draft_tokens=3))


class TestUnified(Conformance):
    kind = "qwen3"

    def make(self):
        config = GaudiConfig(device="emulated", mode="lazy", layout="unified", check_model=False)
        return WithDrafts(config, clock=SystemClock())


@pytest.mark.representatives(1)
@pytest.mark.parametrize("mode", ["lazy", "compile"])
def test_prompt_logprobs_are_compiled_for_when_asked_or_before_if_configured(model_path, mode):
    found = []
    for warms_up in (False, True):
        backend = load_gaudi(model_path("llama"), PLAN, mode=mode, prompt_logprobs=warms_up)
        backend.warm_up(BUCKETS[:1])
        driver = BackendDriver(backend, PLAN, bucket=lambda _: Bucket(1, 32, 0))
        driver.start(0, tiny_models.prompt(20), params=SamplingParams(temperature=0.0, prompt_logprobs=1))
        found.append(driver.step([Work(0)]))
    late, ready = found
    assert len(late.prompt_logprobs) == 19
    assert late.prompt_logprobs == ready.prompt_logprobs
    assert late.num_compilations > 0
    assert ready.num_compilations == 0


def test_capabilities_follow_the_config():
    plain = make_gaudi().capabilities
    assert (plain.layout, plain.default_block_size, plain.max_prefill_batch_size) == ("padded", 128, 1)
    assert (plain.contiguous, plain.shares_blocks, plain.merges_prefills) == (False, True, False)
    other = make_gaudi(contiguous=True, max_prefill_batch_size=3, merged_prefill=True).capabilities
    assert (other.contiguous, other.shares_blocks, other.merges_prefills) == (True, False, True)


@pytest.mark.parametrize("block_size", [4, 64, 129])
def test_block_size_that_the_kernels_do_not_know_is_refused(model_path, block_size):
    plan = AllocationPlan(num_blocks=8, block_size=block_size, num_rows=1, max_model_len=16, max_num_batched_tokens=16)
    with pytest.raises(ConfigValueError, match=f"block_size = {block_size}: .* know 16, 128, 528, 768"):
        load_gaudi(model_path("llama"), plan)


def test_memory_is_shared_out_as_the_log_says(model_path, caplog):
    caplog.set_level("INFO", logger="trencadis.gaudi")
    backend = make_gaudi(emulated_memory_bytes=100 * 2**20, memory_utilization=0.5, graph_reserve=0.4)
    facts = backend.load(ModelSource(path=str(model_path("llama"))), sampler=ArgmaxSampler())
    report = backend.memory(max_num_batched_tokens=64, max_num_seqs=4)
    assert report.total_bytes == 100 * 2**20
    assert report.free_bytes == report.total_bytes - facts.weights_bytes
    usable = (report.free_bytes - report.activation_bytes) * 0.5
    assert report.cache_bytes == int(usable * (1 - 0.4) - 128 * facts.kv_bytes_per_token)
    assert "usable (gpu_memory_utilization=0.5)" in caplog.text
    assert "(VLLM_GRAPH_RESERVED_MEM=0.4)" in caplog.text


@pytest.mark.parametrize("mode", ["lazy", "compile"])
def test_start_up_is_logged_as_the_vendor_plugin_does(model_path, caplog, mode):
    """Texts and order of the run in vllm-gaudi, docs/features/warmup.md (091bbadd); graphs are wrapped once their cache is there."""
    caplog.set_level("INFO", logger="trencadis.gaudi")
    backend = make_gaudi(mode=mode)
    facts = backend.load(ModelSource(path=str(model_path("llama"))), sampler=ArgmaxSampler())
    backend.memory(max_num_batched_tokens=64, max_num_seqs=4)
    backend.allocate(attrs.evolve(PLAN, num_host_blocks=3))
    backend.warm_up([])
    weights = re.escape(format_bytes(facts.weights_bytes))
    use = r"-?[\d.]+ \w+ of device memory \(.* used\) and -?[\d.]+ \w+ of host memory \(.* used\)"
    texts = [
        rf"Pre-loading model weights on {backend.habana.device} took {weights} of device memory.*",
        rf"Loading model weights took in total {weights} of device memory.*",
        f"Model profiling run took {use}",
        r"Free device memory: .* reserved for usable KV cache",
        r"# HPU blocks: 30, # CPU blocks: 3",
        *([f"Wrapping in HPU Graph took {use}"] if mode == "lazy" else []),
        f"Initializing cache engine took {use}",
    ]
    found = [text for text in caplog.messages if any(re.fullmatch(one, text) for one in texts)]
    assert len(found) == len(texts)
    for text, one in zip(found, texts, strict=True):
        assert re.fullmatch(one, text)


@pytest.mark.parametrize(
    ("options", "tokens", "words", "hint"),
    [
        ({"emulated_memory_bytes": 1000}, 64, "weights needs", "emulated_memory_bytes"),
        ({"emulated_memory_bytes": 400_000}, 64, "KV cache needs", "emulated_memory_bytes"),
        (
            {"emulated_memory_bytes": 2 * 2**20, "memory_utilization": 0.05},
            64,
            "do not pay for one block",
            "memory_utilization",
        ),
        (
            {"emulated_memory_bytes": 600_000, "max_prefill_batch_size": 512},
            100_000,
            "A step of 100000 tokens takes",
            "max_num_batched_tokens",
        ),
    ],
    ids=["weights", "cache", "one block", "step"],
)
@pytest.mark.representatives(4)
def test_what_does_not_fit_is_refused_with_a_remedy(model_path, options, tokens, words, hint):
    def start():
        backend = load_gaudi(model_path("llama"), PLAN if "cache" in words else None, **options)
        backend.memory(max_num_batched_tokens=tokens, max_num_seqs=512)

    with pytest.raises(OutOfMemoryError, match=words) as caught:
        start()
    assert hint in f"{caught.value} {caught.value.hint}"


@pytest.mark.slow
def test_engine_with_little_memory_serves_what_it_could_not_capture(model_path):
    """Skipped graphs are compiled all the same: a frozen device serves every request."""
    engine = gaudi_engines.open_engine(
        model_path("llama"), emulated_memory_bytes=2_600_000, memory_utilization=0.9, emulated_frozen=True
    )
    assert 0 < engine.warm_up.report.num_graphs < len(engine.warm_up.buckets)
    assert engine.warm_up.skipped == ()
    served = gaudi_engines.serve(engine, 2)
    engine.close()
    gaudi_engines.tokens(served)


@pytest.mark.slow
def test_buckets_behind_the_required_ones_are_prepared_in_a_share_of_each_step(model_path):
    """A busy engine: it is never asked to work ahead."""
    engine = gaudi_engines.open_engine(
        model_path("llama"),
        strategy_options={"prompt_query_limit": 2},
        emulated_frozen=True,
        warmup_required=8,
        warmup_step_s=1000.0,
    )
    total, num_left = len(engine.warm_up.buckets), len(engine.warm_up.skipped)
    assert 0 < num_left <= total - 8
    for index in range(2 * num_left):
        params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        engine.add(Request(request_id=str(index), prompt_token_ids=tuple(range(3, 20)), params=params))
        while engine.has_work:
            engine.step()
    assert f'trencadis_gaudi_warmup_buckets{{state="prepared"}} {total}.0' in engine.metrics()
    assert engine.totals.num_compilations == engine.totals.num_failed_steps == 0
    engine.close()


def test_prefix_caching_is_off_where_blocks_are_read_by_range(model_path, caplog):
    caplog.set_level("INFO", logger="trencadis")
    gaudi_engines.open_engine(model_path("llama"), contiguous=True, warmup=False).close()
    assert "Using Contiguous PA, disabling prefix caching" in caplog.text


def test_sampler_that_promises_nothing_is_named(model_path, caplog):
    load_gaudi(model_path("llama"), None, sampler=ArgmaxSampler())
    assert "The sampler ArgmaxSampler makes no promise about shapes" in caplog.text


def test_nothing_runs_before_load_or_after_close(model_path):
    with pytest.raises(BackendError, match="no model is loaded"):
        make_gaudi().memory(max_num_batched_tokens=1, max_num_seqs=1)
    backend = load_gaudi(model_path("llama"), PLAN)
    backend.close()
    with pytest.raises(BackendError, match="after close"):
        backend.prepare(Bucket(1, 1, 1, Phase.DECODE))
    with pytest.raises(BackendError, match="after close"):
        backend.copy_blocks(sources=np.zeros(1, np.int32), targets=np.ones(1, np.int32))
