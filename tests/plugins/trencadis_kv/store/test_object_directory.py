from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trencadis.errors import TransferError
from trencadis_kv.store import object_directory
from trencadis_kv.store.directory_owner import DirectoryOwner
from trencadis_kv.store.object_directory import ObjectDirectory

KEY = "kv1/default/" + "ab" * 16 + "/0.0.0-8/" + "3f9a" * 16


OTHER = KEY[:-1] + "b"


def make(root: Path, **options) -> ObjectDirectory:
    return ObjectDirectory(root / "store", **options)


def pieces(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def files_below(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("at_once", [1 << 30, 3])
def test_object_comes_back_in_one_piece_and_a_removed_one_is_gone(tmp_path, monkeypatch, at_once):
    store = make(tmp_path)
    real_writev, real_readv = os.writev, os.readv
    monkeypatch.setattr(
        os, "writev", lambda fd, parts: real_writev(fd, [parts[0][:at_once], *parts[1:][: at_once - 3]])
    )
    monkeypatch.setattr(os, "readv", lambda fd, parts: real_readv(fd, [parts[0][:at_once]]))
    store.write(KEY, pieces(b"first and long"))
    store.write(KEY, pieces(b"head", b"", b"er and payload"))
    target = bytearray(30)
    assert store.read_into(KEY, memoryview(target)) == 18
    assert bytes(target[:18]) == store.read(KEY) == b"header and payload"
    assert [store.read_into(KEY, memoryview(bytearray(size))) for size in (17, 18)] == [-1, 18]
    assert store.holds(KEY)
    store.remove(KEY)
    store.remove(KEY)
    assert (store.holds(KEY), store.read(KEY)) == (False, None)


def test_keys_become_files_in_two_levels_of_folders(tmp_path):
    store = make(tmp_path)
    store.write(KEY, pieces(b"x"))
    store.write("canary", pieces(b"y"))
    prefix, name = KEY.rsplit("/", 1)
    assert files_below(store.root) == sorted(
        [store.root / prefix / "3" / "3f" / name, store.root / "c" / "ca" / "canary"]
    )
    assert {found.key: found.num_bytes for found in store.objects()} == {KEY: 1, "canary": 1}


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/../b", "a/.b", "a b", "a\nb", "ä", "a" * 201])
def test_key_that_could_lead_elsewhere_is_refused(tmp_path, key):
    store = make(tmp_path)
    for call in (store.holds, store.read, store.remove, lambda key: store.write(key, [])):
        with pytest.raises(ValueError, match="is no key"):
            call(key)
    assert files_below(tmp_path) == []


def test_files_and_folders_are_for_this_user_alone(tmp_path):
    store = make(tmp_path)
    before = os.umask(0)
    try:
        store.write(KEY, pieces(b"x"))
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in store.root.rglob("*") if path.is_dir()}
    assert modes == {0o700}
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files_below(store.root)} == {0o600}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_directory_and_objects_of_another_user_are_refused(tmp_path):
    store = make(tmp_path)
    store.write(KEY, pieces(b"mine"))
    store.write(OTHER, pieces(b"theirs"))
    (theirs,) = (path for path in files_below(store.root) if path.name == OTHER.rsplit("/", 1)[1])
    os.chown(theirs, 12345, -1)
    assert store.holds(KEY)
    assert not store.holds(OTHER)
    assert store.read_into(OTHER, memoryview(bytearray(9))) == -1
    assert [found.key for found in store.objects()] == [KEY]
    assert make(tmp_path, trust_others=True).read(OTHER) == b"theirs"
    os.chown(store.root, 12345, -1)
    with pytest.raises(TransferError, match="belongs to user 12345, not to 0"):
        store.check()
    make(tmp_path, trust_others=True).check()


@pytest.mark.parametrize("in_the_way", ["link", "pipe", "folder"])
@pytest.mark.representatives(3)
def test_what_lies_in_the_way_of_an_object_is_a_miss_that_blocks_nobody(tmp_path, in_the_way):
    store, secret = make(tmp_path), tmp_path / "secret"
    store.write(KEY, pieces(b"old"))
    (file,) = files_below(store.root)
    file.unlink()
    secret.write_text("secret")
    {"link": lambda: file.symlink_to(secret), "pipe": lambda: os.mkfifo(file), "folder": file.mkdir}[in_the_way]()
    assert store.read_into(KEY, memoryview(bytearray(9))) == -1
    assert not store.holds(KEY)
    assert list(store.objects()) == []
    if in_the_way == "folder":
        store.remove(KEY)
        return
    store.write(KEY, pieces(b"new"))
    assert (store.read(KEY), secret.read_text()) == (b"new", "secret")


