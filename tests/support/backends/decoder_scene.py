"""A tiny model with replaced modules, with rows and a cache, whose passes run in one call or module by module."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import torch

from support.backends import families, tiny_models
from support.backends.held_forms import FORMS
from support.backends.passes import make_pass
from trencadis.interfaces import AllocationPlan
from trencadis_torch.attention import adapter
from trencadis_torch.attention.choice import choose_kernel
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.linear.decoder import attach, decoder_of
from trencadis_torch.linear.experts import FusedMixture
from trencadis_torch.linear.native import native
from trencadis_torch.linear.packed import PackedLinear, pack
from trencadis_torch.linear.replacement import fuse_decoder, replace_modules
from trencadis_torch.loading.inspection import attention_layers
from trencadis_torch.rows import Rows
from trencadis_torch.runner import PassRunner

CPU = torch.device("cpu")
BLOCK_SIZE, MAX_LEN = 4, 320


@cache
def fused_model(kind: str, form: str) -> tuple[Any, Any]:
    """Return a model whose passes run in one call, its weights in a form of ``held_forms``, and its attention layers."""
    adapter.register()
    model = tiny_models.make_model(kind) if kind in tiny_models.ARCHITECTURES else families.make_family(kind)
    layers = attention_layers(model)
    kernel = choose_kernel("native", device=CPU, layout="ragged", layers=layers)
    replace_modules(model, native=native())
    mixtures = [part for part in model.modules() if isinstance(part, FusedMixture)]
    floats = {id(one) for part in mixtures for one in (part.router, part.gate)}  # whatever matrices are rounded to
    for part in model.modules():
        if isinstance(part, PackedLinear) and id(part) not in floats:
            weight = part.rows(torch.arange(part.out_features), 1.0)
            again = pack([FORMS[form](weight)], [part.packed.bias], native())
            assert isinstance(again, PackedLinear)
            part.packed = again.packed
    assert fuse_decoder(model, layers=layers, kernel=kernel, native=native())
    return model, layers


class Scene:
    """Rows of tokens over an empty cache."""

    def __init__(self, kind: str, *, form: str = "float32", in_one_call: bool = True, num_rows: int = 3) -> None:
        model, layers = fused_model(kind, form)
        kernel = choose_kernel("native", device=CPU, layout="ragged", layers=layers)
        per_row = MAX_LEN // BLOCK_SIZE
        plan = AllocationPlan(
            num_blocks=num_rows * per_row,
            block_size=BLOCK_SIZE,
            num_rows=num_rows,
            max_model_len=MAX_LEN - 65,
            max_num_batched_tokens=MAX_LEN,
        )
        self.rows = Rows(plan, CPU)
        generator = torch.Generator().manual_seed(5)
        self.rows.tokens[:] = torch.randint(3, 131, self.rows.tokens.shape, generator=generator).int()
        order = torch.randperm(plan.num_blocks, generator=generator)[: self.rows.tables.numel()]
        self.rows.tables[:] = order.view(num_rows, -1).int()
        self.cache = PagedKVCache(layers, num_blocks=plan.num_blocks, block_size=BLOCK_SIZE, device=CPU, kernel=kernel)
        for part in self.cache.parts:
            part.zero_()
        decoder = decoder_of(model)
        if not in_one_call:
            attach(model, None)
        try:
            self.runner = PassRunner(model, rows=self.rows, cache=self.cache, layout="ragged", workspace=Workspace())
        finally:
            attach(model, decoder)

    @torch.inference_mode()
    def logits(self, rows: list[int], starts: list[int], lengths: list[int], tokens: list[int]) -> torch.Tensor:
        """Run a pass and return the logits at some of its tokens."""
        inputs = self.runner.inputs(make_pass(None, rows, starts, lengths))
        return self.runner.forward(inputs, np.array(tokens, np.int64))

    def content(self) -> list[torch.Tensor]:
        """Return a copy of the cache."""
        return copy.deepcopy(list(self.cache.parts))
