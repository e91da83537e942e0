"""Owners of groups: addresses, names, what is left of those who were killed."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
import pytest
import torch

from support.rank_processes import open_ranks
from trencadis.errors import BackendError, CollectiveError
from trencadis_plugins.executor.collectives import segment
from trencadis_plugins.executor.collectives.alone import Alone
from trencadis_plugins.executor.collectives.groups import KINDS, create_group, open_group
from trencadis_plugins.executor.collectives.owner import GroupAddress
from trencadis_plugins.executor.collectives.segment import Layout, Segment, remove_leftovers


@pytest.fixture
def folder():
    """A directory in shared memory of this test's own."""
    path = Path("/dev/shm") / f"tests-of-trencadis-{os.getpid()}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


class TestAlone:
    @pytest.mark.representatives(10)
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_group_of_one_leaves_tensors_as_they_are(self, kind):
        owner = create_group(kind, size=1)
        group = open_group(owner.subgroup((0,)).address(0))
        assert isinstance(group, Alone)
        tensor = torch.tensor([1.0, 2.0])
        group.all_reduce(tensor)
        group.broadcast(tensor)
        group.barrier()
        assert group.all_gather(tensor).tolist() == tensor.tolist() == [1.0, 2.0]
        assert (group.rank, group.size) == (0, 1)
        group.close()
        owner.abort()
        assert owner.progress() == ()
        owner.unlink()

    def test_there_is_nobody_to_send_to(self):
        for call in (lambda: Alone().send(torch.zeros(1), target=0), lambda: Alone().receive(torch.zeros(1), source=0)):
            with pytest.raises(CollectiveError, match="has no other rank to"):
                call()
        with pytest.raises(CollectiveError, match="Rank 1 is not in a group of one rank"):
            Alone().broadcast(torch.zeros(1), source=1)

    def test_aborted_it_raises_as_others_do(self):
        group = Alone()
        group.abort()
        with pytest.raises(CollectiveError, match="aborted"):
            group.all_reduce(torch.zeros(1))


def test_names_say_owner_and_generation():
    owner = create_group("shared_memory", size=2, generation=7)
    address = owner.address(1)
    assert address.name.startswith(f"trencadis-{os.getpid()}-7-")
    assert (Path("/dev/shm") / address.name).stat().st_mode & 0o777 == 0o600
    assert attrs.asdict(address).keys() == {field.name for field in attrs.fields(GroupAddress)}
    owner.unlink()
    owner.unlink()
    assert not (Path("/dev/shm") / address.name).exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "mpi", "size": 2}, 'no collectives "mpi"; there are shared_memory, gloo, nccl, hccl'),
        ({"kind": "shared_memory", "size": 0}, "has 1 to 32 ranks, not 0"),
        ({"kind": "shared_memory", "size": 33}, "has 1 to 32 ranks, not 33"),
    ],
)
def test_groups_that_cannot_be_are_named(arguments, words):
    with pytest.raises(CollectiveError, match=words):
        create_group(**arguments)


@pytest.mark.parametrize("kind", ["shared_memory", "gloo"])
def test_members_of_a_subgroup_are_ranks_in_order(kind):
    owner = create_group(kind, size=3)
    for members in ((), (0, 3), (1, 0), (1, 1), (-1,)):
        with pytest.raises(CollectiveError, match="some of the ranks 0 to 2, in ascending order"):
            owner.subgroup(members)
    pair = owner.subgroup((1, 2))
    assert (pair.address(1).members, pair.size) == ((1, 2), 2)
    assert isinstance(open_group(pair.subgroup((1,)).address(0)), Alone)
    owner.unlink()


def test_addresses_that_lead_nowhere_are_named():
    owner = create_group("shared_memory", size=2)
    address = owner.address(0)
    with pytest.raises(CollectiveError, match="expects a group of 3"):
        open_group(attrs.evolve(address, size=3))
    with pytest.raises(CollectiveError, match="Rank 2 is not in a group of 2"):
        open_group(attrs.evolve(address, rank=2))
    owner.unlink()
    with pytest.raises(CollectiveError, match=r"/dev/shm/trencadis-.* cannot be opened: No such file"):
        open_group(address)


def test_a_file_that_is_no_segment_is_named(folder):
    (folder / "trencadis-1-0-g").write_bytes(bytes(8192))
    with pytest.raises(CollectiveError, match="is no memory of a group"):
        Segment.open("trencadis-1-0-g", 2, directory=folder)


def test_no_room_is_said_when_the_group_is_made_and_nothing_is_left(folder, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segment.os, "posix_fallocate", full)
    with pytest.raises(BackendError, match=r"2 ranks, \d+\.\d MiB, cannot be made: No space left.*--shm-size"):
        Segment.create("trencadis-1-0-g", Layout.of(2), directory=folder)
    assert list(folder.iterdir()) == []