@pytest.mark.parametrize("level", [1, 2, 3])
def test_what_lies_in_a_linked_folder_is_not_there(tmp_path, monkeypatch, level):
    monkeypatch.setattr(object_directory, "_LINK_CHECK_S", 0.0)
    store = make(tmp_path)
    store.write(KEY, pieces(b"old"))
    (file,) = files_below(store.root)
    folder = file.parents[level - 1]
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert file.read_bytes() == b"old"
    assert not store.holds(KEY)
    assert store.read_into(KEY, memoryview(bytearray(9))) == -1
    assert store.read(KEY) is None
    assert list(store.objects()) == []
    store.remove(KEY)
    with pytest.raises(TransferError, match=r"is a link.*Remove the link") as caught:
        store.write(KEY, pieces(b"new"))
    assert caught.value.cause == "unreachable"
    assert file.read_bytes() == b"old"
    folder.unlink()
    store.write(KEY, pieces(b"new"))
    assert store.read(KEY) == b"new"


def as_child(work) -> int:
    """Run something in a forked process; returns its exit code."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=work)
    child.start()
    child.join(30)
    assert child.exitcode is not None
    return child.exitcode


def limited_write(root: Path) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    store = ObjectDirectory(root)
    store.write(KEY, pieces(bytes(4000)))
    try:
        store.write(OTHER, pieces(bytes(4000), bytes(4000)))
    except TransferError as error:
        sys.exit(0 if error.cause == "full" and "EFBIG" in str(error) else 3)


def test_object_that_finds_no_room_leaves_nothing_behind(tmp_path):
    store = make(tmp_path)
    assert as_child(lambda: limited_write(store.root)) == 0
    assert [(found.key, found.num_bytes) for found in store.objects()] == [(KEY, 4000)]
    assert len(files_below(store.root)) == 1


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    home = tmp_path / "disk"
    home.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs", str(home)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    yield home
    subprocess.run(["umount", "--lazy", str(home)], capture_output=True, check=False)


def test_disk_that_becomes_read_only_serves_what_it_has(small_disk):
    store = ObjectDirectory(small_disk / "store")
    store.write(KEY, pieces(b"kept"))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, capture_output=True)
    assert store.read(KEY) == b"kept"
    for call in (lambda: store.write(OTHER, pieces(b"x")), lambda: store.remove(KEY)):
        with pytest.raises(TransferError, match=r"Read-only file system \(EROFS\)") as caught:
            call()
        assert caught.value.cause == "unreachable"


def test_nothing_is_written_where_the_disk_is_no_longer_mounted(small_disk):
    store = ObjectDirectory(small_disk)
    store.write(KEY, pieces(b"on the disk"))
    subprocess.run(["umount", str(small_disk)], check=True, capture_output=True)
    with pytest.raises(TransferError, match="another device than before"):
        store.write(KEY, pieces(b"below the mount point"))
    assert not store.holds(KEY)
    assert files_below(small_disk) == []


def write_many(root: Path, number: int) -> None:
    store = ObjectDirectory(root)
    for _ in range(200):
        store.write(KEY, pieces(bytes([number]) * 5000, bytes([number]) * 5000))


def test_readers_see_one_whole_object_while_two_processes_write_it(tmp_path):
    store = make(tmp_path)
    store.write(KEY, pieces(bytes(10_000)))
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(store.root, number)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        data = store.read(KEY)
        assert data is not None
        assert (len(data), len(set(data))) == (10_000, 1)
        seen.add(data[0])
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert seen & {1, 2}
    assert len(files_below(store.root)) == 1


def write_for_ever(root: Path, ready) -> None:
    store, number = ObjectDirectory(root), 0
    while True:
        number += 1
        store.write(f"k/{number:08d}", pieces(bytes([number % 251]) * 4_000_000))
        ready.set()


def test_writer_that_is_killed_leaves_no_half_object(tmp_path):
    store = make(tmp_path)
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        ready = context.Event()
        writer = context.Process(target=write_for_ever, args=(store.root, ready))
        writer.start()
        assert ready.wait(30)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join(30)
        for found in store.objects():
            data = store.read(found.key)
            assert data is not None
            assert (len(data), len(set(data))) == (4_000_000, 1)
            store.remove(found.key)


def test_folders_that_somebody_removes_are_made_again(tmp_path):
    import shutil

    store = make(tmp_path)
    store.write(KEY, pieces(b"x"))
    shutil.rmtree(store.root)
    assert not store.holds(KEY)
    assert store.read(KEY) is None
    store.write(KEY, pieces(b"y"))
    assert store.read(KEY) == b"y"


def used(store: ObjectDirectory) -> dict[str, int]:
    return {found.key: found.used_ns for found in store.objects()}


def test_object_that_is_read_counts_as_used_now_and_keeps_its_place_among_others(tmp_path):
    store, third, second_ns = make(tmp_path), KEY[:-1] + "c", 10**9
    long_ago_ns = time.time_ns() // 60_000_000_000 * 60_000_000_000 - 10**12 // 60 * 60
    for key, later in ((KEY, 20), (OTHER, 19), (third, 18)):
        store.write(key, pieces(b"x"), used_ns=long_ago_ns + later * second_ns)
    store.read(third)
    assert store.read(KEY) == b"x"
    noted = used(store)
    assert time.time_ns() - noted[KEY] < 130 * second_ns
    assert 1.9 * second_ns < (noted[KEY] - noted[third]) % (60 * second_ns) < 2.1 * second_ns
    assert time.time_ns() - noted[OTHER] > 900 * second_ns
    store.read(KEY)
    assert used(store) == noted, "it is noted only now and then"


def test_object_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (calls.append(name), real(*args))[1])
    make(tmp_path).write(KEY, pieces(b"x"))
    assert calls == ["replace"]
    make(tmp_path, fsync=True).write(KEY, pieces(b"x"))
    assert calls == ["replace", "fsync", "replace", "fsync"]


def owner_of(root: Path, *, trust_others: bool = False) -> DirectoryOwner:
    return DirectoryOwner(root, trust_others=trust_others)


def test_missing_directory_is_made_for_its_user_alone(tmp_path):
    root = tmp_path / "above" / "store"
    owner_of(root).check()
    assert root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_directory_that_everybody_may_write_to_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(TransferError, match=f"mode {mode:04o}"):
        owner_of(tmp_path).check()
    owner_of(tmp_path, trust_others=True).check()


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o770])
def test_directory_that_others_may_at_most_read_is_used(tmp_path, mode):
    tmp_path.chmod(mode)
    owner_of(tmp_path).check()


def test_plain_files_of_this_user_count_and_nothing_else(tmp_path):
    owner, file = owner_of(tmp_path), tmp_path / "file"
    file.touch()
    assert owner.owns(file.stat())
    assert not owner.owns(tmp_path.stat())
    (tmp_path / "link").symlink_to(file)
    assert not owner.owns((tmp_path / "link").lstat())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_files_of_others_count_if_they_are_trusted(tmp_path):
    file = tmp_path / "file"
    file.touch()
    os.chown(file, 12345, -1)
    assert not owner_of(tmp_path).owns(file.stat())
    assert owner_of(tmp_path, trust_others=True).owns(file.stat())


def test_directory_on_another_device_than_before_is_refused(tmp_path, monkeypatch):
    owner = owner_of(tmp_path)
    owner.check()
    monkeypatch.setattr(owner, "_device", -1)
    with pytest.raises(TransferError, match=r"another device than before\. Mount"):
        owner.check()


@pytest.mark.parametrize(
    ("number", "cause", "words"),
    [
        (errno.ENOSPC, "full", "is full: No space left on device (ENOSPC). Free space"),
        (errno.EDQUOT, "full", "is full: Disk quota exceeded (EDQUOT). Free space"),
        (errno.EFBIG, "full", "is full: File too large (EFBIG)"),
        (errno.EROFS, "unreachable", "Read-only file system (EROFS). User"),
        (errno.EACCES, "unreachable", "Permission denied (EACCES). User"),
        (errno.ESTALE, "unreachable", "(ESTALE). Check its path and its file system."),
        (errno.EIO, "unreachable", "Input/output error (EIO). Check"),
    ],
)
def test_errors_are_said_with_their_cause_and_what_to_do(tmp_path, number, cause, words):
    error = owner_of(tmp_path).in_words(OSError(number, os.strerror(number)))
    assert error.cause == cause
    assert words in str(error)
    assert str(tmp_path) in str(error)


def test_error_without_a_number_is_said_too(tmp_path):
    assert "odd (no number)" in str(owner_of(tmp_path).in_words(OSError("odd")))
