"""Collectives in shared memory: the conformance suite on threads of one process, and what it does not see."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import threading

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.errors import BackendError, CollectiveError
from trencadis_plugins.executor.collectives import shared_memory, waiting
from trencadis_plugins.executor.collectives.group_memory import GroupMemory
from trencadis_plugins.executor.collectives.groups import create_group, open_group
from trencadis_plugins.executor.collectives.segment import ENDED, Layout, Segment
from trencadis_plugins.executor.collectives.shared_memory import SharedMemoryCollective
from trencadis_plugins.executor.collectives.waiting import Patience
from trencadis_testing import CollectiveConformance

SOON_S = 30.0
NUMBERS = itertools.count()


def make(size, *, timeout_s=60.0):
    owner = create_group("shared_memory", size=size, timeout_s=timeout_s)
    try:
        return [open_group(pickle.loads(pickle.dumps(owner.address(rank)))) for rank in range(size)]
    finally:
        owner.unlink()


def make_small(size, *, timeout_s=60.0):
    """Return a group whose tensors have many chunks."""
    name = f"trencadis-{os.getpid()}-0-small{next(NUMBERS)}"
    segment = Segment.create(name, Layout(size, slot_bytes=4096, mailbox_slot_bytes=4096))
    try:
        return [
            SharedMemoryCollective(Segment.open(name, size), rank, timeout_s=timeout_s, patience=Patience(0, 2))
            for rank in range(size)
        ]
    finally:
        segment.unlink()


def on_threads(groups, work):
    """Return what each rank's function returned or raised."""
    found = [None] * len(groups)

    def run(rank):
        try:
            found[rank] = work(groups[rank])
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    return found


class TestThreads(CollectiveConformance):
    make = staticmethod(make)


class TestSmallSlots(CollectiveConformance):
    make = staticmethod(make_small)


class TestWithFences(CollectiveConformance):
    """As on processors that reorder stores."""

    @pytest.fixture(autouse=True)
    def _fences(self, monkeypatch):
        monkeypatch.setattr(waiting, "_STORES_STAY_IN_ORDER", False)

    def make(self, size, *, timeout_s):
        groups = make(size, timeout_s=timeout_s)
        assert all(group._memory.fence is not None for group in groups)
        return groups


calls = st.one_of(
    st.tuples(st.just("all_reduce"), st.sampled_from(["float32", "bfloat16", "int64"]), st.integers(0, 5000)),
    st.tuples(st.just("all_gather"), st.integers(0, 40), st.integers(0, 1500)),
    st.tuples(st.just("broadcast"), st.integers(0, 3), st.integers(0, 5000)),
    st.tuples(st.just("message"), st.integers(0, 3), st.integers(1, 3), st.integers(0, 9000)),
    st.tuples(st.just("barrier")),
)


@settings(max_examples=120)
@given(size=st.integers(2, 4), sequence=st.lists(calls, max_size=12), small=st.booleans())
def test_any_sequence_of_calls_has_the_values_of_its_definition(size, sequence, small):
    def part(number, rank, shape, dtype="float32"):
        generator = torch.Generator().manual_seed(100 * number + rank)
        return torch.randn(shape, generator=generator).mul(1000).to(getattr(torch, dtype))

    def run(group):
        right = True
        for number, (kind, *facts) in enumerate(sequence):
            if kind == "all_reduce":
                parts = [part(number, rank, facts[1], facts[0]) for rank in range(size)]
                found, total = parts[group.rank].clone(), parts[0].float() if facts[0] == "bfloat16" else parts[0]
                group.all_reduce(found)
                for other in parts[1:]:
                    total = total + other
                right &= torch.equal(found, total.to(found.dtype))
            elif kind == "all_gather":
                parts = [part(number, rank, tuple(facts)) for rank in range(size)]
                right &= torch.equal(group.all_gather(parts[group.rank]), torch.cat(parts, dim=-1))
            elif kind == "broadcast":
                source = facts[0] % size
                found = part(number, group.rank, facts[1])
                group.broadcast(found, source=source)
                right &= torch.equal(found, part(number, source, facts[1]))
            elif kind == "message":
                source, message = facts[0] % size, part(number, 0, facts[2])
                target = (source + 1 + facts[1] % (size - 1)) % size
                if group.rank == source:
                    group.send(message, target=target)
                elif group.rank == target:
                    found = torch.zeros_like(message)
                    group.receive(found, source=source)
                    right &= torch.equal(found, message)
            else:
                group.barrier()
        return bool(right)

    groups = (make_small if small else make)(size)
    try:
        assert on_threads(groups, run) == [True] * size
    finally:
        for group in groups:
            group.close()


