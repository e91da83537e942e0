"""Collectives between processes: the conformance suite, and processes that are killed or stopped."""

from __future__ import annotations

import signal

import attrs
import pytest
import torch

from support.eventually import eventually
from support.rank_processes import open_ranks
from trencadis.errors import CollectiveError
from trencadis_plugins.executor.collectives.groups import create_group
from trencadis_testing import CollectiveConformance

SOON_S = 30.0
"""Within which ranks raise; their timeout is longer."""


@pytest.fixture
def make_ranks(start_processes):
    """``make_ranks(size)`` returns owner and ranks of a group whose ranks are processes."""
    owners = []

    def make(size, *, timeout_s=600.0, kind="shared_memory"):
        owner = create_group(kind, size=size, timeout_s=timeout_s)
        owners.append(owner)
        return owner, open_ranks(start_processes(size), [owner.address(rank) for rank in range(size)])

    yield make
    for owner in owners:
        owner.unlink()


class TestSharedMemory(CollectiveConformance):
    @pytest.fixture(autouse=True)
    def _make(self, make_ranks):
        self.make = lambda size, *, timeout_s: make_ranks(size, timeout_s=timeout_s)[1]


class TestGloo(CollectiveConformance):
    checks_calls = False
    abort_wakes = False
    short_timeout_s = 6.0

    @pytest.fixture(autouse=True)
    def _make(self, make_ranks):
        self.make = lambda size, *, timeout_s: make_ranks(size, timeout_s=timeout_s, kind="gloo")[1]


VERBS = {
    "barrier": ("barrier", None, {}),
    "all_reduce": ("all_reduce", (bytes(12), "torch.float32", (3,), True), {}),
    "all_gather": ("all_gather", (bytes(12), "torch.float32", (3,), True), {}),
    "broadcast": ("broadcast", (bytes(12), "torch.float32", (3,), True), {"source": 1}),
    "receive": ("receive", (bytes(12), "torch.float32", (3,), True), {"source": 1}),
}


def inside(owner, *ranks):
    """Wait until ranks are in a call."""
    eventually(lambda: all(owner.progress()[rank].is_inside for rank in ranks))


def error_of(future):
    found = future.exception(SOON_S)
    assert isinstance(found, CollectiveError), f"not an error of a collective: {found!r}"
    return str(found)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_notice_that_one_was_killed_in_the_middle_of_sums(make_ranks, size):
    owner, ranks = make_ranks(size)
    sums = [rank.process.start("sum", "group", 50_000) for rank in ranks]
    eventually(lambda: owner.progress()[1].num_calls > 20)
    number = ranks[1].process.number
    ranks[1].process.kill()
    for rank in range(size):
        if rank != 1:
            said = error_of(sums[rank])
            assert f"rank 1, whose process {number} ended" in said
            assert "all_reduce of 200000 bytes" in said


@pytest.mark.parametrize("call", VERBS)
def test_ranks_notice_that_one_was_killed_whatever_they_wait_in(make_ranks, call):
    owner, ranks = make_ranks(3)
    waiting = [ranks[rank].process.start("call", "group", *VERBS[call]) for rank in (0, 2)]
    inside(owner, 0, 2)
    ranks[1].process.kill()
    for future in waiting:
        said = error_of(future)
        assert call in said
        assert "rank 1, whose process" in said


def test_abort_of_the_owner_ends_calls_whatever_was_killed(make_ranks):
    owner, ranks = make_ranks(3)
    sums = [rank.process.start("sum", "group", 1000) for rank in ranks]
    eventually(lambda: owner.progress()[2].num_calls > 20)
    ranks[2].process.signal(signal.SIGSTOP)
    owner.abort("rank 2 is to be replaced")
    for future in sums[:2]:
        assert error_of(future) == "The group was aborted by the executor: rank 2 is to be replaced"


def test_a_stopped_rank_is_named_after_the_timeout(make_ranks):
    owner, ranks = make_ranks(3, timeout_s=3.0)
    sums = [rank.process.start("sum", "group", 1000) for rank in ranks]
    eventually(lambda: owner.progress()[1].num_calls > 20)
    ranks[1].process.signal(signal.SIGSTOP)
    for future in (sums[0], sums[2]):
        said = error_of(future)
        assert "waited 3 s in all_reduce of 4000 bytes" in said
        assert f"rank 1, whose process {ranks[1].process.number} is stopped" in said
    ranks[1].process.signal(signal.SIGCONT)
    assert "was aborted by rank" in error_of(sums[1])


