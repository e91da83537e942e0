"""Whatever a plugin does, others' texts are the same, the culprit is named, and the engine goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from support.strategies.hostile_package import ACTS, ANSWER_MODES, SLEEP_S
from support.strategies.hostile_policies import house
from trencadis.client.llm import LLM
from trencadis.errors import EngineEndedError
from trencadis.records import FinishReason, SamplingParams
from trencadis_testing.fakes import fake_text

VOCAB_SIZE = 4096
PROMPTS = [[7 + number, *range(20, 20 + 5 * number), 9] for number in range(8)]
PARAMS = [SamplingParams(max_tokens=6 + number, ignore_eos=True) for number in range(8)]
TEXTS = [
    tuple(fake_text(prompt, params.max_tokens or 0, vocab_size=VOCAB_SIZE))
    for prompt, params in zip(PROMPTS, PARAMS, strict=True)
]
ANSWERS = {
    "scheduling": ["order", "split", "chunk", "victim", "admit", "admit_tenant"],
    "eviction": ["victims"],
    "bucketing": ["bucket_for"],
    "observer": ["metrics"],
    "speculation": ["propose"],
    "draft_length": ["choose"],
    "kv_policy": ["admits_save", "admits_load"],
    "kv_codec": ["encode", "decode"],
    "kv_connector": [
        *(f"scheduler.{name}" for name in ("lookup", "on_finished", "take_message", "metrics")),
        *(f"worker.{name}" for name in ("poll", "end_step")),
    ],
}
"""Methods whose answers the engine uses."""

TELLS = {
    "scheduling": ["on_added", "on_finished"],
    "eviction": ["on_use", "on_free", "on_hit", "forget"],
    "bucketing": ["observe"],
    "observer": ["on_step", "on_request", "close"],
    "speculation": ["on_verified", "on_finished", "close"],
    "draft_length": ["on_verified", "on_finished"],
    "kv_connector": [
        *(f"scheduler.{name}" for name in ("on_allocated", "on_computed", "on_report", "close")),
        *(f"worker.{name}" for name in ("begin_step", "close")),
    ],
}
"""Methods that are told something, and answer nothing."""

FALLBACKS = {"scheduling": "fcfs", "eviction": "lru", "bucketing": "exact", "draft_length": "fixed"}
DRAFTS = {"speculation": {"name": "support.strategies.hostile_package:honest_speculation"}}
NEEDS: dict[str, dict[str, Any]] = {
    "draft_length": DRAFTS,
    "kv_policy": {"kv_connector": {"name": "host_offload"}},
    "kv_codec": {"kv_connector": {"name": "host_offload"}},
}


def _cases() -> Iterator[Any]:
    for noun, methods in ANSWERS.items():
        cases = [(method, mode) for method in methods for mode in ("raise", *ANSWER_MODES, "mutate")]
        cases += [(method, mode) for method in TELLS.get(noun, ()) for mode in ("raise", "too_many", "mutate")]
        for method, mode in (*cases, (methods[0], "leak"), (methods[0], "exit")):
            if (method, mode) == ("decode", "mutate"):
                continue  # what a codec writes there is its answer, which only its conformance suite can judge
            # Every method that raises, and one that does everything; the other combinations take a minute.
            marks = () if mode == "raise" or (noun, method) == ("eviction", "victims") else pytest.mark.slow
            yield pytest.param(noun, method, mode, id=f"{noun}-{method}-{mode}", marks=marks)


def _tables(noun: str, method: str, mode: str) -> dict[str, Any]:
    table: dict[str, Any] = {
        "name": f"support.strategies.hostile_package:{noun}",
        "options": {"method": method, "mode": mode},
    }
    if not method.endswith("close"):
        table["options"]["first"] = 1
    if noun == "observer":
        return {noun: {"names": [table["name"]], "options": table["options"]}}
    if noun in FALLBACKS:
        table["fallback"] = FALLBACKS[noun]
    return {**NEEDS.get(noun, {}), noun: table}


@pytest.mark.representatives(2, ci=12)
@pytest.mark.parametrize(("noun", "method", "mode"), list(_cases()))
def test_texts_are_the_same_and_the_engine_goes_on(
    noun: str, method: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    ACTS.clear()
    tables = _tables(noun, method, mode)
    with LLM.from_config(*house(cache={"num_blocks": 40}, **tables)) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, PARAMS)
            assert [one.outputs[0].token_ids for one in outputs] == TEXTS, [one.error for one in outputs]
            assert {one.outputs[0].finish_reason for one in outputs} == {FinishReason.LENGTH}
        llm.totals()
    if mode == "raise" and ACTS:
        assert f"support.strategies.hostile_package:{noun}" in caplog.text


SLOW = {
    "scheduling": "order",
    "eviction": "victims",
    "bucketing": "bucket_for",
    "observer": "on_step",
    "speculation": "propose",
    "draft_length": "choose",
    "kv_policy": "admits_load",
    "kv_connector": "scheduler.lookup",
}
BUDGETS = {f"{noun}_ms": SLEEP_S * 50 for noun in SLOW if noun != "observer"}
"""A twentieth of what a call sleeps: one such call is enough, though what its thread waits for a processor is not charged."""


@pytest.mark.parametrize(("noun", "method"), SLOW.items(), ids=list(SLOW))
def test_what_takes_too_long_is_named_and_replaced(noun: str, method: str, caplog: pytest.LogCaptureFixture) -> None:
    ACTS.clear()
    with LLM.from_config(*house(cache={"num_blocks": 40}, budget=BUDGETS, **_tables(noun, method, "sleep"))) as llm:
        num_rounds = 0
        while num_rounds < 2 or (not ACTS and num_rounds < 100):  # blocks are stored beside the steps
            num_rounds += 1
            outputs = llm.generate(PROMPTS, PARAMS)
            assert [one.outputs[0].token_ids for one in outputs] == TEXTS, [one.error for one in outputs]
    # The first four slow calls of a speculator are forgiven, and of an observer one.
    assert len(ACTS) == {"speculation": 5, "observer": 2}.get(noun, 1)
    assert f"support.strategies.hostile_package:{noun}" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["os_exit", "loop"])
@pytest.mark.parametrize(
    ("noun", "method"), [("scheduling", "order"), pytest.param("observer", "on_step", marks=pytest.mark.slow)]
)
def test_what_ends_or_holds_up_the_process_is_named(noun: str, method: str, mode: str) -> None:
    engine = {"placement": "process", "watchdog_s": 2.0}
    config = house(cache={"num_blocks": 40}, engine=engine, **_tables(noun, method, mode))
    with (
        LLM.from_config(*config) as llm,
        pytest.raises(EngineEndedError, match=f"support.strategies.hostile_package:{noun}"),
    ):
        llm.generate(PROMPTS, PARAMS)
