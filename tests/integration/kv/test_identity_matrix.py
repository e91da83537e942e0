"""No KV connector changes a text: connectors, codecs, caches, pressure, chunk sizes, drafters and shapes, every two of them.

Greedy tokens are those of transformers' own generate on the demo model in float32, when they are computed and saved, and when a
second engine with an empty cache loads what the first one had.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.devices import DEVICE, ON_CUDA
from support.kv.p2p_ends import LOOPBACK_PEERS, SECRET
from support.kv.redis_server import running_redis
from support.pairwise import Case, pairwise
from trencadis.engine.build import build_engine
from trencadis.records import FinishedSequence, Request, SamplingParams
from trencadis.registry.startup import load_with_plugins
from trencadis.text import load_tokenizer, resolve_model_path

NUM_TOKENS = 12
OPENING = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do: "
TEXTS = (
    OPENING + "once or twice she had peeped into the book her sister was reading, but it had no pictures in it",
    OPENING + "so she was considering in her own mind, as well as she could, for the hot day made her feel very sleepy",
    "said the Queen, said the King, said the Queen, said the King, said the Queen, said the King, said the Queen,",
)
SHAPES: dict[str, dict[str, Any]] = {
    "ragged": {},
    "padded": {"backend.torch.layout": "padded", "bucketing.name": "exponential"},
    "gaudi": {
        "backend.name": "gaudi",
        "backend.gaudi.device": "emulated",
        "backend.gaudi.mode": "lazy",
        "backend.gaudi.check_model": False,
        "bucketing.name": "exponential",
    },
}
if ON_CUDA:
    del SHAPES["gaudi"]  # pinned memory of a process belongs to one accelerator, and emulated it is one
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
AXES = {
    "connector": ("host_offload", "filesystem", "redis", "tiered", "p2p"),
    "codec": ("none", "zstd", "aes_gcm"),
    "prefix": ("on", "off"),
    "room": ("48", "14"),
    "budget": ("24", "64", "2048"),
    "drafter": ("none", "ngram"),
    "shape": tuple(SHAPES),
}


def allowed(case: Case) -> bool:
    """The smallest pass of a padded layout must fit the budget."""
    return case["budget"] != "24" or case["shape"] == "ragged"


CASES = pairwise(AXES, allowed=allowed)


@pytest.fixture(scope="module")
def redis_url():
    with running_redis() as server:
        yield server.url


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(resolve_model_path("demo"), dtype=torch.float32).eval()
    tokenizer = load_tokenizer("demo")
    texts = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer.encode(text)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        texts.append(out[0, ids.shape[1] :].tolist())
    return texts


def overrides(case: Case, request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    options: dict[str, Any] = {
        "model.path": "demo",
        "model.dtype": "float32",
        "engine.max_num_seqs": 4,
        "engine.warmup": False,
        "backend.torch.device": DEVICE,
        "observer.names": [],
        "kv_connector.name": case["connector"],
        "kv_codec.name": case["codec"],
        "kv_policy.name": "always",
        "kv_connector.p2p.secret": SECRET,
        "kv_connector.p2p.peers": LOOPBACK_PEERS,
        "kv_connector.filesystem.path": str(tmp_path / "blocks"),
        "cache.prefix_caching": case["prefix"] == "on",
        "cache.num_blocks": int(case["room"]),
        "cache.block_size": 16,
        "engine.max_num_batched_tokens": int(case["budget"]),
        "speculation.name": case["drafter"],
        "speculation.ngram.min_match": 1,
        **SHAPES[case["shape"]],
    }
    if case["codec"] == "aes_gcm":
        key = tmp_path / "key"
        key.write_text("0123456789abcdef" * 4)
        key.chmod(0o600)
        options["kv_codec.aes_gcm.key_file"] = str(key)
    if case["connector"] == "redis":
        options["kv_connector.redis.url"] = request.getfixturevalue("redis_url")
        options["kv_connector.redis.namespace"] = uuid.uuid4().hex
    return options


class Running:
    """An engine, and texts served by it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        resolved, registry = load_with_plugins(environ={}, overrides=dict(options))
        self.engine = build_engine(resolved.config, registry=registry)
        self.prompts = [load_tokenizer("demo").encode(text) for text in TEXTS]

    def serve(
        self, params: Sequence[Mapping[str, Any] | None], *, beside: Running | None = None
    ) -> list[FinishedSequence]:
        """Serve all texts; each comes when the one before has begun."""
        ended: dict[int, FinishedSequence] = {}
        sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        waiting = list(range(len(TEXTS)))
        while len(ended) < len(TEXTS):
            if waiting:
                index = waiting.pop(0)
                self.engine.add(
                    Request(
                        request_id=str(index),
                        prompt_token_ids=self.prompts[index],
                        params=sampling,
                        transfer_params=params[index],
                    )
                )
            for finished in self.engine.step().finished:
                assert not finished.error
                ended[int(finished.request_id)] = finished
            if beside is not None and beside.engine.has_work:
                beside.engine.step()
        return [ended[index] for index in range(len(TEXTS))]

    def rest(self) -> None:
        """Wait until everything is saved."""
        assert self.engine._executor._rank._connector.strategy.wait_idle(60.0)

    def close(self) -> None:
        self.engine.close()


@pytest.mark.representatives(1, ci=3)
@pytest.mark.parametrize(
    "case",
    [
        # The first few have most values of every axis; all have every pair of them.
        pytest.param(case, id="-".join(case.values()), marks=() if number < 6 else pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
)
def test_greedy_text_is_that_of_transformers(case, reference, request, tmp_path) -> None:
    options = overrides(case, request, tmp_path)
    writer = Running(options)
    reader = writer
    try:
        first = writer.serve([PREFILL] * 3)
        assert [end.token_ids.tolist() for end in first] == reference
        params = [end.transfer_params for end in first]
        if case["connector"] == "host_offload":
            writer.rest()
        elif case["connector"] == "p2p":
            reader = Running(options)
        else:
            writer.close()  # which writes what is not written yet
            reader = Running(options)
        second = reader.serve(params, beside=writer if reader is not writer else None)
        assert [end.token_ids.tolist() for end in second] == reference
        if case["connector"] == "p2p":  # what was just computed for it is loaded, and no hit
            assert reader.engine.stage("transfer").transfers.num_loaded > 0, "nothing was loaded, so nothing was shown"
        else:
            num_cached = [sum(end.num_cached_tokens for end in ends) for ends in (first, second)]
            assert num_cached[1] > num_cached[0], "nothing was loaded, so nothing was shown"
    finally:
        reader.close()
        writer.close()
