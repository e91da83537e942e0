from __future__ import annotations

import pytest

from trencadis_plugins.draft_length.config import FixedConfig
from trencadis_plugins.draft_length.fixed import Fixed
from trencadis_testing.draft_length import DraftLengthConformance, length_view


class TestFixed(DraftLengthConformance):
    make = Fixed


class TestFixedToTwo(DraftLengthConformance):
    def make(self):
        return Fixed(FixedConfig(num_draft_tokens=2))


@pytest.mark.parametrize(("number", "chosen"), [(0, [1, 5, 3]), (2, [1, 2, 2]), (9, [1, 5, 3])])
def test_everybody_gets_the_number_or_the_limit(number, chosen):
    assert Fixed(FixedConfig(num_draft_tokens=number)).choose(length_view([1, 5, 3])).tolist() == chosen


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="num_draft_tokens"):
        FixedConfig(num_draft_tokens=-1)
