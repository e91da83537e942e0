from __future__ import annotations

from typing import Any

import msgspec
import pytest

from trencadis.engine.sampling.fingerprint import EngineFingerprint
from trencadis.records import Request, SamplingParams, StructuredOutput

HERE = EngineFingerprint(b"same", lambda params: params.mirostat_mode == 0)
THERE = EngineFingerprint(b"same", lambda params: True)


def request(**params: Any) -> Request:
    return Request(request_id="r", prompt_token_ids=(1, 2, 3), params=SamplingParams(**params))


def carried(**params: Any) -> SamplingParams:
    found = THERE.unpack(HERE.pack(request(**params)))
    assert found is not None
    return found


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 2**63 - 1},
        {"logit_bias": {3: 1.5, 70000: -100.0}, "allowed_token_ids": (1, 2), "bad_token_ids": (7,)},
        {"bad_words_ids": ((1, 2), (3,)), "stop_token_ids": (9,), "ignore_eos": True, "logprobs": 5},
        {"repetition_penalty": 1.2, "frequency_penalty": -1.0, "presence_penalty": 0.5, "no_repeat_ngram_size": 3},
        {"dry_multiplier": 0.8, "dry_breaker_token_ids": (1,), "xtc_probability": 0.5, "typical_p": 0.5},
        {"structured": StructuredOutput.json_schema({"type": "object"})},
        {"structured": StructuredOutput.choice(["a", "b"])},
        {"logits_processors": {"mine": {"strength": 2, "words": ["a"]}}},
    ],
)
def test_everything_that_has_a_say_in_the_token_arrives(params: dict[str, Any]) -> None:
    assert carried(**params, max_tokens=40) == SamplingParams(**params, max_tokens=1)


def test_what_becomes_of_the_text_stays_at_home() -> None:
    found = carried(max_tokens=None, stop=("end",), skip_special_tokens=False, max_draft_tokens=3, n=4, best_of=5)
    assert found == SamplingParams(max_tokens=1)


@pytest.mark.parametrize(("wanted", "least"), [(0, 0), (1, 1), (30, 1)])
def test_end_is_masked_as_it_would_be_at_home(wanted: int, least: int) -> None:
    assert carried(min_tokens=wanted, max_tokens=40).min_tokens == least


@pytest.mark.parametrize(
    "params",
    [
        {"mirostat_mode": 2},
        {"prompt_logprobs": 1},
        {"logits_processors": {"mine": {"text": "x" * (1 << 20)}}},
    ],
)
def test_what_cannot_be_told_is_not(params: dict[str, Any]) -> None:
    assert HERE.pack(request(**params)) == b""


def test_engine_that_chooses_in_another_way_does_not_choose() -> None:
    assert EngineFingerprint(b"other", lambda _: True).unpack(HERE.pack(request())) is None


@pytest.mark.parametrize(
    "terms",
    [
        b"",
        b"x",
        msgspec.msgpack.encode([b"same"]),
        msgspec.msgpack.encode([b"same", {"temperature": -1}]),
        msgspec.msgpack.encode([b"same", {"no_such": 1}]),
        msgspec.msgpack.encode([b"same", {"max_tokens": 10**6}]),
        msgspec.msgpack.encode([b"same", {"min_tokens": "many"}]),
        msgspec.msgpack.encode([b"same", {"structured": {"kind": "poem"}}]),
        msgspec.msgpack.encode([b"same", {"logit_bias": [1]}]),
        msgspec.msgpack.encode([b"same", {"stop_token_ids": 5}]),
    ],
)
def test_nonsense_is_no_terms(terms: bytes) -> None:
    assert THERE.unpack(terms) is None
