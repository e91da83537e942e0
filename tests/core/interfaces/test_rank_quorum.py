"""A transfer is over when the set of ranks says so: in any order, at any time, however often one of them says it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings

from trencadis.interfaces.rank_quorum import RankQuorum
from trencadis.records import ConnectorReport, FailedLoad

WHOLE = 1_000
"""What the reference writes for a share that arrived whole: more tokens than any failure has."""


def failed(transfer_id: int, num_valid_tokens: int = 0, cause: str = "evicted") -> FailedLoad:
    return FailedLoad(transfer_id=transfer_id, num_valid_tokens=num_valid_tokens, cause=cause)


def report(
    *, loaded: Sequence[int] = (), failures: Sequence[FailedLoad] = (), released: Sequence[int] = ()
) -> ConnectorReport:
    return ConnectorReport(loaded=tuple(loaded), failed=tuple(failures), released=tuple(released))


class Books:
    """The engine's side, as small as can be: loads that have not ended, and those given up that are not released."""

    def __init__(self, waiting: Sequence[int] = (), held: Sequence[int] = ()) -> None:
        self.waiting, self.held = set(waiting), set(held)

    def merge(self, quorum: RankQuorum, reports: dict[int, ConnectorReport]) -> ConnectorReport:
        merged = quorum.merge(
            reports,
            is_awaited=lambda transfer_id: transfer_id in self.waiting | self.held,
            is_pinned=self.held.__contains__,
        )
        self.waiting -= {*merged.loaded, *[one.transfer_id for one in merged.failed]}
        self.held -= set(merged.released)
        return merged


def test_one_ranks_report_passes_as_it_is() -> None:
    books, quorum = Books(waiting=[1, 2, 3], held=[4, 5]), RankQuorum()
    said = report(loaded=[3, 1], failures=[failed(2, 8)], released=[5, 4])
    assert books.merge(quorum, {0: said}) == said
    assert quorum.num_ignored == 0


def test_load_is_whole_when_the_last_rank_says_so() -> None:
    books, quorum = Books(waiting=[7]), RankQuorum(3)
    assert books.merge(quorum, {2: report(loaded=[7])}) == report()
    assert books.merge(quorum, {0: report(loaded=[7]), 2: report()}) == report()
    assert books.merge(quorum, {1: report(loaded=[7])}) == report(loaded=[7])


def test_load_that_one_rank_failed_waits_for_the_others_and_keeps_the_least_that_arrived() -> None:
    """Until all have ended one may still write; and a token is there when every rank has its share."""
    books, quorum = Books(waiting=[7]), RankQuorum(3)
    assert books.merge(quorum, {1: report(failures=[failed(7, 12, "slow")])}) == report()
    assert books.merge(quorum, {0: report(loaded=[7])}) == report()
    last = failed(7, 4, "evicted")
    assert books.merge(quorum, {2: report(failures=[last])}) == report(failures=[last])


def test_blocks_are_free_when_no_rank_touches_them() -> None:
    """And what some ranks said of the load before it was given up is forgotten with it."""
    books, quorum = Books(held=[7]), RankQuorum(2)
    assert books.merge(quorum, {0: report(loaded=[7])}) == report()
    assert books.merge(quorum, {0: report(released=[7])}) == report()
    assert books.merge(quorum, {1: report(released=[7])}) == report(released=[7])
    assert quorum.num_ignored == 0
    books.waiting.add(7)
    assert books.merge(quorum, {1: report(loaded=[7])}) == report(), "rank 0 has said nothing of this one"


def test_rank_that_says_a_thing_twice_is_one_rank(caplog: pytest.LogCaptureFixture) -> None:
    books, quorum = Books(waiting=[7], held=[8]), RankQuorum(2)
    with caplog.at_level(logging.WARNING):
        for said in (report(loaded=[7, 7], released=[8]), report(failures=[failed(7)], released=[8, 8])):
            assert books.merge(quorum, {0: said}) == report()
    assert quorum.num_ignored == 4
    assert "Rank 0 of the KV connector reports an end of load 7 that is not awaited of it; ignored." in caplog.text
    assert books.merge(quorum, {1: report(loaded=[7], released=[8])}) == report(loaded=[7], released=[8])


def test_only_rank_that_ends_a_load_twice_in_one_report_ends_it_once() -> None:
    """As broken, if it says both: the cautious of the two."""
    books, quorum = Books(waiting=[6, 7]), RankQuorum()
    said = report(loaded=[6, 6, 7], failures=[failed(7, 3)])
    assert books.merge(quorum, {0: said}) == report(loaded=[6], failures=[failed(7, 3)])
    assert quorum.num_ignored == 2


