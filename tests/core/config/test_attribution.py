from __future__ import annotations

import attrs
import pytest
from attrs.validators import ge, in_, instance_of, le, max_len, optional

from trencadis.config.attribution import culprit, demand, reason


@attrs.frozen(kw_only=True)
class Sample:
    low: int = attrs.field(default=0, validator=ge(0))
    high: int = attrs.field(default=9, converter=int)
    free: str = ""

    @high.validator
    def _above(self, _: object, high: int) -> None:
        if high < self.low:
            raise ValueError("must not be below low")


def test_a_validator_that_compares_fields_is_asked_with_all_of_them():
    found = culprit(Sample, {"low": 5, "high": 3})
    assert found is not None
    assert (found[0].name, str(found[1])) == ("high", "must not be below low")


def test_nobody_is_blamed_for_values_that_all_fit():
    assert culprit(Sample, {"low": 1, "high": 3, "free": "x"}) is None


@pytest.mark.parametrize(
    ("validator", "words"),
    [
        (ge(1), ">= 1"),
        (attrs.validators.and_(ge(0), le(1)), ">= 0 and <= 1"),
        (in_(["a", "b"]), "one of: a, b"),
        (max_len(3), ""),
        (None, ""),
    ],
)
def test_a_validators_demand_is_said_in_words(validator, words):
    assert demand(validator) == words


@pytest.mark.parametrize(
    ("validator", "value", "words"),
    [
        (ge(1), 0, "must be >= 1."),
        (in_(["auto", "float32"]), "flaot32", 'did you mean "float32"? It must be one of: auto, float32.'),
        (optional(instance_of(int)), "x", "said the validator."),
        (None, 1, "said the validator."),
    ],
)
def test_an_objection_is_rephrased_where_the_validator_is_known(validator, value, words):
    assert reason(validator, value, ValueError("said the validator")) == words


def test_an_exception_without_text_is_named():
    assert reason(None, 1, ZeroDivisionError()) == "ZeroDivisionError."
