"""Beam search of the embedded model, against what transformers finds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from trencadis import LLM, BeamSearchParams, RequestOutput, SamplingParams
from trencadis.text import resolve_model_path

PROMPTS = ["The old man looked at the sea and", "To be, or not to be: that is", "KING RICHARD II:\nWhat says", "x"]
NUM_TOKENS = 10
PADDING = 4095


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM({"path": "demo", "dtype": "float32"}, cache={"num_blocks": 512}) as made:
        yield made


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(resolve_model_path("demo")), dtype=torch.float32).eval()

    def search(prompt: tuple[int, ...], **options: Any) -> list[tuple[tuple[int, ...], float]]:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            num_return_sequences=options["num_beams"],
            do_sample=False,
            pad_token_id=PADDING,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        texts = found.sequences[:, len(prompt) :].tolist()
        assert PADDING not in prompt
        return [
            (tuple(token for token in text if token != PADDING), score)
            for text, score in zip(texts, found.sequences_scores.tolist(), strict=True)
        ]

    return search


def check(output: RequestOutput, expected: list[tuple[tuple[int, ...], float]]) -> None:
    assert [one.token_ids for one in output.outputs] == [tokens for tokens, _ in expected]
    assert [one.score for one in output.outputs] == pytest.approx([score for _, score in expected], abs=1e-4)


CASES = list(itertools.product((2, 4), (0.0, 1.0, 2.0), (False, True, "never")))
HALF = CASES[::2]
"""Every two values of different options are together in one of them."""


@pytest.mark.slow
@pytest.mark.parametrize("cases", [HALF, pytest.param(CASES, marks=pytest.mark.nightly)], ids=["half", "all"])
@pytest.mark.parametrize("stops", [(), ("\n", ",")], ids=["to the end", "ending at every line and comma"])
def test_texts_and_scores_are_those_of_transformers(
    llm: LLM, reference: Any, stops: tuple[str, ...], cases: list[Any]
) -> None:
    ends = [llm.tokenizer.encode(stop)[0] for stop in stops]
    num_ended = 0
    for index, (width, length_penalty, early_stopping) in enumerate(cases):
        prompts = [PROMPTS[index % len(PROMPTS)], PROMPTS[(index + 1) % len(PROMPTS)]]
        options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
        params = BeamSearchParams(beam_width=width, max_tokens=NUM_TOKENS, stop_token_ids=ends, **options)
        for output in llm.beam_search(prompts, params):
            found = reference(output.prompt_token_ids, eos_token_id=[0, *ends], num_beams=width, **options)
            check(output, found)
            num_ended += sum(one.stop_reason is not None for one in output.outputs)
    assert (num_ended > 20) == bool(stops)


def test_one_beam_is_greedy_and_every_token_has_its_log_probability(llm: LLM) -> None:
    (found,) = llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=1, max_tokens=NUM_TOKENS, logprobs=1))
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=1)
    (expected,) = llm.generate(PROMPTS[0], greedy, use_progress=False)
    one, other = found.outputs[0], expected.outputs[0]
    assert (one.token_ids, one.text) == (other.token_ids, other.text)
    assert one.logprobs is not None
    assert other.logprobs is not None
    assert [entry.position for entry in one.logprobs] == [entry.position for entry in other.logprobs]
    assert [entry.logprob for entry in one.logprobs] == pytest.approx(
        [entry.logprob for entry in other.logprobs], abs=1e-4
    )
    assert one.score == pytest.approx(sum(entry.logprob for entry in one.logprobs) / NUM_TOKENS)


def test_a_wide_search_takes_its_beginnings_from_the_prefix_cache(llm: LLM) -> None:
    before = llm.totals()
    llm.beam_search(PROMPTS[0] * 8, BeamSearchParams(beam_width=4, max_tokens=40))
    after = llm.totals()
    cached = after["num_prompt_tokens_cached"] - before["num_prompt_tokens_cached"]
    admitted = after["num_prompt_tokens_admitted"] - before["num_prompt_tokens_admitted"]
    computed_each = (admitted - cached) / (4 * 40)
    assert computed_each < 16  # a block


def test_best_of_is_the_likeliest_of_what_its_seeds_give_one_by_one(llm: LLM) -> None:
    shared = {"max_tokens": 8, "logprobs": 0, "temperature": 1.0}
    alone = [
        llm.generate(PROMPTS[0], SamplingParams(seed=30 + i, **shared), use_progress=False)[0].outputs[0]
        for i in range(5)
    ]
    assert len({one.token_ids for one in alone}) == 5
    means = [sum(entry.logprob for entry in one.logprobs or ()) / len(one.token_ids) for one in alone]
    (chosen,) = llm.generate(PROMPTS[0], SamplingParams(seed=30, n=2, best_of=5, **shared), use_progress=False)
    order = sorted(range(5), key=lambda i: -means[i])[:2]
    assert [one.token_ids for one in chosen.outputs] == [alone[i].token_ids for i in order]
    assert [one.score for one in chosen.outputs] == pytest.approx([means[i] for i in order], abs=1e-4)
