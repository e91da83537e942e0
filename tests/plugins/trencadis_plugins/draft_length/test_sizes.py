from __future__ import annotations

import pytest

from trencadis_plugins.draft_length.sizes import ALL, UNBOUNDED, read_sizes


def test_ranges_are_read_with_and_without_an_upper_end():
    assert read_sizes(["1-64:3", " 65 - 128 : all ", "129:2", "130-:0"]) == (
        (1, 64, 3),
        (65, 128, ALL),
        (129, 129, 2),
        (130, UNBOUNDED, 0),
    )


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([], "at least one entry"),
        (["2-8:1"], "'2-8:1' begins at 2, and the first must begin at 1"),
        (["1-8:1", "10-20:0"], "'10-20:0' begins at 10, and the entry before it ends at 8"),
        (["1-8:1", "8-20:0"], "'8-20:0' begins at 8"),
        (["1-:1", "9-20:0"], "'9-20:0' begins at 9"),
        (["1-8"], "'1-8' is not"),
        (["1-8:some"], "'1-8:some' is not"),
        (["1-8:-1"], "'1-8:-1' is not"),
        (["1-8:1", "9-5:1"], "'9-5:1' ends before it begins"),
    ],
)
def test_a_table_that_is_none_is_refused_with_the_entry(entries, says):
    with pytest.raises(ValueError, match="must") as error:
        read_sizes(entries)
    assert says in str(error.value)
