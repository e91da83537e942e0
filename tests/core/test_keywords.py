from __future__ import annotations

import inspect
import pickle
from typing import Any

import attrs
import pytest

from trencadis.errors import InvalidRequestError
from trencadis.keywords import suggesting
from trencadis.records import BeamSearchParams, RequestTerms, SamplingParams, StructuredOutput


@pytest.mark.parametrize(
    ("record", "given", "meant"),
    [
        (SamplingParams, "temprature", "temperature"),
        (SamplingParams, "max_new_tokens", "max_tokens"),
        (SamplingParams, "guided_decoding", "structured"),
        (BeamSearchParams, "num_beams", "beam_width"),
        (BeamSearchParams, "lenght_penalty", "length_penalty"),
        (RequestTerms, "prioritty", "priority"),
        (StructuredOutput, "knd", "kind"),
    ],
)
def test_an_unknown_keyword_names_the_one_that_is_meant(record: Any, given: str, meant: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        record(**{given: 1})
    assert str(caught.value) == f'{record.__name__}({given}=...): there is no such parameter. Did you mean "{meant}"?'
    assert caught.value.field == given


def test_a_keyword_like_none_lists_them_all() -> None:
    with pytest.raises(InvalidRequestError, match=r"There are: n, best_of, temperature, "):
        SamplingParams(zebra=1)  # type: ignore[call-arg]


def test_the_record_stays_what_it_was() -> None:
    assert list(inspect.signature(SamplingParams).parameters)[:2] == ["n", "best_of"]
    assert pickle.loads(pickle.dumps(SamplingParams(n=2))) == SamplingParams(n=2)
    assert attrs.evolve(SamplingParams(n=2), temperature=0.5).n == 2


def test_other_faults_of_types_are_raised_as_they_are() -> None:
    @suggesting
    @attrs.frozen(kw_only=True)
    class Needy:
        needed: int

    with pytest.raises(TypeError, match="missing 1 required"):
        Needy()  # type: ignore[call-arg]
