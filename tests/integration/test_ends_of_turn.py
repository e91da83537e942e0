"""Checkpoints whose config names another end of a text than their tokenizer, as fine-tuned ones often do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trencadis import LLM, BeamSearchParams, SamplingParams
from trencadis.records import FinishReason, StructuredOutput
from trencadis.text import resolve_model_path

CHAT = [{"role": "user", "content": "Where is the king?"}]
MANY = SamplingParams(max_tokens=200, temperature=0.0)
OTHER = 7
"""A token of text that the changed files call the end."""


def changed(tmp_path: Path, *, tokenizer_end: str = "<|end|>", template: str = "") -> Path:
    """Return a copy of the demo model whose files name an end that its answers do not have."""
    place = tmp_path / "model"
    shutil.copytree(resolve_model_path("demo"), place)
    changes: dict[str, dict[str, Any]] = {
        "config.json": {"eos_token_id": OTHER},
        "generation_config.json": {"eos_token_id": OTHER},
        "tokenizer_config.json": {"eos_token": tokenizer_end},
    }
    for name, values in changes.items():
        told = json.loads((place / name).read_text())
        (place / name).write_text(json.dumps({**told, **values}))
    if template:
        (place / "chat_template.jinja").write_text(template)
    return place


@pytest.fixture(scope="module")
def answer() -> str:
    """What the demo model answers, which ends with its own end."""
    with LLM("demo") as llm:
        (output,) = llm.chat(CHAT, MANY)
    assert output.outputs[0].finish_reason is FinishReason.STOP
    assert output.outputs[0].stop_reason is None
    return output.outputs[0].text


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(changed(tmp_path_factory.mktemp("ends")))) as llm:
        yield llm


def test_the_tokenizers_own_end_ends_an_answer(llm: LLM, answer: str) -> None:
    (output,) = llm.chat(CHAT, MANY)
    (one,) = output.outputs
    assert (one.text, one.finish_reason, one.stop_reason) == (answer, FinishReason.STOP, None)
    assert one.token_ids[-1] == 0


def test_it_is_masked_until_min_tokens_and_ignored_with_ignore_eos(llm: LLM, answer: str) -> None:
    num_tokens = len(llm.chat(CHAT, MANY)[0].outputs[0].token_ids)
    least = num_tokens + 10
    (longer,) = llm.chat(CHAT, SamplingParams(max_tokens=200, min_tokens=least, temperature=0.0))[0].outputs
    assert len(longer.token_ids) > least
    assert 0 not in longer.token_ids[:least]
    params = SamplingParams(max_tokens=num_tokens + 20, ignore_eos=True, temperature=0.0)
    (whole,) = llm.chat(CHAT, params)[0].outputs
    assert (len(whole.token_ids), whole.finish_reason) == (num_tokens + 20, FinishReason.LENGTH)


def test_who_names_it_reads_it_as_the_reason_and_structured_output_and_beams_may_end_with_it(llm: LLM) -> None:
    (one,) = llm.chat(CHAT, SamplingParams(max_tokens=200, temperature=0.0, stop_token_ids=(0,)))[0].outputs
    assert one.stop_reason == 0
    wanted = StructuredOutput.choice(["yes", "no"])
    (one,) = llm.chat(CHAT, SamplingParams(max_tokens=20, temperature=0.0, structured=wanted))[0].outputs
    assert one.text in ("yes", "no")
    assert (one.finish_reason, one.token_ids[-1] in (0, OTHER)) == (FinishReason.STOP, True)
    prompt = llm.tokenizer.encode("<|user|>Where is the king?<|end|><|assistant|>")
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=60))
    ended = [one for one in output.outputs if one.finish_reason is FinishReason.STOP]
    assert all(one.token_ids.index(0) == len(one.token_ids) - 1 for one in output.outputs if 0 in one.token_ids)
    assert all(one.stop_reason is None for one in ended)


def test_the_end_that_only_the_template_shows_ends_an_answer_of_an_engine_in_a_process(
    tmp_path: Path, answer: str
) -> None:
    place = changed(tmp_path, tokenizer_end="<|system|>", template=(
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}{{ '<|assistant|>' }}"
    ))  # fmt: skip
    with LLM(str(place), engine={"placement": "process"}) as llm:
        (one,) = llm.chat(CHAT, MANY)[0].outputs
        assert (one.text, one.finish_reason, one.stop_reason) == (answer, FinishReason.STOP, None)
