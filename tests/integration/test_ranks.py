"""Whole engines over several ranks, in threads of this process, next to engines of one."""

from __future__ import annotations

import pytest
import transformers  # noqa: F401 - its lazy imports are not made for several threads at once

from trencadis import LLM, SamplingParams

SHARED = "The old man looked at the sea and the sea looked at the old man, and the old man said to the sea: "
PROMPTS = [SHARED + "who", SHARED + "what is it", "Alice was beginning to get very tired of", "x"]


def generate(params: SamplingParams, *, size: int = 1, backend: dict[str, object] | None = None, **tables):
    """Return tokens and log-probabilities; prompts share a prefix, small steps cut them, and the second time they are cached."""
    own = {"torch": backend or {}}
    if size > 1:
        own = {"name": "support.backends.rank_threads:ranked_backend", "options": {"size": size, **(backend or {})}}
    with LLM("demo", backend=own, cache={"num_blocks": 256}, engine={"max_num_batched_tokens": 24}, **tables) as llm:
        first = llm.generate(PROMPTS, params, use_progress=False)
        again = llm.generate(PROMPTS, params, use_progress=False)
    texts = [[list(output.outputs[0].token_ids) for output in outputs] for outputs in (first, again)]
    assert texts[0] == texts[1]
    return texts[0], first


GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("backend", [{"layout": "ragged"}, {"layout": "padded", "max_prefill_batch_size": 2}], ids=str)
@pytest.mark.parametrize(
    "speculation",
    [
        {},
        {"speculation": {"name": "ngram"}, "draft_length": {"name": "fixed"}},
        {"speculation": {"name": "suffix"}, "draft_length": {"name": "fixed"}},
    ],
    ids=str,
)
@pytest.mark.representatives(1)
def test_two_ranks_write_the_text_of_one(backend, speculation):
    assert generate(GREEDY, size=2, backend=backend, **speculation)[0] == generate(GREEDY, backend=backend)[0]


def test_random_texts_and_their_scores_are_those_of_one_rank():
    params = SamplingParams(
        temperature=0.7, top_p=0.9, seed=5, max_tokens=16, logprobs=2, ignore_eos=True, presence_penalty=0.3
    )
    (found, ranked), (expected, alone) = generate(params, size=2), generate(params)
    assert found == expected
    for one, other in zip(ranked, alone, strict=True):
        for ours, theirs in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert (ours.token_id, ours.rank, ours.top_token_ids) == (
                theirs.token_id,
                theirs.rank,
                theirs.top_token_ids,
            )
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def test_a_grammar_holds_on_every_rank():
    pytest.importorskip("llguidance")
    params = SamplingParams(
        temperature=0, max_tokens=12, structured={"kind": "regex", "text": "(one|two|three) (cats|dogs)"}
    )
    assert generate(params, size=2)[0] == generate(params)[0]
