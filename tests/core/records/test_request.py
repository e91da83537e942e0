from __future__ import annotations

import math
from typing import get_type_hints

import attrs
import pytest

from trencadis.errors import InvalidRequestError
from trencadis.records import ListedTerms, Request, RequestTerms, SamplingParams, TermKeywords


def test_a_request_asks_for_nothing_special_by_itself() -> None:
    request = Request(request_id="a", prompt_token_ids=[1, 2], tenant="t")
    assert request.prompt_token_ids == (1, 2)
    assert (request.cache_salt, request.weight) == ("t", None)
    assert request.ttft_target_s == request.tpot_target_s == math.inf


@pytest.mark.parametrize("field", ["weight", "ttft_target_s", "tpot_target_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_weights_and_targets_are_above_zero(field: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=field):
        Request(request_id="a", prompt_token_ids=(1,), **{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 1.5),
        ("priority", True),
        ("priority", 2**53),
        ("tenant", None),
        ("cache_salt", 5),
        ("weight", "2"),
        ("weight", True),
        ("ttft_target_s", None),
        ("tpot_target_s", "1"),
    ],
)
def test_terms_of_another_type_are_refused_by_name_and_value(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"{field} = {value!r} is impossible"):
        RequestTerms(**{field: value})


def test_a_request_has_every_term_and_the_tenant_for_a_salt_that_nobody_gave() -> None:
    terms = RequestTerms(priority=-2, tenant="t", weight=2.0, ttft_target_s=0.5, tpot_target_s=0.1, cache_salt="s")
    request = Request.on_terms(terms, request_id="a", prompt_token_ids=[1, 2], params=SamplingParams(max_tokens=3))
    assert (request.request_id, request.prompt_token_ids, request.params.max_tokens) == ("a", (1, 2), 3)
    assert [getattr(request, field.name) for field in attrs.fields(RequestTerms)] == list(attrs.astuple(terms))
    plain = Request.on_terms(RequestTerms(tenant="t"), request_id="a", prompt_token_ids=[1], params=SamplingParams())
    assert plain.cache_salt == "t"


def test_transfer_parameters_are_a_copy_that_nobody_changes() -> None:
    given = {"a": [1, {"b": None}], "c": (1, 2)}
    terms = RequestTerms(transfer_params=given)
    given["a"].append(5)  # type: ignore[union-attr]
    assert terms.transfer_params == {"a": [1, {"b": None}], "c": [1, 2]}
    assert hash(terms) == hash(RequestTerms())
    assert "transfer" not in repr(terms)


def _nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "given",
    ["text", 5, [1], {"a": object()}, {"a": math.nan}, {"a": b"bytes"}, {"a": "x" * 65536}, {"a": _nested(100_000)}],
    ids=["text", "number", "list", "object", "nan", "bytes", "long", "deep"],
)
def test_transfer_parameters_that_no_message_can_carry_are_refused(given: object) -> None:
    with pytest.raises(InvalidRequestError, match="transfer_params"):
        RequestTerms(transfer_params=given)


def test_keyword_arguments_are_the_fields_with_their_types() -> None:
    fields, hints = attrs.fields(RequestTerms), get_type_hints(RequestTerms)
    assert get_type_hints(TermKeywords) == {field.name: hints[field.name] for field in fields}
    assert list(get_type_hints(ListedTerms)) == [field.metadata["listed"] for field in fields]
