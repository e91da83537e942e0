from __future__ import annotations

from trencadis_plugins.eviction.history import History


def test_fact_is_recalled_once() -> None:
    history: History[int] = History()
    history.remember(b"a", 3, most=5)
    assert (history.recall(b"a"), history.recall(b"a")) == (3, None)


def test_oldest_is_forgotten_first_and_a_later_fact_renews() -> None:
    history: History[int] = History()
    for number, key in enumerate((b"a", b"b", b"a", b"c")):
        history.remember(key, number, most=2)
    assert [history.recall(key) for key in (b"b", b"a", b"c")] == [None, 2, 3]


def test_unknown_content_is_not_remembered() -> None:
    history: History[int] = History()
    history.remember(b"", 1, most=5)
    assert len(history) == 0


def test_shrinking_below_one_forgets_all() -> None:
    history: History[int] = History()
    history.remember(b"a", 1, most=5)
    history.shrink(0.5)
    assert history.recall(b"a") is None