def test_stamps_begin_again_within_the_first_hundred_chunks_and_nothing_shows():
    groups = make(2)

    def run(group):
        found = []
        for number in range(300):
            tensor = torch.tensor([number * (1 + group.rank)])
            group.all_reduce(tensor)
            found.append(int(tensor))
        return found

    assert on_threads(groups, run) == [[3 * number for number in range(300)]] * 2
    assert 0 < groups[0]._stamp < 300


def test_a_message_has_left_when_send_returns_if_the_mailbox_has_room():
    groups = make(2)
    for number in range(4):
        groups[0].send(torch.tensor([number]), target=1)
    found = torch.zeros(1, dtype=torch.int64)
    for number in range(4):
        groups[1].receive(found, source=0)
        assert int(found) == number


def test_an_abort_wakes_those_who_are_just_falling_asleep(monkeypatch):
    """Without ever looking by themselves: a wake-up that is missed would show as a hang."""
    monkeypatch.setattr(shared_memory, "_CHECK_S", 1000.0)
    choose = random.Random(0)
    for _ in range(60):
        groups = make_small(2, timeout_s=1000.0)
        spins = choose.randrange(3000)

        def run(group, spins=spins):
            if group.rank == 0:
                group.barrier()
            for _ in range(spins):
                pass
            group.abort()

        assert isinstance(on_threads(groups, run)[0], CollectiveError)


def test_what_leaves_a_call_halfway_ends_the_group(monkeypatch):
    groups = make(2)

    def interrupted(parts, out):
        raise KeyboardInterrupt

    monkeypatch.setattr(shared_memory, "ordered_sum", interrupted)
    found = on_threads(groups, lambda group: group.all_reduce(torch.zeros(3)))
    assert all(isinstance(error, KeyboardInterrupt | CollectiveError) for error in found)
    with pytest.raises(
        CollectiveError, match=r"aborted by rank [01]: it left all_reduce \(call 1\) with KeyboardInterrupt"
    ):
        groups[1].barrier()


def test_tensors_of_inference_mode_and_others_may_follow_each_other():
    def run(group):
        for _ in range(2):
            with torch.inference_mode():
                inner = torch.ones(5)
                group.all_reduce(inner)
                group.all_gather(inner)
            outer = torch.ones(5)
            group.all_reduce(outer)
            group.broadcast(outer, source=1)
        return inner.tolist() == outer.tolist() == [2.0] * 5

    assert on_threads(make(2), run) == [True, True]


def test_more_shapes_than_are_kept_are_no_problem(monkeypatch):
    monkeypatch.setattr(shared_memory, "_MOST_VIEWS", 3)

    def run(group):
        for length in (1, 2, 3, 4, 5, 1, 2):
            tensor = torch.ones(length)
            group.all_reduce(tensor)
            assert tensor.tolist() == [2.0] * length
        return len(group._views)

    assert max(on_threads(make(2), run)) <= 3


WRONG = {
    "contiguous": (lambda group: group.all_reduce(torch.zeros(4, 4).T), "contiguous tensor, not strides"),
    "broadcast": (lambda group: group.broadcast(torch.zeros(4, 4).T), "broadcast needs a contiguous"),
    "receive": (lambda group: group.receive(torch.zeros(4, 4).T, source=1), "receive needs a contiguous"),
    "bool": (lambda group: group.all_reduce(torch.zeros(3, dtype=torch.bool)), "not torch.bool"),
    "float8": (lambda group: group.all_reduce(torch.zeros(3).to(torch.float8_e5m2)), "not torch.float8_e5m2"),
    "device": (lambda group: group.all_reduce(torch.zeros(3, device="meta")), "not of meta"),
    "dtype": (lambda group: group.all_gather(torch.zeros(3, dtype=torch.complex32)), "do not know torch.complex32"),
    "scalar": (lambda group: group.all_gather(torch.tensor(1.0)), "at least one dimension"),
    "source": (lambda group: group.broadcast(torch.zeros(3), source=2), "the group has ranks 0 to 1"),
    "itself": (lambda group: group.send(torch.zeros(3), target=0), "cannot send to itself"),
    "nobody": (lambda group: group.receive(torch.zeros(3), source=-1), "receive from rank -1"),
}


