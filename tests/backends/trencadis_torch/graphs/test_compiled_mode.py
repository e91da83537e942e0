"""What graphs of torch.compile promise. Each costs seconds of a compiler, so two backends are shared by all tests."""

from __future__ import annotations

import logging

import pytest
import tiny_models
import torch
import transformers

from trencadis.clock import SystemClock
from trencadis.errors import BackendError, ConfigValueError
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, ModelSource, Phase, SamplingParams
from trencadis_testing.backend import ArgmaxSampler
from trencadis_testing.driver import BackendDriver, Work
from trencadis_torch.backend import TorchBackend
from trencadis_torch.config import TorchConfig
from trencadis_torch.graphs.compile_cache import DIRECTORY, CompileCounts
from trencadis_torch.graphs.compiled_mode import GraphMode
from trencadis_torch.native_build import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on this machine")

PLAN = AllocationPlan(num_blocks=60, block_size=4, num_rows=4, max_model_len=120, max_num_batched_tokens=64)
CHUNK = 2
PREFILL, DECODE = Bucket(1, CHUNK, 12, Phase.PREFILL), Bucket(2, 1, 24, Phase.DECODE)
"""As many tokens in one as in the other, so that most of what is compiled for one does for both."""
PROMPTS = {0: tiny_models.prompt(19), 1: tiny_models.prompt(5, seed=1)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Of the graphs on disk; what the process is told about it is taken back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(DIRECTORY, raising=False)
        yield tmp_path_factory.mktemp("graphs")


def started(path, directory, buckets, **options):
    """Return a backend behind its warm-up, and the report."""
    table = TorchConfig(
        device="cpu", layout="padded", compile="buckets", compile_cache=str(directory), num_threads=1, **options
    )
    backend = TorchBackend(table, clock=SystemClock())
    backend.load(ModelSource(path=str(path)), sampler=ArgmaxSampler())
    backend.allocate(PLAN)
    return backend, backend.warm_up(buckets)


@pytest.fixture(scope="module")
def model(model_path, tmp_path_factory):
    """Two layers are as good as three, and compiled sooner."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(model_path("llama"))
    whole.model.layers = whole.model.layers[:2]
    whole.config.num_hidden_layers = 2
    whole.config.layer_types = None
    path = tmp_path_factory.mktemp("two_layers")
    whole.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def first(model, directory):
    return started(model, directory, [PREFILL, DECODE])


@pytest.fixture(scope="module")
def plain(model, directory):
    """Neither packed nor with our kernel: the graph is torch's alone."""
    return started(model, directory, [DECODE], pack="off", attention="sdpa")


def bucket_of(shape):
    return PREFILL if shape.phase is Phase.PREFILL else DECODE


def driver_of(backend, **options):
    return BackendDriver(backend, PLAN, **{"bucket": bucket_of, **options})


def count(backend, name):
    lines = backend.metrics().splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"trencadis_torch_{name} ")))


def sequences_in_decode(backend, **options):
    driver = driver_of(backend, **options)
    for row, tokens in PROMPTS.items():
        driver.start(row, tokens)
    for row, tokens in PROMPTS.items():
        for first in range(0, len(tokens), CHUNK):
            driver.step([Work(row, min(CHUNK, len(tokens) - first))])
    return driver


def decode_inputs(backend):
    """Return inputs of a decode pass over the sequences, and which tokens' logits."""
    driver = sequences_in_decode(backend)
    seen = []
    runner = backend._runner
    forward = runner.forward
    runner.forward = lambda inputs, tokens: seen.append((inputs, tokens)) or forward(inputs, tokens)
    driver.step([Work(row) for row in PROMPTS])
    del runner.forward
    return seen[0]


def test_a_first_start_compiles_each_shape_once(first, directory):
    _, report = first
    assert set(report.prepared) == {PREFILL, DECODE}
    assert (report.num_graphs, report.num_compilations, report.num_cached) == (2, 2, 0)
    assert list((directory / "fxgraph").rglob("*/*")), "they are kept where the setting says"


def test_greedy_tokens_are_those_of_transformers_and_nothing_is_compiled_while_they_are_made(first, model):
    backend, _ = first
    before, eager = CompileCounts.now(), count(backend, "eager_passes_total")
    found = driver_of(backend).generate(PROMPTS, 12, chunk=CHUNK)
    assert found == {row: tiny_models.greedy_reference(model, t, 12) for row, t in PROMPTS.items()}
    assert CompileCounts.now() == before
    assert count(backend, "eager_passes_total") == eager, "every pass had a graph"
    assert count(backend, "recompilations_total") == 0
    assert count(backend, "graphs") >= 2
    assert count(backend, "warmup_seconds_total") > 0


