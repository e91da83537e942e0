"""Blocks of GGUF's kinds against the dequantisation of the package gguf, bit for bit."""

from __future__ import annotations

import pytest
import torch

from support.gguf_writing import random_blocks
from trencadis.gguf_file import KINDS
from trencadis_torch.linear.formats import gguf_blocks
from trencadis_torch.linear.formats.gguf_blocks import FORMS, unpacked

gguf = pytest.importorskip("gguf")


@pytest.mark.representatives(13)
@pytest.mark.parametrize("kind", FORMS)
def test_blocks_have_the_values_of_the_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_blocks, "_AT_ONCE", 600)  # several parts, the last one smaller
    number, found = next((number, one) for number, one in KINDS.items() if one.name == kind)
    raw = random_blocks(kind, (11, 512))
    calls = list[None]()
    held = unpacked(torch.from_numpy(raw), found, lambda: calls.append(None))
    assert calls
    expected = torch.from_numpy(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(number)))
    assert expected.isfinite().all()
    assert expected.std() > 0
    assert torch.equal(held.dequantised(), expected)
    assert held.bits == FORMS[kind].bits
    assert held.group == FORMS[kind].group
    assert int(held.values.max()) < 2**held.bits
