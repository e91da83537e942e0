"""A tiny model with rows, a cache of random contents and decode passes; with graphs that are checked, and without."""

from __future__ import annotations

import attrs
import numpy as np
import torch

from support.backends import tiny_models
from support.backends.passes import make_pass
from support.devices import DEVICE
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, Pass, Phase
from trencadis_torch.attention import adapter
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.graphs.counts import CaptureWatch
from trencadis_torch.graphs.cuda_graphs import GraphRunner, make_recorder
from trencadis_torch.loading.inspection import attention_layers
from trencadis_torch.rows import Rows
from trencadis_torch.runner import PassRunner

HERE = torch.device(DEVICE)
PLAN = AllocationPlan(num_blocks=40, block_size=4, num_rows=4, max_model_len=40, max_num_batched_tokens=64)
SINGLE, DRAFTS = Bucket(4, 1, 40, Phase.DECODE), Bucket(2, 3, 20, Phase.DECODE)


@attrs.define
class Scene:
    """Parts of a backend."""

    model: object
    rows: Rows
    cache: PagedKVCache
    watch: CaptureWatch
    graphed: GraphRunner
    plain: PassRunner

    def logits(self, runner: PassRunner, one: Pass) -> torch.Tensor:
        """Return the logits of the real tokens of a pass."""
        with torch.inference_mode():
            found = runner.forward(runner.inputs(one), np.arange(one.bucket.num_tokens)).clone()
        lengths = np.zeros(one.bucket.batch_size, np.int32)
        lengths[: len(one.query_lens)] = one.query_lens
        is_real = np.arange(one.bucket.query_len) < lengths[:, None]
        return found[torch.from_numpy(is_real.ravel()).to(HERE)]

    def warm_up(self, *buckets: Bucket):
        """Capture buckets."""
        with torch.inference_mode():
            return self.graphed.graphs.warm_up(buckets, run=lambda _: None)


def make(kind: str = "llama", *, kernel=None, recorder=None, model=None) -> Scene:
    """Return a scene; blocks of the four rows lie in random order."""
    adapter.register()
    model = (model or tiny_models.make_model(kind)).to(HERE)
    layers = attention_layers(model)
    adapter.switch(model, adapter.PAGED)
    generator = torch.Generator().manual_seed(1)
    rows = Rows(PLAN, HERE)
    rows.tokens[:] = torch.randint(3, 100, rows.tokens.shape, generator=generator).int()
    rows.tables[:, :10] = torch.randperm(40, generator=generator).view(4, 10).int()
    cache = PagedKVCache(layers, num_blocks=40, block_size=4, device=HERE, kernel=kernel)
    for part in cache.parts:
        part.copy_(torch.empty(part.shape).normal_(generator=generator))
    watch = CaptureWatch()
    recorder = recorder or make_recorder(HERE, model, rows, cache)
    graphed = GraphRunner(model, rows=rows, cache=cache, recorder=recorder, watch=watch)
    plain = PassRunner(model, rows=rows, cache=cache, layout="padded", workspace=Workspace())
    return Scene(model, rows, cache, watch, graphed, plain)


def one_pass(bucket: Bucket, rows, starts, lengths) -> Pass:
    """Return a pass all of whose tokens are sampled."""
    return make_pass(bucket, rows, starts, lengths, lengths)


PASSES = (
    one_pass(SINGLE, (2, 0), (9, 30), (1, 1)),
    one_pass(DRAFTS, (3,), (7,), (3,)),
    one_pass(DRAFTS, (1, 0), (13, 5), (2, 3)),
    one_pass(SINGLE, (0, 1, 2, 3), (0, 1, 2, 35), (1, 1, 1, 1)),
)
