"""Structured output: time of one mask, of compiling, and how many masks are ready when the sampler asks.

    python benchmarks/micro/structured.py [--texts 20] [--requests 8]

Masks: random texts of each grammar are written token by token, and every mask is timed, with the demo's vocabulary and with one of
131,072 tokens made of pairs of its tokens. Ready: the demo model answers several requests at once; the sampler counts masks that the
other thread had finished. Writes JSON to standard output; microseconds of wall time: median, mean, 99th percentile, largest.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import types
from collections.abc import Callable
from typing import Any

import attrs
import llguidance
import numpy as np
import torch

from trencadis import LLM, SamplingParams, StructuredOutput
from trencadis.hookspecs import NOUNS, hookimpl
from trencadis.interfaces import Component, ComponentContext, Vocabulary
from trencadis.registry.startup import load_with_plugins
from trencadis.text import load_tokenizer, vocabulary_of
from trencadis_plugins.sampling.chain import standard_chain
from trencadis_plugins.sampling.grammar import Grammars
from trencadis_plugins.sampling.grammar_state import GrammarState
from trencadis_plugins.sampling.standard import StandardSampler
from trencadis_plugins.sampling.structured import Structured

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["tea", "sea", "ship"]}, "maxItems": 4},
        "where": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "number"}}},
    },
    "required": ["name", "age"],
}
GRAMMARS = {
    "json_schema": StructuredOutput.json_schema(SCHEMA),
    "json_object": StructuredOutput.json_object(),
    "regex": StructuredOutput.regex(r"([a-z]+ ){3,10}\d{2,4}"),
    "grammar": StructuredOutput.grammar('start: term ("+" term)*\nterm: /[0-9]{1,6}/ | "(" start ")"'),
}
MAX_TOKENS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--requests", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    demo = vocabulary_of(load_tokenizer("demo"))
    machine = {"machine": platform.machine(), "python": platform.python_version(), "llguidance": llguidance.__version__}
    vocabularies = {"4096": demo, "131072": paired(demo, 131_072)}
    masks = {size: masks_of(vocabulary, args.texts) for size, vocabulary in vocabularies.items()}
    print(json.dumps({**machine, "masks": masks, "ready": ready(args.requests)}, indent=2))


def paired(vocabulary: Vocabulary, size: int) -> Vocabulary:
    """Return a vocabulary with pairs of tokens after the tokens themselves; texts are encoded as before."""
    rng = np.random.default_rng(0)
    tokens = dict.fromkeys(vocabulary.tokens)
    plain = [token for i, token in enumerate(vocabulary.tokens) if i not in vocabulary.special_token_ids]
    while len(tokens) < size:
        first, second = rng.integers(0, len(plain), 2)
        tokens[plain[first] + plain[second]] = None
    return attrs.evolve(vocabulary, tokens=tuple(tokens))


def masks_of(vocabulary: Vocabulary, num_texts: int) -> dict[str, Any]:
    start = time.perf_counter()
    grammars = Grammars(lambda: vocabulary)
    found: dict[str, Any] = {"vocabulary_ms": round(1e3 * (time.perf_counter() - start), 1)}
    for name, wanted in GRAMMARS.items():
        start = time.perf_counter()
        grammars.matcher(wanted)
        compiled_ms = 1e3 * (time.perf_counter() - start)
        times = [t for seed in range(num_texts) for t in mask_times(grammars, wanted, seed)]
        found[name] = {"compile_ms": round(compiled_ms, 2), **quantiles(times)}
    return found


def mask_times(grammars: Grammars, wanted: StructuredOutput, seed: int) -> list[float]:
    """Return the microseconds from a token to the mask after it, for each token of a random text."""
    rng = np.random.default_rng(seed)
    eos = grammars.eos_token_id
    state = GrammarState(
        grammars.matcher(wanted), num_tokens=grammars.num_tokens, eos_token_id=eos, end_token_ids=(eos,)
    )
    mask, times = state.mask([]), []
    for _ in range(MAX_TOKENS):
        if mask is None:
            break
        token = int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))
        if token == eos:
            break
        start = time.perf_counter()
        mask = state.advance(token)
        times.append(1e6 * (time.perf_counter() - start))
    return times


def quantiles(values: list[float]) -> dict[str, float]:
    low, high = np.quantile(values, [0.5, 0.99])
    numbers = {"median_us": low, "mean_us": np.mean(values), "p99_us": high, "max_us": max(values)}
    return {"masks": len(values), **{name: round(float(number), 1) for name, number in numbers.items()}}


def ready(num_requests: int) -> dict[str, Any]:
    """Serve requests at once with the demo model; returns the share of masks that were ready, and steps with and without masks."""
    made: list[StandardSampler] = []

    def factory(_: Any, context: ComponentContext) -> StandardSampler:
        made.append(StandardSampler(standard_chain("vllm", vocabulary=context.vocabulary)))
        return made[-1]

    component = Component(name="watched", factory=factory, summary="Keeps the sampler.", interface_version=1)
    plugin = types.ModuleType("watching")
    plugin.samplers = hookimpl(specname=NOUNS["sampling"])(lambda: [component])  # type: ignore[attr-defined]
    overrides = {"model.path": "demo", "sampling.name": "watched", "engine.warmup": False, "observer.names": []}
    resolved, registry = load_with_plugins(environ={}, overrides=overrides, extra_plugins=[plugin])
    prompts = [f"The old man said, for the {i}th time: " for i in range(num_requests)]
    with LLM.from_config(resolved.config, registry) as llm:

        def seconds(**params: Any) -> tuple[float, int]:
            start = time.perf_counter()
            asked = SamplingParams(temperature=1.0, seed=1, max_tokens=100, **params)
            outputs = llm.generate(prompts, asked)
            return time.perf_counter() - start, sum(len(output.outputs[0].token_ids) for output in outputs)

        return {"requests": num_requests, **shares(made, seconds)}


def shares(made: list[StandardSampler], seconds: Callable[..., tuple[float, int]]) -> dict[str, Any]:
    wanted = GRAMMARS["json_object"]
    seconds(structured=wanted)
    counted = [one for sampler in made for one in sampler._chain if isinstance(one, Structured)]
    before = sum(one.num_masks for one in counted), sum(one.num_ready for one in counted)
    (with_s, with_tokens), (without_s, without_tokens) = seconds(structured=wanted), seconds(ignore_eos=True)
    num_masks = sum(one.num_masks for one in counted) - before[0]
    num_ready = sum(one.num_ready for one in counted) - before[1]
    return {
        "masks": num_masks,
        "ready_share": round(num_ready / num_masks, 4),
        "us_per_token": round(1e6 * with_s / with_tokens, 1),
        "us_per_token_free": round(1e6 * without_s / without_tokens, 1),
    }


if __name__ == "__main__":
    main()
