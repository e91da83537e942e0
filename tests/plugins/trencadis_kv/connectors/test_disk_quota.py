from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trencadis.errors import TransferError
from trencadis_kv.connectors.filesystem.disk_quota import DiskQuota
from trencadis_kv.store.object_directory import ObjectDirectory

PREFIX = "kv1/default/" + "ab" * 16 + "/0.0.0-8/"


def key(number: int) -> str:
    return f"{PREFIX}{(number + 1) * 2654435761 % 2**32:08x}"


@pytest.fixture
def directory(tmp_path: Path) -> ObjectDirectory:
    return ObjectDirectory(tmp_path / "store")


def fill(directory: ObjectDirectory, ages_s: dict[int, float], num_bytes: int = 100) -> None:
    """Write objects that were last used so long ago."""
    directory.check()
    for number, age_s in ages_s.items():
        directory.write(key(number), [memoryview(bytes(num_bytes))])
        os.utime(file_of(directory, number), (time.time() - age_s,) * 2)


def file_of(directory: ObjectDirectory, number: int) -> Path:
    (file,) = directory.root.rglob(key(number).rsplit("/", 1)[1])
    return file


def kept(directory: ObjectDirectory) -> list[int]:
    return [number for number in range(100) if directory.holds(key(number))]


def make(directory: ObjectDirectory, **options) -> DiskQuota:
    return DiskQuota(directory, **{"max_bytes": 1000, "rests": False, **options})


def test_what_was_unused_for_longest_goes_until_the_low_water_mark(directory):
    fill(directory, {number: 1000 - 10 * number for number in range(15)})
    assert make(directory, low_water_ratio=0.7).sweep() == 8
    assert kept(directory) == list(range(8, 15))


def test_objects_that_were_read_stay(directory):
    fill(directory, {number: 100_000 - number for number in range(15)})
    for number in (0, 3):
        directory.read(key(number))
    make(directory, low_water_ratio=0.5).sweep()
    assert kept(directory) == [0, 3, 12, 13, 14]


def test_object_used_while_others_are_counted_is_not_evicted(directory, monkeypatch):
    fill(directory, {number: 100_000 - number for number in range(15)})
    room = make(directory, low_water_ratio=0.5)
    count = room._count
    monkeypatch.setattr(room, "_count", lambda now: (count(now), directory.read(key(0)))[0])
    room.sweep()
    assert 0 in kept(directory)


def test_what_is_no_object_is_neither_counted_nor_deleted(directory):
    fill(directory, {1: 5.0})
    notes = directory.root / "notes.txt"
    notes.write_bytes(bytes(5000))
    misplaced = file_of(directory, 1).parent / "zz"
    misplaced.write_bytes(bytes(5000))
    assert make(directory).sweep() == 0
    assert notes.exists()
    assert misplaced.exists()


def test_files_of_writers_that_died_go_after_an_hour(directory):
    fill(directory, {1: 5.0})
    folder = file_of(directory, 1).parent
    for name, age_s in {".old.tmp": 4000.0, ".new.tmp": 3000.0}.items():
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    make(directory).sweep()
    assert sorted(path.name for path in folder.glob(".*")) == [".new.tmp"]


def test_empty_folders_go_when_something_is_evicted(directory):
    fill(directory, {number: 1000 - number for number in range(12)})
    emptied = file_of(directory, 0).parent
    room = make(directory, low_water_ratio=0.1)
    room.sweep()
    assert not any(emptied.iterdir())
    fill(directory, dict.fromkeys(range(20, 40), 100))
    room.sweep()
    assert not emptied.exists()


def test_writing_goes_on_a_little_beyond_the_limit_and_stops_there(directory):
    room = make(directory)
    directory.check()
    room.opened()
    room.closed()  # no sweep of its own from here on
    assert sum(room.take(100) for _ in range(30)) == 10
    assert room.take(50)
    assert not room.take(1)


def test_object_larger_than_the_limit_is_never_taken(directory):
    assert not make(directory).take(1001)


def test_sweep_counts_bytes_and_what_is_taken_meanwhile(directory, monkeypatch):
    fill(directory, {0: 50.0}, num_bytes=900)
    fill(directory, {1: 40.0, 2: 30.0}, num_bytes=60)
    room = make(directory, low_water_ratio=0.5, sweeps=False)
    count = room._count
    monkeypatch.setattr(room, "_count", lambda now: (room.take(500), count(now))[1])
    room.sweep()
    assert kept(directory) == [1, 2]
    assert [room.take(380), room.take(51), room.take(50)] == [True, False, True]


def test_limit_that_is_reached_starts_a_sweep_on_a_thread(directory):
    fill(directory, {number: 1000 - number for number in range(10)})
    room = make(directory, low_water_ratio=0.5)
    room.opened()
    room._sweeper.join(60)
    assert len(kept(directory)) == 10
    room._next_sweep_s = 0.0
    directory.write(key(50), [memoryview(bytes(100))])
    assert not room.take(100)
    room._sweeper.join(60)
    assert kept(directory) == [6, 7, 8, 9, 50]
    assert room.take(100)
    room.closed()


def test_first_store_has_the_directory_counted_and_the_last_one_ends_that(directory):
    fill(directory, dict.fromkeys(range(10), 1.0))
    room = make(directory)
    room.opened()
    room.opened()
    sweeper = room._sweeper
    sweeper.join(60)
    assert [room.take(50), room.take(50)] == [True, False]
    room.closed()
    assert not room._stop.is_set()
    room.closed()
    assert room._stop.is_set()


def test_directory_that_is_only_read_is_left_as_it_is(directory):
    fill(directory, dict.fromkeys(range(30), 1.0))
    room = make(directory, sweeps=False)
    room.opened()
    assert room._sweeper is None
    room.closed()


def test_two_engines_do_not_sweep_at_once(directory):
    fill(directory, {number: 100 - number for number in range(15)})
    claim = directory.root / ".sweep"
    claim.touch()
    with claim.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert make(directory).sweep() == 0
        assert len(kept(directory)) == 15
    assert make(directory).sweep() > 0


def test_file_system_without_locks_is_swept_all_the_same(directory, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    fill(directory, dict.fromkeys(range(15), 1.0))
    assert make(directory).sweep() == 6


def test_link_in_place_of_the_lock_is_not_followed(directory, tmp_path):
    directory.check()
    victim = tmp_path / "victim"
    (directory.root / ".sweep").symlink_to(victim)
    with pytest.raises(OSError, match="Too many levels"):
        make(directory).sweep()
    assert not victim.exists()


def test_sweep_that_fails_on_its_thread_is_a_warning(directory, caplog):
    directory.root.write_text("a file")
    room = make(directory)
    room.opened()
    room._sweeper.join(60)
    assert "no KV object can be evicted" in caplog.text
    room.closed()


def test_nothing_is_written_to_a_disk_that_is_nearly_full(directory, monkeypatch, caplog):
    disk = SimpleNamespace(f_bavail=11, f_frsize=100, f_blocks=100)
    directory.check()
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    room = make(directory, max_bytes=0, min_free_ratio=0.1)
    assert room.take(100)
    assert not room.take(101)
    assert "less than min_free_ratio = 0.1 of it free" in caplog.text
    assert make(directory, max_bytes=0).take(10**6)


def test_sweep_of_a_directory_that_must_not_be_used_touches_nothing(directory):
    fill(directory, dict.fromkeys(range(30), 1.0))
    directory.root.chmod(0o777)
    with pytest.raises(TransferError, match="every user"):
        make(directory).sweep()
    assert not (directory.root / ".sweep").exists()