@pytest.mark.representatives(100)
@pytest.mark.parametrize("case", WRONG)
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_wrong_arguments_are_named_and_leave_the_group_as_it_was(case):
    call, words = WRONG[case]
    groups = make(2)
    with pytest.raises(CollectiveError, match=words):
        call(groups[0])
    assert on_threads(groups, lambda group: group.barrier()) == [None, None]


def test_a_rank_can_be_taken_once():
    owner = create_group("shared_memory", size=2)
    first = open_group(owner.address(0))
    with pytest.raises(CollectiveError, match="Rank 0 of the group is taken already, by rank 0, whose process"):
        open_group(owner.address(0))
    first.close()
    owner.unlink()


def test_no_thread_and_no_descriptor_is_left_of_a_closed_group():
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        groups = make(3)
        on_threads(groups, lambda group: group.barrier())
        for group in groups:
            group.close()
    assert threading.active_count() <= before[0]
    assert len(os.listdir("/proc/self/fd")) <= before[1]


def test_ending_marks_every_word_that_a_rank_may_wait_for():
    segment = Segment.create(f"trencadis-{os.getpid()}-0-marks", Layout.of(3))
    segment.unlink()
    memory = GroupMemory(segment)
    memory.end(1, "x" * 2000)
    assert {memory.words[place // 4] for place in segment.layout.stamps} == {ENDED}
    assert memory.ended() == "The group was aborted by rank 1: " + "x" * 500
    memory.end(2, "later")
    assert "rank 1" in memory.ended()


class TestPatience:
    def test_counts_all_processes_of_the_machine_and_not_only_those_of_the_group(self):
        owner = create_group("shared_memory", size=2, num_processes=1000)
        group = open_group(owner.address(0))
        owner.unlink()
        assert group._patience == Patience.of(1000, 1)

    def test_ranks_spin_only_where_cores_are_left(self):
        spinning, yielding, sleeping = Patience.of(2, 4), Patience.of(4, 4), Patience.of(5, 4)
        assert (spinning.spins > 0, yielding.spins, sleeping.spins) == (True, 0, 0)
        assert spinning.yields == yielding.yields > 10 > sleeping.yields

    def test_a_quota_counts_as_cores(self, monkeypatch, tmp_path):
        monkeypatch.setattr(waiting.os, "sched_getaffinity", lambda pid: set(range(16)))
        quota = tmp_path / "cpu.max"
        monkeypatch.setattr(waiting, "Path", lambda path: quota)
        assert waiting.available_cores() == 16
        for text, cores in {"max 100000": 16, "200000 100000": 2, "50000 100000": 1, "9900000 100000": 16}.items():
            quota.write_text(text)
            assert waiting.available_cores() == cores

    def test_a_machine_without_futex_is_named(self, monkeypatch):
        monkeypatch.setattr(waiting.platform, "system", lambda: "Darwin")
        with pytest.raises(BackendError, match=r'need Linux on .* this is Darwin .* Use the collectives "gloo"'):
            create_group("shared_memory", size=2)


class TestProcessId:
    def test_this_process_runs(self):
        assert shared_memory.this_process().state() == "runs"

    def test_a_number_that_another_process_has_now_is_no_life(self):
        assert attrs.evolve(shared_memory.this_process(), start=1).state() == "ended"
        assert attrs.evolve(shared_memory.this_process(), number=2**30).state() == "ended"

    def test_of_another_namespace_nothing_is_known(self):
        assert attrs.evolve(shared_memory.this_process(), number=2**30, namespace=1).state() == "runs"
