from __future__ import annotations

from trencadis_torch.attention.kernel import StaticKernel
from trencadis_torch.attention.native import NativeAttention
from trencadis_torch.attention.triton import TritonAttention


def test_one_kernel_can_be_begun_from_tensors_alone_and_the_other_cannot():
    """Graphs hold passes of the former; instances are not needed to see it."""
    assert isinstance(TritonAttention(1), StaticKernel)
    assert not isinstance(NativeAttention.__new__(NativeAttention), StaticKernel)
