from __future__ import annotations

import ctypes

import pytest
import torch

from trencadis.errors import BackendError
from trencadis_torch.linear.native import KINDS, Product, native
from trencadis_torch.linear.native_decoder import (
    PARTS,
    Decoder,
    Layer,
    NativeDecoder,
    layer_array,
    native_decoder,
)

needs_native = pytest.mark.skipif(native() is None, reason="there is no C++ compiler on this machine")


class Library:
    """Functions that return numbers."""

    def __init__(self, **numbers):
        for name in ("bytes", "parts", "widest", "scratch", "mixing"):
            setattr(self, f"trencadis_decoder_{name}", self.function(numbers.get(name, 0)))
        self.trencadis_decode = self.trencadis_guess = self.trencadis_draft = self.trencadis_follow = self.function(0)

    @staticmethod
    def function(number):
        return ctypes.CFUNCTYPE(ctypes.c_int64)(lambda: number)


def test_a_library_of_other_structures_is_refused():
    with pytest.raises(BackendError, match="other structures"):
        NativeDecoder(Library(bytes=8, parts=len(PARTS)))


@needs_native
def test_sizes_follow_from_the_widest_input_and_from_what_is_quantised():
    layers = [Layer(), Layer()]
    layers[1].down.num_inputs = 90
    decoder = Decoder(layers=layer_array(layers), num_layers=2, hidden_size=48)
    widest, scratch = native_decoder().sizes(decoder)
    assert widest == 0
    assert scratch >= 4 * 90
    layers[1].down = Product(kind=KINDS["groups4"], group=30, zero=8, num_outputs=48, num_inputs=90)
    decoder.layers = layer_array(layers)
    widest, quantised = native_decoder().sizes(decoder)
    assert widest >= 90
    assert quantised >= scratch + widest


def test_without_a_compiler_there_is_a_line_in_the_log_and_no_library(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level("INFO", logger="trencadis.torch"):
        assert native_decoder.__wrapped__() is None
    assert "layers run one by one: decoder.cpp: no C++ compiler" in caplog.text
    assert torch.get_num_threads() > 0
