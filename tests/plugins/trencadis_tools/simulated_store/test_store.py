"""Links and stores by exact arithmetic: sizes and rates are powers of two, so that every time is a float without rounding."""

from __future__ import annotations

from collections import OrderedDict

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis_tools.simulated_store.config import SimulatedStoreConfig
from trencadis_tools.simulated_store.store import KVTraffic, SimulatedStore, StoreLink, Stores

BLOCK = 1024
PLAIN = SimulatedStoreConfig(link_bytes_per_s=4 * BLOCK, latency_s=0.125, capacity_bytes=64 * BLOCK)


def names(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def links(number: int = 1, **options: object) -> list[StoreLink]:
    """Links of replicas of one run, with blocks of 4 tokens."""
    stores = Stores()
    config = attrs.evolve(PLAIN, **options)
    return [stores.link(config, block_size=4, block_bytes=BLOCK) for _ in range(number)]


def loaded_at(link: StoreLink, transfer_id: int, num_blocks: int, now_s: float, wait_s: float = 1e9) -> float:
    link.load(transfer_id, names("x" * num_blocks), now_s=now_s, wait_s=wait_s)
    return link._loads[transfer_id].end_s


def test_a_load_takes_its_bytes_over_the_links_bandwidth_and_the_latency():
    (link,) = links()
    assert loaded_at(link, 0, 8, 1.0) == 1 + 8 / 4 + 0.125
    assert link.next_report_s == 3.125
    assert link.ended(3.0)[0].loaded == ()
    assert link.ended(3.125)[0].loaded == (0,)
    assert link.next_report_s == float("inf")


def test_transfers_of_a_replica_go_one_after_the_other_and_latencies_overlap():
    (link,) = links()
    link.save(names("abcd"), now_s=0.0)
    assert loaded_at(link, 0, 4, 0.5) == 2 + 0.125, "the save has the link until 1"
    assert loaded_at(link, 1, 4, 0.5) == 3 + 0.125
    assert loaded_at(link, 2, 4, 9.0) == 10 + 0.125, "it has been free since 3"


def test_replicas_share_the_bandwidth_of_the_store():
    one, two = links(2, store_bytes_per_s=8 * BLOCK)
    assert loaded_at(one, 0, 16, 0.0) == 4.125, "its own link is the slower"
    assert loaded_at(two, 0, 16, 0.0) == 4.125, "the store is through with one after 2 and with two after 4"
    assert loaded_at(two, 1, 4, 0.0) == 5.125, "its own link is free at 4"
    assert loaded_at(one, 1, 32, 0.0) == 12.125, "its link takes 8 from 4 on; the store, which is free at 4.5, takes 4"


def test_links_alone_limit_a_store_without_a_bandwidth_of_its_own():
    one, two = links(2)
    assert [loaded_at(one, 0, 16, 0.0), loaded_at(two, 0, 16, 0.0)] == [4.125, 4.125]


def test_a_late_load_brings_whole_blocks_and_frees_the_link_when_its_time_is_over():
    (link,) = links()
    assert loaded_at(link, 0, 8, 0.0, wait_s=1.0) == 1.0
    (failed,) = link.ended(1.0)[0].failed
    assert (failed.num_valid_tokens, failed.cause) == (4 * 3, "deadline"), "of 3.5 blocks that came until 1 - 0.125"
    assert loaded_at(link, 1, 4, 0.0) == 2.125


def test_a_load_whose_turn_does_not_come_in_time_brings_nothing_and_takes_nothing():
    (link,) = links()
    loaded_at(link, 0, 8, 0.0)
    assert loaded_at(link, 1, 8, 0.0, wait_s=1.5) == 1.5
    assert link.ended(1.5)[0].failed[0].num_valid_tokens == 0
    assert loaded_at(link, 2, 4, 1.5) == 3.125


def test_a_cancelled_load_is_released_at_once_and_its_bytes_are_sent_all_the_same():
    (link,) = links()
    loaded_at(link, 0, 8, 0.0)
    link.cancel(0)
    assert link.next_report_s < 0
    assert link.ended(0.0)[0].released == (0,)
    assert loaded_at(link, 1, 4, 0.0) == 3.125


def test_blocks_are_found_once_they_have_come():
    one, two = links(2)
    one.save(names("abc"), now_s=0.0)
    assert [two.store.num_found(names("abcd"), now_s=time_s) for time_s in (0.874, 0.875)] == [0, 3]
    assert two.store.num_found(names("bx"), now_s=1.0) == 1
    assert two.store.num_found(names("xb"), now_s=1.0) == 0


def test_what_is_there_or_on_its_way_is_not_sent_again():
    one, two = links(2)
    one.save(names("abcd"), now_s=0.0)
    two.save(names("abcdefgh"), now_s=0.0)
    assert loaded_at(two, 0, 4, 0.0) == 2.125, "four blocks were sent"


def test_what_finds_no_staging_memory_is_not_saved():
    (link,) = links(staging_bytes=4 * BLOCK)
    link.save(names("abc"), now_s=0.0)
    link.save(names("def"), now_s=0.5)
    assert [one in link.store for one in names("abcdef")] == [True] * 4 + [False] * 2
    assert link.staged_bytes(0.5) == 4 * BLOCK
    assert link.staged_bytes(0.875) == BLOCK
    assert link._traffic.num_tokens_dropped == 2 * 4


def test_what_was_on_its_way_is_lost_with_its_sender_and_what_had_come_is_not():
    one, two = links(2)
    one.save(names("ab"), now_s=0.0)
    one.save(names("cd"), now_s=0.0)
    two.save(names("ef"), now_s=0.0)
    one.fail(0.75)
    assert [name in two.store for name in names("abcdef")] == [True, True, False, False, True, True]


def test_replicas_with_a_store_each_find_nothing_of_each_other():
    one, two = links(2, shared=False, store_bytes_per_s=4 * BLOCK)
    one.save(names("ab"), now_s=0.0)
    assert (one.store.num_found(names("ab"), now_s=9.0), two.store.num_found(names("ab"), now_s=9.0)) == (2, 0)
    assert loaded_at(two, 0, 4, 0.0) == 1.125, "nor do they wait for each other"


class Reference:
    """Blocks with the number of their last use: the lowest goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used, self.count = capacity, OrderedDict[bytes, int](), 0

    def touch(self, hashes: list[bytes], *, adds: bool) -> None:
        for one in reversed(hashes):
            if adds or one in self.used:
                self.count += 1
                self.used[one] = self.count
        while len(self.used) > self.capacity:
            del self.used[min(self.used, key=self.used.__getitem__)]


@given(
    capacity=st.integers(1, 6),
    calls=st.lists(st.tuples(st.booleans(), st.text("abcdefgh", min_size=1, max_size=5)), max_size=30),
)
def test_the_block_that_was_used_longest_ago_goes_first_and_of_a_prefix_its_end(capacity, calls):
    traffic = KVTraffic()
    store = SimulatedStore(capacity, block_size=4, bytes_per_s=1.0, traffic=traffic)
    reference = Reference(capacity)
    for adds, text in calls:
        hashes = list(dict.fromkeys(names(text)))
        store.add(hashes, ready_s=0.0) if adds else store.use(hashes)
        reference.touch(hashes, adds=adds)
        assert {one for one in names("abcdefgh") if one in store} == set(reference.used)
        assert len(store) <= capacity


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(1, 64), st.integers(0, 16), st.sampled_from([0.25, 4.0, 1e9])),
        min_size=1,
        max_size=20,
    )
)
def test_no_link_nor_store_passes_more_than_its_bandwidth_and_none_stands_still_while_it_has_something(transfers):
    """Against the definition: a pipe is busy from the moment at which something is there until all of that is passed on."""
    pair = links(2, store_bytes_per_s=8 * BLOCK, latency_s=0.0)
    free_s, now_s = {"0": 0.0, "1": 0.0, "store": 0.0}, 0.0
    rates = {"0": 4, "1": 4, "store": 8}
    for number, (which, num_blocks, gap, wait_s) in enumerate(transfers):
        now_s += gap / 8
        ends = {}
        for pipe in (str(which), "store"):
            begin_s = max(now_s, free_s[pipe])
            ends[pipe] = begin_s + num_blocks / rates[pipe]
            free_s[pipe] = max(begin_s, min(ends[pipe], now_s + wait_s))
        assert loaded_at(pair[which], number, num_blocks, now_s, wait_s) == min(max(ends.values()), now_s + wait_s)


def test_a_run_has_stores_of_its_own():
    (one,), (two,) = links(), links()
    one.save(names("ab"), now_s=0.0)
    assert two.store.num_found(names("ab"), now_s=9.0) == 0


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_link_without_bandwidth_is_refused(rate):
    with pytest.raises(ValueError, match="link_bytes_per_s"):
        SimulatedStoreConfig(link_bytes_per_s=rate)