@pytest.mark.parametrize("kind", ["first", pytest.param("plain", marks=pytest.mark.slow)])
@torch.inference_mode()
def test_logits_of_a_graph_are_those_of_the_model(request, kind):
    backend, _ = request.getfixturevalue(kind)
    inputs, tokens = decode_inputs(backend)
    graphs = backend._runner._forward
    num_eager = graphs.num_eager
    found = backend._runner.forward(inputs, tokens)
    assert graphs.num_eager == num_eager, "this was a graph"
    expected = graphs._plain(inputs.token_ids, inputs.positions, torch.from_numpy(tokens), inputs.attention)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert float(expected.std()) > 0.1


@pytest.mark.slow
def test_a_graph_of_torch_alone_makes_the_same_tokens(plain, model):
    backend, report = plain
    assert report.num_graphs == 1
    found = driver_of(backend).generate(PROMPTS, 8, chunk=CHUNK)
    assert found == {row: tiny_models.greedy_reference(model, t, 8) for row, t in PROMPTS.items()}


def test_a_second_start_finds_its_graphs_on_disk(first, model, directory):
    backend, report = started(model, directory, [PREFILL, DECODE])
    assert (report.num_graphs, report.num_compilations, report.num_cached) == (2, 0, 2)
    assert count(backend, "graphs_from_disk") == 2
    expected = tiny_models.greedy_reference(model, PROMPTS[0], 4)
    assert driver_of(backend).generate({0: PROMPTS[0]}, 4, chunk=CHUNK)[0] == expected


def test_buckets_that_differ_in_blocks_alone_share_a_graph_where_the_kernel_reads_the_cache(first):
    backend, _ = first
    before = CompileCounts.now()
    report = backend.warm_up([Bucket(2, 1, 40, Phase.DECODE)])
    assert (report.num_graphs, len(report.prepared)) == (0, 1)
    assert CompileCounts.now() == before


def test_a_shape_that_nobody_prepared_runs_without_a_graph_and_says_so_once(first, model, caplog):
    backend, _ = first
    before, eager = CompileCounts.now(), count(backend, "eager_passes_total")
    driver = driver_of(backend, bucket=lambda shape: Bucket.of(shape))
    with caplog.at_level(logging.WARNING, "trencadis.torch"):
        found = driver.generate({0: PROMPTS[0]}, 5)
    assert found[0] == tiny_models.greedy_reference(model, PROMPTS[0], 5)
    assert CompileCounts.now() == before, "nothing is compiled while requests wait"
    assert count(backend, "eager_passes_total") == eager + 5
    lines = [record.message for record in caplog.records if record.name == "trencadis.torch"]
    assert [line.count("run without") for line in lines] == [1, 1], "one line for each shape"


def test_scores_of_prompts_are_computed_without_a_graph(first):
    backend, _ = first
    driver, eager = driver_of(backend), count(backend, "eager_passes_total")
    driver.start(0, PROMPTS[1][:CHUNK], params=SamplingParams(temperature=0.0, prompt_logprobs=1))
    output = driver.step([Work(0)])
    assert len(output.prompt_logprobs) == CHUNK - 1
    assert count(backend, "eager_passes_total") == eager + 1


def test_what_is_compiled_during_a_step_is_counted(first, caplog, monkeypatch):
    backend, _ = first
    driver = sequences_in_decode(backend)
    sample = backend._sampler.sample

    def compiling(logits, context):
        torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(3))
        return sample(logits, context)

    monkeypatch.setattr(backend._sampler, "sample", compiling)
    before = count(backend, "recompilations_total")
    with caplog.at_level(logging.WARNING, "trencadis.torch"):
        output = driver.step([Work(row) for row in PROMPTS])
    assert output.num_compilations == 1
    assert count(backend, "recompilations_total") == before + 1
    assert "while requests waited" in caplog.text


def test_layers_of_a_graph_wait_for_no_connector_and_its_kv_has_numerics_of_its_own(first):
    backend, _ = first
    assert not backend.capabilities.layerwise_kv
    assert backend.kv_cache().kernels.endswith("+inductor")


def test_a_graph_that_computes_something_else_is_refused(model, directory, monkeypatch):
    monkeypatch.setattr(
        "trencadis_torch.graphs.compiled_forward._compiled", lambda plain, *_: lambda *rest: plain(*rest).flip(-1)
    )
    with pytest.raises(BackendError, match="computes other logits"):
        started(model, directory, [DECODE])


def test_the_ragged_layout_has_no_graphs():
    with pytest.raises(ConfigValueError, match='layout = "ragged"'):
        TorchBackend(TorchConfig(device="cpu", compile="buckets"), clock=SystemClock())


def test_graphs_are_refused_on_another_device(directory):
    with pytest.raises(BackendError, match="only on the CPU, and the device is cuda"):
        GraphMode(TorchConfig(compile_cache=str(directory)), device=torch.device("cuda"), clock=SystemClock())


def test_a_batch_before_graphs_are_there_is_an_error(directory):
    mode = GraphMode(TorchConfig(compile_cache=str(directory)), device=torch.device("cpu"), clock=SystemClock())
    with pytest.raises(BackendError, match="after allocate"):
        mode.warm_up([DECODE], run=lambda bucket: None)
