from __future__ import annotations

import functools
import shutil

import numpy as np
import pytest
import torch

from support.backends import tiny_encoders, tiny_models
from support.backends.torch_backends import PLAN, PROMPTS, load_torch, make_torch
from support.devices import DEVICE, ON_CUDA, cpu_only, cuda_only
from support.memory import needs_statm, resident_bytes
from trencadis.clock import SystemClock
from trencadis.errors import BackendError, ModelLoadError
from trencadis.interfaces import AllocationPlan
from trencadis.records import Batch, Bucket, ModelSource, Phase, TableWrites
from trencadis_testing.backend import ArgmaxSampler, BackendConformance
from trencadis_testing.driver import BackendDriver, Work
from trencadis_torch.backend import TorchBackend
from trencadis_torch.config import TorchConfig
from trencadis_torch.linear.native import native

needs_native = pytest.mark.skipif(
    ON_CUDA or native() is None, reason="there is no C++ compiler on this machine, or tests run on another device"
)
make, loaded = (functools.partial(one, device=DEVICE) for one in (make_torch, load_torch))


class TestRagged(BackendConformance):
    kind = "gemma3"

    @pytest.fixture(autouse=True)
    def _model(self, model_path):
        self.source = ModelSource(path=str(model_path(self.kind)))
        self.path = model_path(self.kind)

    def make(self):
        return make()

    def reference(self, prompt, num_tokens):
        return tiny_models.greedy_reference(self.path, prompt, num_tokens)


class TestPadded(TestRagged):
    def make(self):
        return make("padded", max_prefill_batch_size=2)


class TestPaddedAlone(TestRagged):
    """One prompt a pass and another architecture."""

    kind = "llama"

    def make(self):
        return make("padded")


@cuda_only
class TestCudaGraphs(TestRagged):
    """Decodes of the suite's own buckets are captured when it prepares them, and run eagerly where it does not."""

    def make(self):
        return make("padded", max_prefill_batch_size=2, graphs="buckets")


@cuda_only
class TestGatheredOnCuda(TestRagged):
    def make(self):
        return make(attention="sdpa")


@needs_native
@pytest.mark.nightly
class TestGraphsThatNobodyPrepared(TestRagged):
    """Each pass runs without a graph, through the kernel that graphs call."""

    def make(self):
        return make("padded", max_prefill_batch_size=2, compile="buckets")

    @pytest.mark.slow  # a compiler for each shape; test_graph_mode.py compiles two
    def test_prepare_leaves_no_trace(self):
        super().test_prepare_leaves_no_trace()

    @pytest.mark.slow
    def test_warm_up_says_what_it_prepared_and_leaves_no_trace(self):
        super().test_warm_up_says_what_it_prepared_and_leaves_no_trace()


