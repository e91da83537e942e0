"""Faults planted in the backend, each of which the emulated device notices."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from support.backends import tiny_models
from support.backends.gaudi_ranks import drive, generate, load_gaudi
from trencadis.clock import SystemClock
from trencadis.errors import BackendError, TrencadisError
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, Phase
from trencadis_gaudi import timer
from trencadis_gaudi.attention import adapter
from trencadis_gaudi.config import GaudiConfig
from trencadis_gaudi.flat_cache import FlatLayer
from trencadis_gaudi.graphs import warmup
from trencadis_gaudi.habana import load_habana
from trencadis_gaudi.passes import decode
from trencadis_gaudi.passes.decode import GaudiDecode

PLAN = AllocationPlan(num_blocks=24, block_size=16, num_rows=2, max_model_len=96, max_num_batched_tokens=64)
BUCKETS = (Bucket(1, 32, 0), Bucket(2, 1, 8, Phase.DECODE))


@pytest.fixture
def run(model_path):
    """``run(**options)`` warms a backend up and returns it, and two tokens that it generates."""

    def run(**options):
        backend = load_gaudi(model_path("llama"), PLAN, **options)
        backend.warm_up(BUCKETS)
        return backend, generate(drive(backend, PLAN, BUCKETS, tiny_models.prompt(20)), 2)

    return run


@pytest.fixture
def fresh():
    """torch.compile has compiled nothing, before and after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def expected(model_path):
    return tiny_models.greedy_reference(model_path("llama"), tiny_models.prompt(20), 2)


def within_attention(monkeypatch, fault):
    """Plant a fault in the attention of decodes, which is part of a graph."""
    attend = GaudiDecode.attend

    def faulty(self, layer, query, *args, **kwargs):
        fault(query)
        return attend(self, layer, query, *args, **kwargs)

    monkeypatch.setattr(GaudiDecode, "attend", faulty)


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_backend_without_a_fault_is_noticed_for_nothing(run, expected, mode):
    backend, tokens = run(mode=mode)
    assert tokens == expected
    assert not backend.habana.emulated.fallbacks


def test_tensor_left_on_the_cpu(run, monkeypatch):
    monkeypatch.setattr(decode, "to_device", lambda array, device: torch.from_numpy(array))
    with pytest.raises(TrencadisError, match="mixes tensors of the device with one of the CPU"):
        run()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda query: query.sum().item(), "the host reads its result"),
        (lambda query: query.cpu(), "it copies to the host"),
        (lambda query: query.cpu().numpy(), "it copies to the host"),
        (lambda query: torch.ones(3).to(query.device), "it copies from the host"),
        (lambda query: query[query > 0], "its result's shape depends on data"),
        (lambda query: query.clone()[0].fill_(1.0), "it writes through a view"),
        (lambda query: torch.special.bessel_j0(query), "it has no kernel and runs on the host"),
    ],
)
def test_operation_that_no_graph_may_have(run, monkeypatch, fault, words):
    within_attention(monkeypatch, fault)
    with pytest.raises(TrencadisError, match=f"cannot be part of a graph: {words}"):
        run()


def test_cache_written_through_views(run, monkeypatch):
    def write(self, slots, keys, values):
        for flat, new in ((self.keys, keys), (self.values, values)):
            flat[:].index_copy_(0, slots, new)

    monkeypatch.setattr(FlatLayer, "write", write)
    with pytest.raises(TrencadisError, match="cannot be part of a graph: it writes through a view"):
        run()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda query: torch.rand(3, device=query.device), "aten.uniform_ draws random numbers on the device"),
        (lambda query: torch.multinomial(query.float().exp().flatten(), 1), "aten.multinomial draws"),
        (lambda query: torch.view_as_complex(query.float().unflatten(-1, (-1, 2)).contiguous()), "no complex numbers"),
    ],
)
def test_operation_that_the_device_does_not_have(run, monkeypatch, fault, words):
    within_attention(monkeypatch, fault)
    with pytest.raises(TrencadisError, match=words):
        run(mode="eager")


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (lambda query: torch.special.bessel_j0(query.float()), "aten.special_bessel_j0"),
        (lambda query: query.flatten().sort(stable=True), "aten.sort"),
    ],
)
def test_operation_that_falls_back_to_the_host(run, expected, monkeypatch, caplog, fault, name):
    within_attention(monkeypatch, fault)
    backend, tokens = run(mode="eager")
    assert tokens == expected
    assert backend.habana.emulated.fallbacks[name] > 1
    assert [record.message for record in caplog.records if "has no kernel" in record.message] == [
        f"{name} has no kernel on the device: it runs on the host, with a copy each way."
    ]


def test_results_read_before_their_copy_has_arrived(run, expected, monkeypatch):
    assert run()[1] == expected
    monkeypatch.setattr(timer.GaudiTimer, "wait", lambda self: 0.0)
    with pytest.raises((TrencadisError, IndexError)):
        run()


