"""Engines over ranks that have whole experts, in threads and in processes, next to an engine of one rank."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.backends import tiny_models
from trencadis import LLM, SamplingParams
from trencadis.text import load_tokenizer, resolve_model_path

SHARED = "The old man looked at the sea and the sea looked at the old man, and the old man said to the sea: "
PROMPTS = [SHARED + "who", SHARED + "what is it", "Alice was beginning to get very tired of", "x"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LAYERS, EXPERTS, TOP = 3, 8, 2


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A random Mixtral with the tokens of the demo model."""
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig

    path = tmp_path_factory.mktemp("mixture")
    demo = Path(resolve_model_path("demo"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, path / name)
    sizes = {**tiny_models._COMMON, "vocab_size": 4096, "eos_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = MixtralConfig(**sizes, num_local_experts=EXPERTS, num_experts_per_tok=TOP)
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def expected(mixture):
    """Texts as transformers writes them, whose best tokens are far apart."""
    encode = load_tokenizer(str(mixture)).encode
    return [tiny_models.greedy_reference(mixture, encode(prompt), GREEDY.max_tokens) for prompt in PROMPTS]


def generate(path, **config):
    """Return texts, and the metrics; prompts share a prefix, small steps cut them, and the second time they are cached."""
    config = {"cache.num_blocks": 256, "engine.max_num_batched_tokens": 24, "observer.names": ["prometheus"], **config}
    with LLM(str(path), **config) as llm:
        texts = []
        for _ in range(2):
            outputs = llm.generate(PROMPTS, GREEDY, use_progress=False)
            texts.append([list(output.outputs[0].token_ids) for output in outputs])
        return texts, llm._frontend.engine.engine.metrics()


def value(page, name):
    """Return the sum of a metric's samples."""
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))
    )


@pytest.mark.parametrize("layout", ["ragged", "padded"])
@pytest.mark.parametrize("size", [2, 4])
def test_prompts_in_chunks_and_from_the_cache_go_on_as_those_of_transformers(mixture, expected, size, layout):
    options = {"size": size, "expert": size, "layout": layout}
    backend = {"backend.name": "support.backends.rank_threads:ranked_backend", "backend.options": options}
    texts, page = generate(mixture, **backend)
    assert texts == [expected, expected]
    assert value(page, "trencadis_prompt_tokens_cached_total") > 0


@pytest.mark.nightly
def test_loads_that_processes_measure_place_experts_of_the_next_ones(mixture, expected, tmp_path):
    config = {"executor.name": "processes", "parallel.tensor": 2, "parallel.expert": 2}
    texts, page = generate(mixture, **config)
    assert texts == [expected, expected]
    computed = value(page, "trencadis_scheduled_tokens_total")
    assert value(page, "trencadis_torch_expert_tokens_total") == computed * LAYERS * TOP
    loads = tmp_path / "loads.json"
    command = [sys.executable, "-m", "trencadis", "expert-loads", "-o", str(loads)]
    subprocess.run(command, input=page, text=True, check=True, timeout=120)
    assert [len(own) for own in json.loads(loads.read_text()).values()] == [EXPERTS] * LAYERS
    balanced = {"expert_placement": "balanced", "expert_loads": str(loads), "redundant_experts": 4}
    texts, again = generate(mixture, **config, **{f"backend.torch.{key}": one for key, one in balanced.items()})
    assert texts == [expected, expected]
    name = "trencadis_torch_expert_balance_ratio"
    assert value(again, name) > value(page, name)
    assert not list(Path("/dev/shm").glob(f"trencadis-{os.getpid()}-*"))
