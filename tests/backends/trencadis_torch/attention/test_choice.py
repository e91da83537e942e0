from __future__ import annotations

import copy

import attrs
import pytest
import torch

from trencadis.errors import BackendError
from trencadis_torch.attention import native as native_attention
from trencadis_torch.attention.choice import choose_kernel, prove
from trencadis_torch.attention.native import NativeAttention
from trencadis_torch.attention.ragged import RaggedPass, Workspace
from trencadis_torch.attention.triton import TritonAttention
from trencadis_torch.cache.kv_cache import AttentionLayer, PagedKVCache, StaticKernel

CPU = torch.device("cpu")
LAYER = AttentionLayer(index=0, num_kv_heads=1, key_dim=8, value_dim=8, window=0, dtype=torch.float32)
OPTIONS = {"device": CPU, "layout": "padded", "layers": (LAYER,)}


class Gathered:
    """Attends as the reference does, and adds an error."""

    name = "gathered"

    def __init__(self, error=0.0, fails=False):
        self.error, self.fails, self.begun = error, fails, 0

    def begin(self, cache, *, tables, slots, rows, starts, query_lens, firsts):
        self.begun += 1
        if self.fails:
            raise RuntimeError("out of shared memory")
        plain, error = copy.copy(cache), self.error
        plain.kernel = None
        one = RaggedPass(
            plain, tables=tables, slots=slots, rows=rows, starts=starts, query_lens=query_lens, workspace=Workspace()
        )

        class Pass:
            def attend(self, *args, output, **options):
                output.copy_(one.attend(*args, **options) + error)

        return Pass()


def test_kernel_that_agrees_is_trusted_and_each_kind_of_layer_tried_once():
    kernel = Gathered()
    layers = (LAYER, attrs.evolve(LAYER, index=1), attrs.evolve(LAYER, index=2, window=5))
    assert prove(kernel, layers, layers, device=CPU, num_heads=4) is None
    assert kernel.begun == 2 * 2


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (Gathered(error=2e-4), "outputs for layer 0 differ by 0.0002"),
        (Gathered(error=float("nan")), "differ by nan"),
        (Gathered(fails=True), "failed for layer 0: RuntimeError: out of shared memory"),
    ],
)
def test_kernel_that_does_not_is_out_with_the_reason(kernel, reason):
    assert reason in prove(kernel, (LAYER,), (LAYER,), device=CPU)


def test_rounded_caches_are_allowed_their_rounding():
    held = attrs.evolve(LAYER, dtype=torch.int8)
    assert prove(Gathered(error=2e-4), (LAYER,), (held,), device=CPU) is None


def test_triton_by_name_is_had_or_refused_and_never_replaced():
    pytest.importorskip("triton", reason="triton is not installed: its kernels cannot be interpreted")
    from trencadis_torch.attention import triton_kernels

    if not triton_kernels.is_interpreted():
        pytest.skip("TRITON_INTERPRET is 0: kernels are compiled for a GPU")
    kernel = choose_kernel("triton", **OPTIONS, num_heads=2)
    assert kernel is not None
    cache = PagedKVCache((LAYER,), num_blocks=1, block_size=1, device=CPU, kernel=kernel)
    assert cache.layout.numerics == "triton-cpu"
    with pytest.raises(BackendError, match=r'attention = "triton": layer 0 has heads of more than 512'):
        choose_kernel("triton", device=CPU, layout="padded", layers=(attrs.evolve(LAYER, key_dim=1024),))


def test_without_triton_it_is_named(monkeypatch):
    from trencadis_torch.attention import triton_kernels

    monkeypatch.setattr(triton_kernels, "triton", None)
    with pytest.raises(BackendError, match=r'attention = "triton": the package triton is missing'):
        choose_kernel("triton", **OPTIONS)


def test_cuda_without_triton_gathers_and_says_so(monkeypatch, caplog):
    from trencadis_torch.attention import triton_kernels

    monkeypatch.setattr(triton_kernels, "triton", None)
    assert choose_kernel("auto", device=torch.device("cuda:0"), layout="ragged", layers=(LAYER,)) is None
    assert "Attention gathers blocks, which is slower: the package triton is missing" in caplog.text


def test_cpu_is_left_to_its_own_kernel_where_nothing_is_padded_or_graphs_call_it(monkeypatch):
    kernel = object()
    monkeypatch.setattr(native_attention, "compiled_kernel", lambda dtypes: kernel)
    for name in ("auto", "native"):
        assert choose_kernel(name, device=CPU, layout="ragged", layers=(LAYER,)) is kernel
        assert choose_kernel(name, **OPTIONS, in_graphs=True) is kernel


def test_where_the_kernel_cannot_run_auto_does_without_and_native_says_why():
    assert choose_kernel("auto", **OPTIONS) is choose_kernel("sdpa", **OPTIONS) is None
    with pytest.raises(BackendError, match=r'attention = "native": layout = "padded"'):
        choose_kernel("native", **OPTIONS)
    with pytest.raises(BackendError, match=r'attention = "native": .* not on cuda:0'):
        choose_kernel("native", device=torch.device("cuda:0"), layout="ragged", layers=(LAYER,))


def test_one_kernel_can_be_begun_from_tensors_alone_and_the_other_cannot():
    """Graphs hold passes of the former; instances are not needed to see it."""
    assert isinstance(TritonAttention(1), StaticKernel)
    assert not isinstance(NativeAttention.__new__(NativeAttention), StaticKernel)