def test_rank_of_nobody_and_transfer_ids_of_nobody_count_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    books, quorum = Books(waiting=[7], held=[8]), RankQuorum(2)
    said = report(loaded=[7], failures=[failed(9)], released=[8])
    with caplog.at_level(logging.WARNING):
        assert books.merge(quorum, {2: said, -1: said, 0: said}) == report()
    assert quorum.num_ignored == 3 + 3 + 1, "transfer id 9 is awaited of nobody"
    assert "Rank 2 of the KV connector is none of this engine's; ignored." in caplog.text
    assert books.merge(quorum, {1: report(loaded=[7], released=[8])}) == report(loaded=[7], released=[8])


def test_release_of_a_load_that_goes_on_counts_for_nothing() -> None:
    """It would free blocks that are being written, once the load is given up."""
    books, quorum = Books(waiting=[7]), RankQuorum()
    assert books.merge(quorum, {0: report(released=[7])}) == report()
    books.waiting, books.held = set(), {7}
    assert books.merge(quorum, {0: report()}) == report()
    assert quorum.num_ignored == 1


def test_nothing_is_remembered_of_what_is_over() -> None:
    """An engine lives for millions of transfer ids."""
    books, quorum = Books(), RankQuorum(2)
    for transfer_id in range(1_000):
        books.waiting = {transfer_id}
        books.merge(quorum, {0: report(loaded=[transfer_id])})
        books.merge(quorum, {1: report(loaded=[transfer_id, transfer_id]), 0: report(loaded=[transfer_id])})
    books.waiting = set()
    books.merge(quorum, {0: report()})
    assert quorum._known == {}


def reference(num_ranks: int, said: Sequence[tuple[int, int, int]]) -> dict[int, int]:
    """Return what each transfer id ended with, from the definition: the first word of each rank, the least of all of them."""
    words: dict[int, dict[int, int]] = {}
    for rank, transfer_id, num_valid in said:
        if rank < num_ranks:
            words.setdefault(transfer_id, {}).setdefault(rank, num_valid)
    return {transfer_id: min(by_rank.values()) for transfer_id, by_rank in words.items() if len(by_rank) == num_ranks}


@st.composite
def stories(draw: st.DrawFn) -> tuple[int, list[list[tuple[int, int, int]]], list[list[tuple[int, int]]]]:
    """Return ranks, and by step who says that a load ended (rank, transfer id, valid tokens), and that one is released."""
    num_ranks = draw(st.integers(1, 4))
    num_steps = draw(st.integers(1, 8))
    rank, transfer_id = st.integers(0, num_ranks), st.integers(0, 3)  # one more rank than there is
    ends = st.lists(st.tuples(rank, transfer_id, st.sampled_from([0, 4, 8, WHOLE])), max_size=8)
    releases = st.lists(st.tuples(rank, st.integers(10, 12)), max_size=6)
    steps = [(draw(ends), draw(releases)) for _ in range(num_steps)]
    return num_ranks, [one for one, _ in steps], [one for _, one in steps]


@settings(max_examples=400, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(story=stories())
def test_any_interleaving_of_any_ranks_gives_what_the_definition_says(
    story: tuple[int, list[list[tuple[int, int, int]]], list[list[tuple[int, int]]]],
) -> None:
    num_ranks, ends, releases = story
    quorum, books = RankQuorum(num_ranks), Books(waiting=range(4), held=range(10, 13))
    found: dict[int, int] = {}
    said: list[tuple[int, int, int]] = []
    freed: list[int] = []
    for step_ends, step_releases in zip(ends, releases, strict=True):
        # Within a step a rank has one report, and reports are taken rank by rank, failures first.
        said += sorted(step_ends, key=lambda one: (one[0], one[2] == WHOLE))
        reports = {
            rank: report(
                loaded=[t for r, t, valid in step_ends if r == rank and valid == WHOLE],
                failures=[failed(t, valid) for r, t, valid in step_ends if r == rank and valid != WHOLE],
                released=[t for r, t in step_releases if r == rank],
            )
            for rank in {one[0] for one in [*step_ends, *step_releases]}
        }
        merged = books.merge(quorum, reports)
        for transfer_id, num_valid in [
            *[(transfer_id, WHOLE) for transfer_id in merged.loaded],
            *[(one.transfer_id, one.num_valid_tokens) for one in merged.failed],
        ]:
            assert transfer_id not in found, "a load ends once"
            found[transfer_id] = num_valid
        freed += merged.released
    assert found == reference(num_ranks, said)
    spoken = {
        transfer_id: {r for step in releases for r, t in step if t == transfer_id and r < num_ranks}
        for transfer_id in range(10, 13)
    }
    assert sorted(freed) == [transfer_id for transfer_id, ranks in spoken.items() if len(ranks) == num_ranks]
