from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from support.backends import tiny_models
from trencadis.interfaces import AllocationPlan
from trencadis.records import Bucket, Pass, Phase
from trencadis_testing.backend import ArgmaxSampler
from trencadis_torch.attention import adapter
from trencadis_torch.attention.options import AttentionOptions
from trencadis_torch.attention.ragged import Workspace
from trencadis_torch.cache.kv_cache import PagedKVCache
from trencadis_torch.loading.inspection import attention_layers
from trencadis_torch.rows import Rows
from trencadis_torch.runner import GatedPass, PassRunner
from trencadis_torch.verify import MatchingPrefix

PLAN = AllocationPlan(num_blocks=40, block_size=4, num_rows=4, max_model_len=40, max_num_batched_tokens=64)


def ints(*values):
    return np.array(values, np.int32)


def make(layout, *, model=None):
    adapter.register()
    model = model or tiny_models.make_model("gemma3")
    layers = attention_layers(model)
    adapter.switch(model, adapter.PAGED)
    device = torch.device("cpu")
    rows = Rows(PLAN, device)
    rows.tokens[:] = torch.arange(rows.tokens.numel()).view_as(rows.tokens).int() % 100 + 3
    rows.tables[:, :10] = torch.arange(40).view(4, 10)
    cache = PagedKVCache(layers, num_blocks=40, block_size=4, device=device)
    return PassRunner(model, rows=rows, cache=cache, layout=layout, workspace=Workspace()), rows, cache


def one_pass(bucket, rows, starts, lengths, num_logits, num_prompt_logits=None):
    return Pass(
        bucket=bucket,
        indices=np.arange(len(rows), dtype=np.int32),
        rows=ints(*rows),
        starts=ints(*starts),
        query_lens=ints(*lengths),
        num_logits=ints(*num_logits),
        num_prompt_logits=ints(*(num_prompt_logits or [0] * len(rows))),
    )


def run(runner, one):
    with torch.inference_mode():
        return runner.run(one, drafts=None, sampler=ArgmaxSampler(), acceptance=MatchingPrefix())


class Shapes(TorchDispatchMode):
    """Records every operation with the shapes of its tensors."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
        result = function(*args, **(kwargs or {}))
        # Values come to the host only as inputs of a pass, never back out of one.
        assert "_local_scalar_dense" not in str(function)
        self.seen.append((str(function), shapes))
        return result


@pytest.mark.parametrize(
    "passes",
    [
        (
            one_pass(Bucket(3, 8, 4), (2,), (0,), (5,), (1,)),
            one_pass(Bucket(3, 8, 4), (0, 1, 3), (13, 4, 0), (8, 2, 1), (0, 1, 1)),
            one_pass(Bucket(3, 8, 4), (1,), (4,), (8,), (0,)),
        ),
        (
            one_pass(Bucket(4, 1, 24, Phase.DECODE), (2, 0), (9, 30), (1, 1), (1, 1)),
            one_pass(Bucket(4, 1, 24, Phase.DECODE), (0, 1, 2, 3), (0, 1, 2, 35), (1, 1, 1, 1), (1, 1, 1, 1)),
        ),
    ],
    ids=["prefill", "decode"],
)
def test_shapes_of_a_padded_forward_follow_from_the_bucket(passes):
    runner, _, _ = make("padded")
    recorded = []
    for one in passes:
        with torch.inference_mode(), Shapes() as shapes:
            inputs = runner.inputs(one)
            size = one.bucket.batch_size
            runner.forward(inputs, np.zeros(size, np.int64))
        recorded.append(shapes.seen)
    assert all(seen == recorded[0] for seen in recorded)
    assert len(recorded[0]) > 100


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_pass_without_logits_still_writes_the_cache(layout):
    runner, _, cache = make(layout)
    result = run(runner, one_pass(Bucket(1, 6, 0), (2,), (0,), (6,), (0,)))
    assert result.emitted is None
    assert result.prompt is None
    assert all(keys[20].all() and keys[21, :2].all() and not keys[21, 2:].any() for keys in cache.keys)


@pytest.mark.parametrize("layout", ["ragged", "padded"])
def test_prompt_scores_and_samples_come_from_one_forward(layout):
    runner, rows, _ = make(layout)
    rows.prompt_logprobs = [0, 2, 0, 0]
    bucket = Bucket(2, 7, 0) if layout == "ragged" else Bucket(3, 9, 2)
    result = run(runner, one_pass(bucket, (1, 3), (0, 0), (5, 7), (1, 1), (4, 0)))
    tokens = rows.tokens.clone()
    model = tiny_models.make_model("gemma3")
    with torch.inference_mode():
        first, second = (model(tokens[row : row + 1, :size].long()).logits[0] for row, size in ((1, 5), (3, 7)))
    assert result.emitted.token_ids[:2].flatten().tolist() == [int(first[-1].argmax()), int(second[-1].argmax())]
    expected = first[:4].log_softmax(-1).gather(1, tokens[1, 1:5, None].long())[:, 0]
    torch.testing.assert_close(result.prompt.logprobs, expected, atol=1e-4, rtol=1e-4)
    assert result.num_padded_tokens == (12 if layout == "ragged" else 27)


def test_model_that_cannot_select_positions_is_served_all_the_same():
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny_models.make_model("llama")

        def forward(self, input_ids, position_ids, use_cache, trencadis_pass):
            return self.inner(
                input_ids=input_ids, position_ids=position_ids, use_cache=use_cache, trencadis_pass=trencadis_pass
            )

    runner, rows, cache = make("ragged", model=tiny_models.make_model("llama"))
    one = one_pass(Bucket(2, 6, 0), (2, 0), (0, 0), (6, 3), (1, 1))
    expected = run(runner, one).emitted.token_ids
    plain = Plain()
    adapter.switch(plain.inner, adapter.PAGED)
    other = PassRunner(plain, rows=rows, cache=cache, layout="ragged", workspace=Workspace())
    assert torch.equal(run(other, one).emitted.token_ids, expected)


class Recorder:
    """Both what is asked and who attends."""

    def __init__(self):
        self.calls = []

    def wait(self, layer):
        self.calls.append(("wait", layer))

    def attend(self, layer, query, keys, values, *, options):
        self.calls.append(("attend", layer, options))
        return query + keys + values


def test_layer_is_waited_for_before_it_attends_with_what_it_was_given():
    both = Recorder()
    one = torch.ones(2, 1, 4)
    options = AttentionOptions(scale=0.5)
    output = GatedPass(both, both).attend(7, one, 2 * one, 3 * one, options=options)
    assert both.calls == [("wait", 7), ("attend", 7, options)]
    assert torch.equal(output, 6 * one)