def test_a_rank_that_never_opened_the_group_is_named(make_ranks, start_processes):
    owner = create_group("shared_memory", size=2, timeout_s=0.5)
    (rank,) = open_ranks(start_processes(1), [owner.address(0)])
    owner.unlink()
    with pytest.raises(CollectiveError, match="for rank 1, which has not opened the group"):
        rank.barrier()


def test_a_rank_that_closed_the_group_is_named_long_before_the_timeout(make_ranks):
    owner, ranks = make_ranks(2)
    waiting = ranks[0].process.start("call", "group", *VERBS["barrier"])
    inside(owner, 0)
    ranks[1].close()
    assert "rank 1, whose process" in (said := error_of(waiting))
    assert "has closed the group" in said


def test_owner_sees_what_each_rank_does(make_ranks):
    owner, ranks = make_ranks(2)
    for future in [rank.process.start("call", "group", *VERBS["all_reduce"]) for rank in ranks]:
        future.result(SOON_S)
    waiting = ranks[1].process.start("call", "group", *VERBS["receive"][:2], {"source": 0})
    inside(owner, 1)
    first, second = owner.progress()
    assert (first.num_calls, first.call, first.is_inside, first.num_bytes) == (1, "all_reduce", False, 12)
    assert (second.num_calls, second.call, second.is_inside, second.num_bytes) == (2, "receive", True, 12)
    assert [rank.process.number for rank in (first, second)] == [rank.process.number for rank in ranks]
    ranks[0].send(torch.zeros(3), target=1)
    waiting.result(SOON_S)


def test_subgroups_work_beside_the_world(make_ranks):
    for kind in ("shared_memory", "gloo"):
        owner, world = make_ranks(3, kind=kind)
        pair, single = owner.subgroup((0, 2)), owner.subgroup((1,))
        addresses = [pair.address(0), single.address(0), pair.address(1)]
        ranks = open_ranks([rank.process for rank in world], addresses, "stage")
        tensors = [torch.full((3,), 10.0**rank) for rank in range(3)]
        sums = [
            rank.process.start(
                "call", "stage", "all_reduce", (tensor.numpy().tobytes(), "torch.float32", (3,), True), {}
            )
            for rank, tensor in zip(ranks, tensors, strict=True)
        ]
        found = [torch.frombuffer(bytearray(future.result(SOON_S)[0]), dtype=torch.float32)[0] for future in sums]
        assert found == [101.0, 10.0, 101.0]
        for future in [rank.process.start("call", "group", *VERBS["barrier"]) for rank in world]:
            future.result(SOON_S)
        for rank in (*ranks, *world):
            rank.close()


def test_gloo_raises_when_a_rank_is_killed(make_ranks):
    _, ranks = make_ranks(3, kind="gloo")
    ranks[1].process.start("call", "group", *VERBS["barrier"])
    waiting = [ranks[rank].process.start("call", "group", *VERBS["receive"]) for rank in (0, 2)]
    ranks[1].process.kill()
    for future in waiting:
        assert "rank 1" in error_of(future)


def test_gloo_meets_at_a_port_of_the_owner(start_processes):
    owner = create_group("gloo", size=2, timeout_s=900.0, host="127.0.0.1")
    assert owner.address(0).name.startswith("tcp://127.0.0.1:")
    ranks = open_ranks(start_processes(2), [owner.address(rank) for rank in range(2)])
    for future in [rank.process.start("call", "group", *VERBS["all_reduce"]) for rank in ranks]:
        assert future.result(SOON_S)[0] == bytes(12)
    # One rank may compile for minutes while the others wait for it.
    assert [rank.process.call("timeout", "group") for rank in ranks] == [900.0, 900.0]
    owner.abort()
    assert owner.progress() == ()
    owner.unlink()


def test_a_place_to_meet_that_is_none_is_named(start_processes):
    owner = create_group("gloo", size=2)
    owner.unlink()
    with pytest.raises(CollectiveError, match="'nowhere' is no place to meet: tcp://host:port"):
        open_ranks(start_processes(1), [attrs.evolve(owner.address(0), name="nowhere")])


@pytest.mark.parametrize(
    ("kind", "word"), [("hccl", "Gaudi software"), pytest.param("nccl", "NCCL|nccl|CUDA", marks=pytest.mark.nightly)]
)
@pytest.mark.slow
def test_a_device_library_that_is_missing_is_named(start_processes, kind, word):
    owner = create_group(kind, size=2, timeout_s=5.0)
    with pytest.raises(CollectiveError, match=word):
        open_ranks(start_processes(1), [owner.address(0)])
    owner.unlink()
