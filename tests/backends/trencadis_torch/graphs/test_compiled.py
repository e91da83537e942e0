"""What graphs of torch.compile promise. Each costs seconds of a compiler, so two backends are shared by all tests."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers

from support.backends import tiny_models
from trencadis.clock import SystemClock
from trencadis.errors import BackendError, ConfigValueError
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, ModelSource, Phase, SamplingParams
from trencadis_testing.backend import ArgmaxSampler
from trencadis_testing.driver import BackendDriver, Work
from trencadis_torch.backend import TorchBackend
from trencadis_torch.config import TorchConfig
from trencadis_torch.graphs import compiled as compile_cache
from trencadis_torch.graphs.compiled import DIRECTORY, CompileCounts, CompiledMode, Graphs, set_up
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


@pytest.fixture(scope="module", params=["eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def first(request, model, directory):
    """A backend behind a warm-up in which torch.compile traces each shape, and at night compiles it."""
    right = compile_cache._compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile_cache, "_compiled", lambda plain, number, _: right(plain, number, request.param))
        yield started(model, directory, [PREFILL, DECODE])


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


def test_a_first_start_compiles_each_shape_once(first):
    _, report = first
    assert set(report.prepared) == {PREFILL, DECODE}
    assert (report.num_graphs, report.num_compilations, report.num_cached) == (2, 2, 0)


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


@torch.inference_mode()
def test_logits_of_a_graph_are_those_of_the_model(first):
    backend, _ = first
    inputs, tokens = decode_inputs(backend)
    graphs = backend._runner._forward
    num_eager = graphs.num_eager
    found = backend._runner.forward(inputs, tokens)
    assert graphs.num_eager == num_eager, "this was a graph"
    expected = graphs._plain(inputs.token_ids, inputs.positions, torch.from_numpy(tokens), inputs.attention)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert float(expected.std()) > 0.1


@pytest.mark.nightly
def test_a_graph_of_torch_alone_makes_the_same_tokens(plain, model):
    backend, report = plain
    assert report.num_graphs == 1
    found = driver_of(backend).generate(PROMPTS, 8, chunk=CHUNK)
    assert found == {row: tiny_models.greedy_reference(model, t, 8) for row, t in PROMPTS.items()}


@pytest.mark.nightly
def test_a_second_start_finds_its_graphs_on_disk(model, directory):
    started(model, directory, [PREFILL, DECODE])
    assert list((directory / "fxgraph").rglob("*/*")), "they are kept where the setting says"
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
    monkeypatch.setattr(compile_cache, "_compiled", lambda plain, *_: lambda *rest: plain(*rest).flip(-1))
    with pytest.raises(BackendError, match="computes other logits"):
        started(model, directory, [DECODE])


def test_the_ragged_layout_has_no_graphs():
    with pytest.raises(ConfigValueError, match='layout = "ragged"'):
        TorchBackend(TorchConfig(device="cpu", compile="buckets"), clock=SystemClock())


def test_graphs_are_refused_on_another_device(directory):
    with pytest.raises(BackendError, match="only on the CPU, and the device is cuda"):
        CompiledMode(TorchConfig(compile_cache=str(directory)), device=torch.device("cuda"), clock=SystemClock())


def test_a_batch_before_graphs_are_there_is_an_error(directory):
    mode = CompiledMode(TorchConfig(compile_cache=str(directory)), device=torch.device("cpu"), clock=SystemClock())
    with pytest.raises(BackendError, match="after allocate"):
        mode.warm_up([DECODE], run=lambda bucket: None)


class Pass:
    """Has sizes, and a tensor that graphs read."""

    def __init__(self, *signature, offset=0.0):
        self.signature = signature
        self.offset = torch.tensor(offset)


def forward(token_ids, positions, keep, attention):
    return (token_ids + positions).float().flatten().index_select(0, keep)[:, None] + attention.offset


def arguments(size, *, offset=0.0):
    return torch.arange(size)[None], torch.full((1, size), 10), torch.tensor([size - 1]), Pass(size, offset=offset)


def made(*, check=None, plain=forward, sizes=(2, 3)):
    graphs = Graphs(plain, check=check, compiler="eager")
    with graphs.preparing():
        for size in sizes:
            graphs(*arguments(size))
    return graphs


@torch.inference_mode()
def test_each_shape_is_one_graph_and_a_graph_reads_what_each_pass_brings():
    before = CompileCounts.now()
    graphs = made(sizes=(2, 3, 2))
    assert len(graphs) == 2
    assert CompileCounts.now().since(before).num_graphs == 2
    for size, offset in ((3, 0.5), (2, 7.0), (2, 0.25), (3, 1.0)):
        assert graphs(*arguments(size, offset=offset)).item() == 10 + size - 1 + offset
    assert CompileCounts.now().since(before).num_graphs == 2
    assert graphs.num_eager == 0


@torch.inference_mode()
def test_a_shape_without_a_graph_runs_as_it_is_counted_each_time_and_named_once(caplog):
    graphs = made(sizes=(2,))
    before = CompileCounts.now()
    with caplog.at_level(logging.WARNING, "trencadis.torch"):
        found = [graphs(*arguments(size, offset=0.5)).item() for size in (5, 5, 6)]
    assert found == [14.5, 14.5, 15.5]
    assert CompileCounts.now() == before
    assert graphs.num_eager == 3
    ours = [record.args[0] for record in caplog.records if record.name == "trencadis.torch"]
    assert ours == [((5,), 1), ((6,), 1)]


@torch.inference_mode()
def test_as_many_tokens_with_other_logits_are_another_shape():
    graphs = made(sizes=(3,))
    token_ids, positions, _, attention = arguments(3)
    graphs(token_ids, positions, torch.tensor([0, 1]), attention)
    assert graphs.num_eager == 1


@torch.inference_mode()
def test_a_pass_that_names_no_sizes_has_no_graph():
    graphs = made(sizes=(3,))
    token_ids, positions, keep, attention = arguments(3)
    del attention.signature
    assert graphs(token_ids, positions, keep, attention).item() == 12
    assert graphs.num_eager == 1


@torch.inference_mode()
def test_the_first_result_of_a_graph_is_compared_with_the_plain_one_and_kept_only_then():
    seen = []
    made(check=lambda plain, graph: seen.append((plain.item(), graph.item())))
    assert seen == [(3.0, 3.0), (5.0, 5.0)], "of tokens 1, 2 .. at positions 0, 1 .. the last"

    def refuse(plain, graph):
        raise BackendError("they differ")

    graphs = Graphs(forward, check=refuse, compiler="eager")
    with pytest.raises(BackendError, match="they differ"), graphs.preparing():
        graphs(*arguments(2))
    assert len(graphs) == 0
    graphs(*arguments(2))
    assert graphs.num_eager == 1, "preparing is over"


def breaking(token_ids, positions, keep, attention):
    if token_ids.sum() > 100:
        return token_ids
    return forward(token_ids, positions, keep, attention)


@torch.inference_mode()
def test_a_model_that_cannot_be_one_graph_is_refused_with_the_way_out():
    with pytest.raises(
        BackendError, match=r'compile = "buckets": torch.compile failed for the shape \(\(2,\), 1\)'
    ) as failed:
        made(plain=breaking)
    assert 'compile = "off"' in failed.value.hint


def test_the_setting_comes_before_the_environment_and_that_before_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    environ = {DIRECTORY: str(tmp_path / "named")}
    assert set_up(str(tmp_path / "asked"), environ) == tmp_path / "asked"
    assert environ == {DIRECTORY: str(tmp_path / "asked")}
    environ = {DIRECTORY: str(tmp_path / "named")}
    assert set_up("", environ) == tmp_path / "named"
    environ = {}
    assert set_up("", environ) == tmp_path / "home" / "trencadis" / "inductor"
    assert environ[DIRECTORY] == str(tmp_path / "home" / "trencadis" / "inductor")
    assert (tmp_path / "asked").is_dir()


def test_torch_uses_the_compiler_that_our_kernels_use_and_keeps_what_it_makes(tmp_path):
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    set_up(str(tmp_path), {})
    assert inductor.cpp.cxx == (None, find_compiler())
    assert inductor.fx_graph_cache
    assert functorch.enable_autograd_cache


def test_without_a_compiler_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "find_compiler", lambda: None)
    with pytest.raises(BackendError, match=r'compile = "buckets": .* no C\+\+ compiler') as failed:
        set_up(str(tmp_path / "never"), {})
    assert "apt install g++" in failed.value.hint
    assert 'compile = "off"' in failed.value.hint
    assert not (tmp_path / "never").exists()


def test_without_the_headers_of_python_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "find_compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(compile_cache.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(BackendError, match=r"Python\.h is not there") as failed:
        set_up(str(tmp_path), {})
    assert "python3-dev" in failed.value.hint


def test_a_torch_that_cannot_leave_out_guards_is_refused(tmp_path, monkeypatch):
    monkeypatch.delattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe")
    with pytest.raises(BackendError, match="cannot leave out guards"):
        set_up(str(tmp_path), {})


def test_counts_are_those_since():
    assert CompileCounts(5, 3).since(CompileCounts(2, 1)) == CompileCounts(3, 2)
    before = CompileCounts.now()
    torch.compile(lambda x: x * 3, backend="eager")(torch.zeros(2))
    assert CompileCounts.now().since(before) == CompileCounts(1, 0)
