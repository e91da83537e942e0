"""On a CUDA device alone: every way to run there gives the text of transformers' own generate."""

from __future__ import annotations

import functools
import re

import pytest
import torch

from support.backends import tiny_models
from support.backends.torch_backends import PLAN, PROMPTS, load_torch
from support.devices import DEVICE, cuda_only
from trencadis.errors import BackendError
from trencadis.records import Bucket, Phase
from trencadis_testing.driver import BackendDriver

pytestmark = cuda_only

GRAPHS = {"layout": "padded", "graphs": "buckets", "max_prefill_batch_size": 2}
MODES = {
    "kernel": {},
    "gathered": {"attention": "sdpa"},
    "kernel, padded": {"layout": "padded", "max_prefill_batch_size": 2},
    "kernel, graphs": GRAPHS,
    "gathered, graphs": {**GRAPHS, "attention": "sdpa"},
    "as transformers": {"pack": "off"},
}
MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")
DECODE = Bucket(4, 1, 60, Phase.DECODE)


def bucket(shape):
    """Decodes have the shape that is captured, prefills their own."""
    return DECODE if shape.phase is Phase.DECODE else Bucket.of(shape)


loaded = functools.partial(load_torch, device=DEVICE, dtype="float32")


@pytest.mark.representatives(100)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", tiny_models.ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(model_path, kind, mode):
    path = model_path(kind)
    expected = {row: tiny_models.greedy_reference(path, tokens, 12) for row, tokens in PROMPTS.items()}
    backend = loaded(path, **MODES[mode])
    is_graph = "graphs" in MODES[mode]
    if is_graph and kind in MIXTURES:
        # In float32 products of experts bring their offsets to the host, beneath what a rehearsal sees.
        with pytest.raises(BackendError, match=r"cannot be captured: .*between CPU and CUDA"):
            backend.warm_up([DECODE])
        return
    if is_graph:
        assert backend.warm_up([DECODE]).num_graphs == 1
    for chunk in (0, 7):
        driver = BackendDriver(backend, PLAN, seed=chunk, bucket=bucket if is_graph else None)
        assert driver.generate(PROMPTS, 12, chunk=chunk) == expected
    assert ("triton" in backend.kv_cache().kernels) == (MODES[mode].get("attention") != "sdpa")
    if is_graph:
        counts = {
            name: float(value)
            for name, value in re.findall(r"^(trencadis_\S+) (\S+)$", backend.metrics(), re.MULTILINE)
        }
        assert sum(value for name, value in counts.items() if "graph_replays_total" in name) > 0
        assert counts["trencadis_torch_graph_misses_total"] == 0
    backend.close()


@pytest.mark.representatives(100)
@pytest.mark.parametrize("mode", ["kernel", "gathered", "kernel, graphs"])
@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16", "float16"])
def test_narrow_caches_agree_with_the_same_on_the_cpu(model_path, kv_dtype, mode):
    """Keys are rounded alike; a kernel also reads a new prompt's rounded, as the CPU's does, where gathering does not."""
    path, found = model_path("llama"), []
    for device, options in (
        (DEVICE, MODES[mode]),
        ("cpu", {"attention": "sdpa" if mode == "gathered" else "native", "pack": "off"}),
    ):
        backend = loaded(path, **{"device": device, "kv_dtype": kv_dtype, "check_model": False, **options})
        found.append(BackendDriver(backend, PLAN).generate(PROMPTS, 8, chunk=7))
        backend.close()
    assert found[0] == found[1]


@pytest.mark.representatives(100)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", tiny_models.ARCHITECTURES)
def test_sixteen_bits_are_as_near_to_float32_as_transformers_own(model_path, kind, dtype):
    """Logits of every position of a text; the reference has the same 16-bit weights, and computes in float32."""
    from transformers import AutoModelForCausalLM

    from trencadis_torch.loading.self_check import paged_logits

    tokens = [torch.tensor(tiny_models.prompt(count, seed=count)) for count in (26, 13)]
    narrow, wide = (
        AutoModelForCausalLM.from_pretrained(model_path(kind), dtype=dtype, attn_implementation="eager")
        .eval()
        .to(DEVICE)
        for _ in range(2)
    )
    wide.float()
    with torch.inference_mode():
        exact = torch.cat([wide(input_ids=one[None].to(DEVICE), use_cache=False).logits[0] for one in tokens])
        theirs = torch.cat([narrow(input_ids=one[None].to(DEVICE), use_cache=False).logits[0] for one in tokens])
    backend = loaded(model_path(kind), dtype=dtype)
    model = backend._model
    with torch.inference_mode():
        ours = torch.cat(paged_logits(model, backend._layers, tokens, "ragged", backend._kernel))
    error, allowed = ((one.float() - exact).norm() / exact.norm() for one in (ours, theirs))
    assert error <= 1.5 * allowed + 1e-3, f"{float(error):.3g}, theirs {float(allowed):.3g}"
    backend.close()


@pytest.mark.representatives(100)
@pytest.mark.parametrize("kind", [*MIXTURES, "llama", "gemma3"])
def test_graphs_in_sixteen_bits_compute_what_eager_passes_do(model_path, kind):
    """Of the same buckets, so with the same kernels: bit for bit."""
    found = []
    for graphs in ("off", "buckets"):
        backend = loaded(model_path(kind), dtype="bfloat16", **{**GRAPHS, "graphs": graphs})
        assert backend.warm_up([DECODE]).num_graphs == (graphs == "buckets")
        found.append(BackendDriver(backend, PLAN, bucket=bucket).generate(PROMPTS, 12))
        backend.close()
    assert found[0] == found[1]
