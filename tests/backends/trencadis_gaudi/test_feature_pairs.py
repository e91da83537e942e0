"""Every two features together, on a fixed trace: nothing is compiled after the warm-up, no graph breaks, and every request is served.

Cases are generated so that every two values of different axes meet in one of them; the slow tier runs some of them. Prefills are chunked
in all of them: prompts are longer than ``max_num_batched_tokens``.
"""

from __future__ import annotations

import pytest

from support.backends import gaudi_engines, tiny_models
from support.pairwise import pairwise
from trencadis.errors import ConfigValueError
from trencadis.records import EmbeddingRequest, Request, SamplingParams, StructuredOutput

AXES = {
    "mode": ("lazy", "compile"),
    "layout": ("gathered", "contiguous", "merged", "unified"),
    "prefix_caching": ("on", "off"),
    "speculation": ("none", "ngram", "draft_model"),
    "blocks": ("plenty", "recompute", "swap"),
    "prompt_logprobs": ("on", "off"),
    "embeddings": ("on", "off"),
    "connector": ("none", "host_offload"),
    "requests": ("greedy", "mixed", "structured"),
}
REFUSED = {
    "moved blocks and a connector": (
        {"contiguous": True, "defragmenter": {"enabled": "on"}, "tables": {"kv_connector": {"name": "host_offload"}}},
        "so they cannot move",
    ),
    "ranges and unified passes": ({"layout": "unified", "strategy": "unified", "contiguous": True}, "contiguous"),
    "merged and unified passes": (
        {"layout": "unified", "strategy": "unified", "merged_prefill": True, "max_prefill_batch_size": 2},
        "merged_prefill",
    ),
    "trees of drafts": (
        {
            "tables": {
                "speculation": {"name": "draft_model", "draft_model": {"tree": "top_k"}},
                "draft_length": {"name": "fixed"},
            }
        },
        "tree",
    ),
    "a graph budget and torch.compile": ({"mode": "compile", "capture": "budgeted"}, "lazy mode only"),
}
"""Features that are refused together at the start, with words of the reason."""

CASES = pairwise(AXES)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A tiny model with a tokenizer, a character for each token, so that structured output has texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tiny_models.save_model("llama", tmp_path_factory.mktemp("models"))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: tiny_models.VOCAB_SIZE]
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=letters[2]).save_pretrained(path)
    return path


def options_of(case, path):
    speculation = {"name": case["speculation"]}
    if case["speculation"] == "ngram":
        speculation["ngram"] = {"max_draft_tokens": 2, "min_match": 1}
    elif case["speculation"] == "draft_model":
        speculation["draft_model"] = {"model": str(path), "max_draft_tokens": 2, "tokenizer": "same"}
    return {
        "mode": case["mode"],
        "strategy_options": None if case["layout"] == "unified" else {"limit": 1},
        "prefix_caching": case["prefix_caching"] == "on",
        "preemption": "swap" if case["blocks"] == "swap" else "recompute",
        "num_blocks": 24 if case["blocks"] == "plenty" else 9,
        "prompt_logprobs": case["prompt_logprobs"] == "on",
        "embeddings": case["embeddings"] == "on",
        "emulated_frozen": True,
        "tables": {
            "speculation": speculation,
            "draft_length": {"name": "fixed"},
            "kv_connector": {"name": case["connector"]},
            # A shared machine may be slow; speculation must not go off.
            "budget": {"speculation_ms": 0.0},
        },
        **gaudi_engines.LAYOUTS[case["layout"]],
    }


def serve_trace(engine, case):
    if case["embeddings"] == "on":
        for length in (3, 20, 70):
            engine.take(EmbeddingRequest(request_id=f"text {length}", token_ids=tuple(tiny_models.prompt(length))))
    if case["requests"] == "structured":
        params = SamplingParams(max_tokens=9, structured=StructuredOutput.regex("[A-D]{2,4};[3-9]"), logprobs=2)
        for index in range(3):
            prompt = tuple(tiny_models.prompt(10 + 20 * index))
            engine.add(Request(request_id=f"structured {index}", prompt_token_ids=prompt, params=params))
    return gaudi_engines.serve(
        engine,
        11,
        num_requests=8,
        greedy=case["requests"] == "greedy",
        scores_prompts=case["prompt_logprobs"] == "on",
    )


@pytest.mark.representatives(1)
@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[12], CASES[1], CASES[0], CASES[6]], ids=lambda case: "-".join(case.values()))
def test_representatives_of_every_pair_compile_nothing_and_break_no_graph(model_path, case, caplog):
    engine = gaudi_engines.open_engine(model_path, **options_of(case, model_path))
    try:
        backend = engine._executor._rank.backend
        gaudi_engines.tokens(serve_trace(engine, case))
        totals = engine.totals
        assert totals.num_compilations == totals.num_unprepared == totals.num_failed_steps == 0
        assert totals.num_drafters_quarantined == totals.num_swap_fallbacks == 0
        assert backend.watch.num_recompilations == 0
        assert (backend.habana.dynamo.num_graph_breaks, backend.habana.dynamo.num_limit_hits) == (0, 0)
    finally:
        engine.close()
    # A connector that raises costs no request.
    assert not [text for text in caplog.messages if "failed (raised)" in text]


@pytest.mark.parametrize("name", REFUSED)
def test_features_that_cannot_go_together_are_refused_at_the_start(model_path, name):
    options, words = REFUSED[name]
    with pytest.raises(ConfigValueError, match=words):
        gaudi_engines.open_engine(model_path, **{"mode": "eager", **options})