@pytest.mark.nightly  # of a captured one: above
def test_graph_of_torch_compile_is_checked_as_a_captured_one(run, monkeypatch):
    within_attention(monkeypatch, lambda query: query.clone()[0].fill_(1.0))
    with pytest.raises(Exception, match="writes through a view"):
        run(mode="compile")


def host_read(query):
    query.sum().item()


def only_compiled(query):
    if torch.compiler.is_compiling():
        raise RuntimeError("planted: no such kernel")


BROKEN = [
    (host_read, rf"{__file__}:\d+ \(host_read\): Unsupported Tensor.item\(\) call"),
    (lambda query: open(__file__).close(), rf"{__file__}:\d+ \(<lambda>\): "),
    (only_compiled, r"Observed exception: raised exception RuntimeError\(.*planted: no such kernel"),
]
"""Faults, and the place and the reason that are said of them; of code that has no graph at all torch.compile keeps no place."""


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("fault", "said"), BROKEN, ids=["host read", "file", "error while it compiles"])
@pytest.mark.parametrize("regional", [True, False])
def test_graph_break_ends_the_warm_up_after_the_first_bucket_with_its_place_and_reason(
    run, fresh, monkeypatch, caplog, fault, said, regional
):
    within_attention(monkeypatch, fault)
    caplog.set_level("INFO", "trencadis.gaudi")
    with pytest.raises(BackendError, match=f"broke a graph during the warm-up: {said}") as error:
        run(mode="compile", regional=regional, hot_replay=False)
    assert 'backend.gaudi.mode to "lazy"' in error.value.hint
    prepared = [message for message in caplog.messages if message.startswith("[Warmup][")]
    assert prepared == ["[Warmup][Prompt][1/1] batch_size:1 query_len:32 num_blocks:0 free_mem:16 GiB"]


def wrong_shapes(query):
    if torch.compiler.is_compiling():
        query @ torch.zeros(7, 9, device=query.device)


@pytest.mark.nightly  # of a break of the graph: above
def test_error_within_torch_compile_keeps_its_own_text_and_place(run, fresh, monkeypatch):
    within_attention(monkeypatch, wrong_shapes)
    said = r"failed during the warm-up: TorchRuntimeError: .*a and b must have same reduction dim.*test_notices.py.*wrong_shapes"
    with pytest.raises(BackendError, match=said):
        run(mode="compile")


@pytest.mark.slow
def test_graph_break_while_serving_is_counted_and_said_once_for_each_place(run, fresh, expected, monkeypatch, caplog):
    monkeypatch.setattr(warmup, "every_graph", lambda: contextlib.nullcontext(lambda: None))
    backend, tokens = run(mode="compile")
    assert (backend.watch.num_graph_breaks, tokens) == (0, expected)
    torch._dynamo.reset()  # so that the next step compiles again
    within_attention(monkeypatch, host_read)
    generate(drive(backend, PLAN, BUCKETS, tiny_models.prompt(20)), 3)
    said = [message for message in caplog.messages if "torch.compile broke a graph" in message]
    assert len(said) == 1
    assert f"{__file__}:" in said[0]
    assert backend.watch.num_graph_breaks > 0
    assert f"trencadis_gaudi_graph_breaks_total {float(backend.watch.num_graph_breaks)}" in backend.metrics()


@pytest.mark.nightly  # of the limit alone: graphs/test_warmup.py
def test_layers_beyond_the_limit_of_torch_compile(run, fresh, monkeypatch):
    """A graph for each layer, as its number is part of it."""
    monkeypatch.setattr(warmup, "_set_dynamo_limits", lambda *args, **kwargs: None)
    attend = adapter.flat_attention_of_layer

    def numbered(module, query, *args, **kwargs):
        return attend(module, query + 0 * module.layer_idx, *args, **kwargs)

    monkeypatch.setattr(adapter, "flat_attention_of_layer", numbered)
    with torch._dynamo.config.patch(recompile_limit=2):
        with pytest.raises(BackendError, match="gave up during the warm-up"):
            run(mode="compile")
        monkeypatch.setattr(warmup, "every_graph", lambda: contextlib.nullcontext(lambda: None))
        torch._dynamo.reset()
        backend, _ = run(mode="compile")
    assert backend.habana.dynamo.num_limit_hits > 0


def test_wide_integers_and_floats_are_narrow_in_lazy_mode_alone():
    found = {}
    for mode in ("lazy", "eager"):
        habana = load_habana(GaudiConfig(device="emulated", mode=mode), clock=SystemClock())
        with habana.active():
            factor = torch.tensor([0xD2511F53 - 2**32, 65537], device=habana.device)
            third = torch.tensor([1.0], dtype=torch.float64, device=habana.device) / 3
            found[mode] = SimpleNamespace(
                product=(factor * factor).tolist(), halves=((factor * factor) >> 32).tolist(), third=third.item()
            )
    wide = (0xD2511F53 - 2**32) ** 2
    assert found["eager"].product == [wide, 65537**2]
    assert found["lazy"].product == [(wide + 2**31) % 2**32 - 2**31, 131073]
    assert found["eager"].third == 1 / 3
    assert found["lazy"].third == float(torch.tensor(1 / 3, dtype=torch.float32))