@pytest.mark.representatives(3)
@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("kind", tiny_models.ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(model_path, kind, layout):
    path = model_path(kind)
    expected = {row: tiny_models.greedy_reference(path, tokens, 12) for row, tokens in PROMPTS.items()}
    backend = loaded(path, layout=layout, max_prefill_batch_size=2)
    for chunk in (0, 1, 7):
        assert BackendDriver(backend, PLAN, seed=chunk).generate(PROMPTS, 12, chunk=chunk) == expected


@pytest.mark.parametrize("block_size", [1, 16, 128])
def test_block_size_changes_nothing(model_path, block_size):
    path = model_path("qwen3")
    plan = AllocationPlan(
        num_blocks=600 // block_size + 6,
        block_size=block_size,
        num_rows=4,
        max_model_len=120,
        max_num_batched_tokens=64,
    )
    backend = loaded(path, plan=plan)
    expected = {row: tiny_models.greedy_reference(path, tokens, 12) for row, tokens in PROMPTS.items()}
    assert BackendDriver(backend, plan).generate(PROMPTS, 12) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_model_runs_in_sixteen_bits(model_path, dtype):
    backend = loaded(model_path("llama"), dtype=dtype)
    assert backend._facts.dtype == dtype
    assert dtype == "bfloat16" or type(backend._model.lm_head) is torch.nn.Linear
    is_packed = dtype == "bfloat16" and not ON_CUDA and native() is not None
    expected = torch.float32 if is_packed else getattr(torch, dtype)
    assert all(keys.dtype == expected for keys in backend.kv_cache().keys)
    assert len(BackendDriver(backend, PLAN).generate({0: PROMPTS[0]}, 4)[0]) == 4


@needs_native
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_int8_tokens_depend_neither_on_chunks_nor_on_who_shares_the_batch(model_path, kind):
    backend = loaded(model_path(kind), quantization="int8")
    alone = {}
    for row, tokens in PROMPTS.items():
        alone[row] = BackendDriver(backend, PLAN).generate({row: tokens}, 8)[row]
    for chunk in (0, 7):
        assert BackendDriver(backend, PLAN, seed=chunk).generate(PROMPTS, 8, chunk=chunk) == alone


@needs_native
def test_each_kind_of_weights_has_facts_and_kv_of_its_own(model_path):
    facts, numerics = {}, set()
    for name, options in {"off": {"pack": "off"}, "auto": {}, "int8": {"quantization": "int8"}}.items():
        backend = loaded(model_path("llama"), **options)
        facts[name] = backend._facts
        numerics.add(backend.kv_cache().layout.numerics)
    assert len(numerics) == 3
    assert facts["off"].identity == facts["auto"].identity != facts["int8"].identity
    assert (facts["auto"].dtype, facts["int8"].dtype) == ("float32", "int8")
    assert {one.num_parameters for one in facts.values()} == {facts["off"].num_parameters}
    assert facts["off"].weights_bytes == 4 * facts["off"].num_parameters
    assert facts["int8"].weights_bytes < facts["auto"].weights_bytes / 2


def test_nothing_of_a_model_is_replaced_where_packing_is_off(model_path):
    backend = loaded(model_path("llama"), pack="off")
    assert {type(part).__module__.split(".")[0] for part in backend._model.modules()} == {"torch", "transformers"}
    assert backend.kv_cache().kernels in ("torch", "native", "triton")


@cpu_only
def test_int8_is_refused_with_activations_of_sixteen_bits(model_path):
    source = ModelSource(path=str(model_path("llama")), dtype="bfloat16")
    with pytest.raises(ModelLoadError, match=r'quantization = "int8": activations .* dtype = "bfloat16"'):
        make(quantization="int8").load(source, sampler=ArgmaxSampler())


@cpu_only
def test_int8_is_refused_without_a_compiler_and_packing_goes_on(model_path, monkeypatch):
    monkeypatch.setattr("trencadis_torch.linear.native.native", lambda: None)
    source = ModelSource(path=str(model_path("llama")))
    with pytest.raises(BackendError, match="no working C"):
        make(quantization="int8").load(source, sampler=ArgmaxSampler())
    backend = loaded(model_path("llama"))
    assert backend.kv_cache().kernels.endswith("+onednn")
    expected = tiny_models.greedy_reference(model_path("llama"), PROMPTS[0], 8)
    assert BackendDriver(backend, PLAN).generate({0: PROMPTS[0]}, 8)[0] == expected


def test_int8_is_refused_on_another_device(model_path, monkeypatch):
    monkeypatch.setattr("trencadis_torch.backend.choose_device", lambda name: torch.device("meta"))
    with pytest.raises(BackendError, match="only on the CPU, and the device is meta"):
        make(quantization="int8").load(ModelSource(path=str(model_path("llama"))), sampler=ArgmaxSampler())


def test_padded_positions_are_counted(model_path):
    backend = loaded(model_path("llama"), layout="padded")
    driver = BackendDriver(backend, PLAN, bucket=lambda shape: Bucket(4, 32, shape.num_blocks + 2, shape.phase))
    driver.start(0, PROMPTS[0])
    assert driver.step([Work(0)]).num_padded_tokens == 4 * 32


def test_capabilities_follow_the_layout():
    assert make().capabilities.layout == "ragged"
    assert make().capabilities.max_prefill_batch_size == 0
    padded = make("padded", max_prefill_batch_size=3).capabilities
    assert (padded.layout, padded.max_prefill_batch_size, padded.default_block_size) == ("padded", 3, 16)


class ThreadsSeen(ArgmaxSampler):
    """Notes PyTorch's threads while the model runs."""

    num_threads = 0

    def sample(self, logits, context):
        self.num_threads = torch.get_num_threads()
        return super().sample(logits, context)


@pytest.fixture
def threads_of(model_path):
    """``threads_of(there, **options)``: threads that a loaded model runs on, of so many that PyTorch has."""

    def run(there, *, num_replicas=1, **options):
        torch.set_num_threads(there)
        config, sampler = TorchConfig(device="cpu", check_model=False, **options), ThreadsSeen()
        backend = TorchBackend(config, clock=SystemClock(), num_replicas=num_replicas)
        backend.load(ModelSource(path=str(model_path("llama"))), sampler=sampler)
        backend.allocate(PLAN)
        BackendDriver(backend, PLAN).generate({0: PROMPTS[1]}, 2)
        assert torch.get_num_threads() == there, "the rest of the process has its own"
        return sampler.num_threads

    yield run
    torch.set_num_threads(1)


def test_number_of_threads_is_set(threads_of):
    assert threads_of(1, num_threads=2) == 2


def test_small_model_runs_on_one_thread_and_a_large_one_on_what_there_is(threads_of, monkeypatch):
    assert threads_of(2) == 1
    monkeypatch.setattr("trencadis_torch.backend.SINGLE_THREAD_PARAMETERS", 0)
    assert threads_of(2) == 2


def test_replicas_share_the_threads_unless_their_number_is_said(threads_of, monkeypatch):
    monkeypatch.setattr("trencadis_torch.backend.SINGLE_THREAD_PARAMETERS", 0)
    for there, options, expected in ((6, {}, 2), (2, {}, 1), (6, {"num_threads": 5}, 5)):
        assert threads_of(there, num_replicas=3, **options) == expected


@cpu_only
@needs_statm
@pytest.mark.parametrize("prefaults", [False, True])
def test_memory_of_the_cache_is_taken_at_the_start_if_that_is_asked_for(model_path, prefaults):
    backend = make(check_model=False, prefault_cache=prefaults)
    facts = backend.load(ModelSource(path=str(model_path("llama"))), sampler=ArgmaxSampler())
    num_blocks = (64 << 20) // (16 * facts.kv_bytes_per_token)
    before = resident_bytes()
    backend.allocate(
        AllocationPlan(num_blocks=num_blocks, block_size=16, num_rows=1, max_model_len=16, max_num_batched_tokens=16)
    )
    assert (resident_bytes() - before > 48 << 20) == prefaults
    backend.close()


def test_no_batch_runs_after_close(model_path):
    backend = loaded(model_path("llama"), layout="padded")
    backend.close()
    with pytest.raises(BackendError, match="after close"):
        backend.prepare(Bucket(1, 1, 1, Phase.DECODE))
    with pytest.raises(BackendError, match="TorchBackend does not embed"):
        backend.embed([np.ones(2, np.int32)])


@cpu_only  # on CUDA it is a device-side assertion, after which the process has no device any more
def test_step_that_fails_leaves_later_steps_alone(model_path):
    backend = loaded(model_path("llama"))
    driver = BackendDriver(backend, PLAN)
    driver.start(0, PROMPTS[1])
    driver.step([Work(0)])
    outside = np.array([99], np.int32)
    writes = TableWrites(rows=outside, columns=outside, block_ids=outside)
    with pytest.raises(IndexError):
        backend.submit(Batch(step=9, num_sequences=0, row_starts=(), table_writes=writes, passes=()))
    while len(driver.output(0)) < 12:
        driver.step([Work(0)])
    assert driver.output(0) == tiny_models.greedy_reference(model_path("llama"), PROMPTS[1], 12)


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_texts_are_embedded_beside_running_sequences(model_path, layout):
    path = model_path("gemma2")
    backend = loaded(path, layout=layout)
    driver = BackendDriver(backend, PLAN)
    for row, tokens in PROMPTS.items():
        driver.start(row, tokens)
    found = []
    while min(len(driver.output(row)) for row in PROMPTS) < 12:
        driver.step([Work(row) for row in PROMPTS])
        found.append(backend.embed([np.array(tokens, np.int32) for tokens in PROMPTS.values()]))
    for row, tokens in PROMPTS.items():
        assert driver.output(row)[:12] == tiny_models.greedy_reference(path, tokens, 12)
    expected = [tiny_encoders.reference_vector(path, tokens, "last").numpy() for tokens in PROMPTS.values()]
    for vectors in found:
        np.testing.assert_allclose(vectors, expected, atol=1e-5)


def test_a_decoder_embeds_before_its_cache_is_allocated(model_path):
    backend = make()
    source = ModelSource(path=str(model_path("llama")), pooling="mean", normalize_embeddings=False)
    facts = backend.load(source, sampler=ArgmaxSampler())
    assert (facts.generates, facts.embedding_size) == (True, 48)
    (vector,) = backend.embed([np.array(PROMPTS[0], np.int32)])
    expected = tiny_encoders.reference_vector(model_path("llama"), PROMPTS[0], "mean", normalize=False)
    np.testing.assert_allclose(vector, expected.numpy(), atol=1e-4)


def test_a_decoder_with_files_of_a_sentence_encoder_pools_as_they_say(model_path, tmp_path):
    path = shutil.copytree(model_path("llama"), tmp_path / "llama")
    tiny_encoders.write_modules(path, "Transformer", "Pooling", "Normalize")
    tiny_encoders.write_json(path, "1_Pooling/config.json", {"pooling_mode_cls_token": True})
    backend = make()
    assert backend.load(ModelSource(path=str(path)), sampler=ArgmaxSampler()).generates
    (vector,) = backend.embed([np.array(PROMPTS[0], np.int32)])
    expected = tiny_encoders.reference_vector(model_path("llama"), PROMPTS[0], "cls")
    np.testing.assert_allclose(vector, expected.numpy(), atol=1e-5)
