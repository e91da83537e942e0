"""Structured output through whole engines: with drafts, preemption, prefix caching, several choices, stop strings, other layouts.

Each kind of grammar, and what is refused: ``tests/plugins/trencadis_plugins/sampling``.
"""

from __future__ import annotations

import json
import random
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.tokenizer_zoo import ZOO
from trencadis import LLM, SamplingParams, StructuredOutput
from trencadis.hookspecs import NOUNS, hookimpl
from trencadis.interfaces import Component
from trencadis.records import FinishReason
from trencadis.registry.startup import load_with_plugins
from trencadis_testing.doubles import ScriptedSpeculator

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "likes": {"type": "array", "items": {"enum": ["tea", "the sea", "é"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
WANTED = (
    StructuredOutput.json_schema(SCHEMA),
    StructuredOutput.regex(r"[A-Z][a-z ]{3,20}\. [0-9]{3}"),
    StructuredOutput.choice(["the sea", "the old man", "neither"]),
    StructuredOutput.grammar('root ::= "(" root ")" | [a-z]{1,8}'),
)
PROMPTS = [f"{'The old man looked at the sea and said: ' * 3}{i}" for i in range(3)]
JOBS = [
    (prompt, SamplingParams(structured=one, temperature=temperature, seed=seed, max_tokens=250))
    for seed, (prompt, one) in enumerate((prompt, one) for prompt in PROMPTS for one in WANTED)
    for temperature in (0.0, 1.0)
]


def open_llm(speculator: ScriptedSpeculator | None = None, **tables: Any) -> LLM:
    plugins = [] if speculator is None else [scripted_plugin(speculator)]
    overrides: dict[str, Any] = {
        "model.path": "demo",
        "model.dtype": "float32",
        "engine.warmup": False,
        "engine.max_num_seqs": 16,
        "cache.num_blocks": 1024,
        "observer.names": [],
        **{name.replace("__", "."): value for name, value in tables.items()},
    }
    if speculator is not None:
        overrides["speculation.name"] = "scripted"
    resolved, registry = load_with_plugins(environ={}, overrides=overrides, extra_plugins=plugins)
    return LLM.from_config(resolved.config, registry)


def scripted_plugin(speculator: ScriptedSpeculator) -> types.ModuleType:
    plugin = types.ModuleType("house")
    component = Component(
        name="scripted", factory=lambda config, context: speculator, summary="Scripted.", interface_version=1
    )
    plugin.scripted = hookimpl(specname=NOUNS["speculation"])(lambda: [component])  # type: ignore[attr-defined]
    return plugin


def texts_of(
    llm: LLM, jobs: list[tuple[str, SamplingParams]]
) -> list[tuple[str, tuple[int, ...], FinishReason | None]]:
    outputs = llm.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
    return [(one.text, tuple(one.token_ids), one.finish_reason) for output in outputs for one in output.outputs]


def check(wanted: StructuredOutput, text: str) -> None:
    match wanted.kind:
        case "json_schema":
            value = json.loads(text)
            assert set(value) == {"name", "age", "likes"}
            assert len(value["name"]) <= 12
            assert 0 <= value["age"] <= 99
            assert set(value["likes"]) <= {"tea", "the sea", "é"}
        case "regex":
            assert re.fullmatch(wanted.text, text)
        case "choice":
            assert text in wanted.choices
        case _:
            inner = text.strip("()")
            assert re.fullmatch("[a-z]{1,8}", inner)
            depth = (len(text) - len(inner)) // 2
            assert text == "(" * depth + inner + ")" * depth


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm() as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[tuple[str, tuple[int, ...], FinishReason | None]]:
    return texts_of(llm, JOBS)


def test_what_ends_by_itself_is_of_the_kind_and_what_is_cut_is_its_beginning(llm: LLM, expected: Any) -> None:
    ended = [
        (params, text)
        for (_, params), (text, _, reason) in zip(JOBS, expected, strict=True)
        if reason is FinishReason.STOP
    ]
    assert len(ended) > len(JOBS) * 0.8
    for params, text in ended:
        assert params.structured is not None
        check(params.structured, text)
    whole = texts_of(llm, JOBS[:2])
    cut = [
        (prompt, SamplingParams(structured=p.structured, temperature=p.temperature, seed=p.seed, max_tokens=5))
        for prompt, p in JOBS[:2]
    ]
    for (text, ids, reason), (longer, more, _) in zip(texts_of(llm, cut), whole, strict=True):
        assert reason is FinishReason.LENGTH
        assert longer.startswith(text)
        assert more[: len(ids)] == ids


def test_text_with_drafts_is_the_text_without_and_takes_fewer_steps(expected: Any) -> None:
    """Drafts are now and then wrong, and now and then what the grammar forbids."""
    known = {ids for _, ids, _ in expected}
    rng = random.Random(1)

    def draft(tokens: Any) -> list[int]:
        output = tuple(int(token) for token in tokens)
        for ids in known:
            for length in range(min(len(ids), len(output)), 3, -1):
                if output[-length:] == ids[:length]:
                    guess = [*ids[length : length + 3]]
                    return [token if rng.random() < 0.8 else rng.randrange(4096) for token in guess]
        return [rng.randrange(4096) for _ in range(rng.randrange(4))]

    speculator = ScriptedSpeculator(draft)
    with open_llm(speculator) as drafting:
        assert texts_of(drafting, JOBS) == expected
    assert speculator.num_drafted > speculator.num_accepted > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    "tables",
    [
        {"cache__num_blocks": 21, "cache__prefix_caching": False, "model__max_model_len": 320},
        {"cache__prefix_caching": False, "engine__async_scheduling": False, "engine__max_num_batched_tokens": 32},
        {"backend__torch__layout": "padded", "bucketing__name": "exponential", "model__max_model_len": 512},
    ],
    ids=["preemption", "no caching, no overlap", "padded"],
)
def test_text_does_not_depend_on_how_the_engine_is_set_up(tables: dict[str, Any], expected: Any) -> None:
    jobs = JOBS[:8]
    with open_llm(**tables) as other:
        assert texts_of(other, jobs) == expected[: len(jobs)]
        assert texts_of(other, jobs) == expected[: len(jobs)]  # all at once, now that their grammars are compiled
        if tables.get("cache__num_blocks"):
            assert other._frontend.engine.engine.totals.num_preempted  # type: ignore[attr-defined]


def test_choices_are_several_texts_each_of_the_kind(llm: LLM) -> None:
    params = SamplingParams(structured=WANTED[1], n=5, temperature=1.5, seed=3, max_tokens=200)
    (output,) = llm.generate(PROMPTS[:1], params)
    assert len({one.text for one in output.outputs}) > 1
    for one in output.outputs:
        check(WANTED[1], one.text)


def test_a_stop_string_cuts_the_text_where_it_occurs(llm: LLM) -> None:
    params = SamplingParams(structured=WANTED[1], stop=". ", temperature=0.0, max_tokens=200)
    (output,) = llm.chat([{"role": "user", "content": "Say something."}], params)
    assert output.outputs[0].finish_reason is FinishReason.STOP
    assert re.fullmatch("[A-Z][a-z ]{3,20}", output.outputs[0].text)


@pytest.mark.representatives(4)
@pytest.mark.parametrize("name", ["llama2", "gpt2_prefix_space", "lowercase", "nfkc"])
def test_a_tokenizer_that_changes_a_prompt_writes_the_text_that_was_asked_for(name: str, tmp_path: Path) -> None:
    """It puts a space before a prompt, or reads it in lower case or another form: what is forced is written as it is."""
    wanted = [
        StructuredOutput.choice(["abc"]),
        StructuredOutput.choice(["Abc ﬁ"]),
        StructuredOutput.json_schema({"enum": ["Ann", "ÉA"]}),
        StructuredOutput.regex("The sea: [A-C]{2}"),
    ]
    with open_llm(model__tokenizer=ZOO[name].make(tmp_path)) as other:
        jobs = [("the sea", SamplingParams(structured=one, temperature=2.0, seed=1, max_tokens=60)) for one in wanted]
        one, other_form, enum, regex = [text for text, _, _ in texts_of(other, jobs)]
    assert one == "abc"
    assert other_form == "Abc ﬁ"
    assert json.loads(enum) in ("Ann", "ÉA")
    assert re.fullmatch("The sea: [A-C]{2}", regex)


def test_a_grammar_that_becomes_too_complex_ends_its_own_text_alone(llm: LLM, expected: Any) -> None:
    totals = llm._frontend.engine.engine.totals  # type: ignore[attr-defined]
    before = totals.num_failed_steps
    poison = (PROMPTS[0], SamplingParams(structured=StructuredOutput.regex("a{1000000}"), max_tokens=50))
    found = texts_of(llm, [poison, *JOBS[:4], poison])
    assert found[1:5] == expected[:4]
    assert [reason for _, _, reason in (found[0], found[5])] == [FinishReason.INVALID] * 2
    assert totals.num_failed_steps == before