def test_a_name_is_given_once(folder):
    first = Segment.create("trencadis-1-0-g", Layout.of(2), directory=folder)
    with pytest.raises(BackendError, match="File exists"):
        Segment.create("trencadis-1-0-g", Layout.of(2), directory=folder)
    assert Segment.open("trencadis-1-0-g", 2, directory=folder).layout == Layout.of(2)
    first.unlink()


@pytest.mark.parametrize("size", [2, 4, 8, 32])
def test_a_segment_fits_into_the_shared_memory_of_a_container(size):
    layout = Layout.of(size)
    assert layout.num_bytes < 25 * 2**20
    assert layout.slot_bytes % 4096 == layout.mailbox_slot_bytes % 4096 == 0
    assert layout.slot_bytes >= 128 * 1024


def test_no_two_places_of_a_segment_overlap():
    layout = Layout(3, slot_bytes=4096, mailbox_slot_bytes=8192)
    ranks = range(3)
    pairs = [(source, target) for source in ranks for target in ranks if source != target]
    places = [(0, 32), (segment.ABORT, 4)]
    places += [(layout.reason(rank), 4 + segment.REASON_BYTES) for rank in (*ranks, 3)]
    for rank in ranks:
        places += [(layout.arrived(rank), 4), (layout.summed(rank), 4)]
        places += [(layout.header(rank, parity), 16) for parity in (0, 1)]
        places += [(layout.progress(rank), 16), (layout.process(rank), 32)]
        places += [(layout.slot(rank, parity), 4096) for parity in (0, 1)]
    for pair in pairs:
        places += [(layout.head(*pair), 4), (layout.tail(*pair), 4)]
        places += [(layout.message_header(*pair, letter), 16) for letter in range(4)]
        places += [(layout.mailbox_slot(*pair, letter), 8192) for letter in range(4)]
    places.sort()
    ends = [place + size for place, size in places]
    assert all(end <= place for end, (place, _) in zip(ends, places[1:], strict=False))
    assert ends[-1] <= layout.num_bytes


class TestLeftovers:
    def test_of_an_owner_that_was_killed_are_removed_and_of_others_not(self, folder, start_processes):
        (process,) = start_processes(1)
        process.call("segment", "trencadis-1-0-killed", str(folder))
        mine = Segment.create(f"trencadis-{os.getpid()}-0-mine", Layout.of(2), directory=folder)
        (folder / "trencadis-notes.txt").write_text("something else")
        assert remove_leftovers(directory=folder) == ()
        process.kill()
        assert remove_leftovers(directory=folder) == ("trencadis-1-0-killed",)
        assert sorted(path.name for path in folder.iterdir()) == [
            f"trencadis-{os.getpid()}-0-mine",
            "trencadis-notes.txt",
        ]
        mine.unlink()

    def test_are_removed_by_the_next_owner(self, start_processes):
        (process,) = start_processes(1)
        address = process.call("own", 2)
        left = Path("/dev/shm") / address.name
        assert left.exists()
        process.kill()
        create_group("shared_memory", size=2).unlink()
        assert not left.exists()

    def test_ranks_of_a_group_without_a_name_go_on(self, start_processes):
        owner = create_group("shared_memory", size=2)
        ranks = open_ranks(start_processes(2), [owner.address(rank) for rank in range(2)])
        owner.unlink()
        for future in [rank.process.start("call", "group", "barrier", None, {}) for rank in ranks]:
            future.result(30.0)

    def test_meeting_places_of_gloo_are_removed(self):
        owner = create_group("gloo", size=2)
        folder = Path(owner.address(0).name.removeprefix("file://")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        owner.unlink()
        assert not folder.exists()


def test_where_ranks_met_is_removed_by_the_next_owner_if_the_last_one_was_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal\n"
        "from trencadis_plugins.executor.collectives.groups import create_group\n"
        "create_group('gloo', size=2)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join(sys.path)
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": path}, check=False
    )
    (left,) = tmp_path.iterdir()
    first = create_group("gloo", size=2)
    (folder,) = tmp_path.iterdir()
    assert folder != left
    second = create_group("gloo", size=2)
    assert len(list(tmp_path.iterdir())) == 2
    for owner in (first, second):
        owner.unlink()
        owner.unlink()
    assert list(tmp_path.iterdir()) == []


def test_a_segment_has_no_name_once_all_ranks_have_opened_it():
    owner = create_group("shared_memory", size=2)
    name = Path("/dev/shm", owner.address(0).name)
    assert name.exists()
    owner.opened()
    assert not name.exists()
    assert [one.num_calls for one in owner.progress()] == [0, 0]
    owner.abort("enough")
    owner.unlink()
