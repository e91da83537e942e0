from __future__ import annotations

from trencadis.client.token_prefix import TokenPrefix


def test_a_prefix_stays_as_it_was_while_its_list_grows() -> None:
    tokens = [5, 6, 7]
    prefix = TokenPrefix(tokens, 3)
    tokens += [8, 9]
    assert prefix == (5, 6, 7)
    assert [*prefix] == [5, 6, 7]
    assert len(prefix) == 3
    assert prefix != (5, 6, 7, 8)
    assert prefix == TokenPrefix([5, 6, 7], 3)


def test_a_prefix_behaves_as_the_tuple_that_it_equals() -> None:
    whole = (5, 6, 7, 8)
    prefix = TokenPrefix([*whole, 9, 10], 4)
    for start in (None, 0, 2, 4, 9, -1, -9):
        for stop in (None, 0, 2, 4, 9, -1, -9):
            for step in (None, 1, 2, -1, -2):
                assert prefix[start:stop:step] == whole[start:stop:step]
    assert [prefix[i] for i in (0, 3, -1, -4)] == [5, 8, 8, 5]
    assert {prefix: 1}[whole] == 1  # type: ignore[index]
    assert repr(prefix) == repr(whole)
    for index in (4, -5):
        try:
            prefix[index]
        except IndexError:
            continue
        raise AssertionError(index)
