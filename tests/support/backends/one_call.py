"""A model's passes in one call against its own forward."""

from __future__ import annotations

from typing import Any

import torch

from trencadis_torch.attention import adapter
from trencadis_torch.attention.choice import choose_kernel
from trencadis_torch.linear.decoder import how_it_runs
from trencadis_torch.linear.native import native
from trencadis_torch.linear.replacement import fuse_decoder, replace_modules
from trencadis_torch.loading import self_check
from trencadis_torch.loading.inspection import attention_layers
from trencadis_torch.loading.self_check import ModelCheck


def errors_in_one_call(model: Any, *, layout: str = "ragged") -> float | str:
    """Return how far logits of passes in one call are from the model's own, over their spread, or why there are none."""
    adapter.register()
    layers = attention_layers(model)
    check = ModelCheck(model, layers, layout="ragged")
    replace_modules(model, native=native())
    kernel = choose_kernel("native", device=torch.device("cpu"), layout="ragged", layers=layers)
    if not fuse_decoder(model, layers=layers, kernel=kernel, native=native()):
        return how_it_runs(model)
    with torch.inference_mode():
        found = self_check.paged_logits(model, layers, check._sequences, layout, kernel)
    pairs = zip(check._expected, found, strict=True)
    return float(torch.cat([self_check._errors(expected, logits) for expected, logits in pairs]).max())
