from __future__ import annotations

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
from trencadis_kv.store.object_directory import ObjectDirectory

KEY = "kv1/default/" + "ab" * 16 + "/0.0.0-8/" + "3f9a" * 16
OTHER = KEY[:-1] + "b"


def make(root: Path, **options) -> ObjectDirectory:
    return ObjectDirectory(root / "store", **options)


def pieces(*parts: bytes) -> list[memoryview]:
    return [memoryview(part) for part in parts]


def files_below(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_object_comes_back_in_one_piece(tmp_path):
    store = make(tmp_path)
    store.write(KEY, pieces(b"head", b"", b"er and payload"))
    target = bytearray(30)
    assert store.read_into(KEY, memoryview(target)) == 18
    assert bytes(target[:18]) == b"header and payload"
    assert store.read(KEY) == b"header and payload"
    assert store.holds(KEY)


def test_empty_object_is_there(tmp_path):
    store = make(tmp_path)
    store.write(KEY, [])
    assert store.holds(KEY)
    assert store.read_into(KEY, memoryview(bytearray(1))) == 0


def test_object_that_is_larger_than_the_target_counts_as_not_there(tmp_path):
    store = make(tmp_path)
    store.write(KEY, pieces(b"12345"))
    assert store.read_into(KEY, memoryview(bytearray(4))) == -1
    assert store.read_into(KEY, memoryview(bytearray(5))) == 5


def test_second_write_replaces_the_first_and_a_removed_object_is_gone(tmp_path):
    store = make(tmp_path)
    store.write(KEY, pieces(b"first and long"))
    store.write(KEY, pieces(b"second"))
    assert store.read(KEY) == b"second"
    store.remove(KEY)
    store.remove(KEY)
    assert not store.holds(KEY)
    assert store.read(KEY) is None


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


def test_directory_that_everybody_may_write_to_is_refused(tmp_path):
    store = make(tmp_path)
    store.root.mkdir()
    store.root.chmod(0o1777)
    with pytest.raises(TransferError, match=r"every user may write to it \(mode 1777\).*trust_others") as caught:
        store.check()
    assert caught.value.cause == "unreachable"
    with pytest.raises(TransferError, match="everybody"):
        store.write(KEY, pieces(b"x"))
    make(tmp_path, trust_others=True).check()


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


def test_planted_link_is_not_followed_and_is_replaced_by_the_next_write(tmp_path):
    store = make(tmp_path)
    store.write(KEY, pieces(b"old"))
    (file,) = files_below(store.root)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    file.unlink()
    file.symlink_to(secret)
    assert not store.holds(KEY)
    assert store.read_into(KEY, memoryview(bytearray(9))) == -1
    assert list(store.objects()) == []
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


def test_named_pipe_folder_and_file_in_the_way_are_misses_that_block_nobody(tmp_path):
    store = make(tmp_path)
    store.write(KEY, pieces(b"old"))
    (file,) = files_below(store.root)
    file.unlink()
    os.mkfifo(file)
    assert store.read_into(KEY, memoryview(bytearray(9))) == -1
    file.unlink()
    file.mkdir()
    assert store.read_into(KEY, memoryview(bytearray(9))) == -1
    store.remove(KEY)
    file.rmdir()
    file.parent.rmdir()
    file.parent.write_text("in the way")
    assert store.read_into(KEY, memoryview(bytearray(9))) == -1
    assert not store.holds(KEY)
    with pytest.raises(TransferError) as caught:
        store.write(KEY, pieces(b"new"))
    assert caught.value.cause == "unreachable"


def test_path_that_is_no_directory_is_said(tmp_path):
    store = make(tmp_path)
    store.root.write_text("a file")
    with pytest.raises(TransferError, match=r"store cannot be used: File exists") as caught:
        store.check()
    assert caught.value.cause == "unreachable"


def as_nobody(tmp_path: Path, code: str) -> str:
    """Run Python as a user without rights, in a process of its own; returns what it prints."""
    prelude = (
        "import sys; sys.path[:0] = [sys.argv[2]]\n"
        "from pathlib import Path; from trencadis_kv.store.object_directory import ObjectDirectory\n"
        "import trencadis.errors as e, os\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "store = ObjectDirectory(Path(sys.argv[1]))\n"
    )
    core = str(Path(__file__).parents[4] / "core")
    command = [sys.executable, "-c", prelude + code, str(tmp_path / "store"), core]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_directory_that_this_user_cannot_read_or_write_is_said(tmp_path_factory):
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        home.chmod(0o755)
        tell = "try: {}\nexcept e.TransferError as error: print(error.cause, error)\n"
        store = home / "store"
        store.mkdir()
        os.chown(store, 65534, 65534)
        store.chmod(0o500)
        said = as_nobody(home, tell.format(f"store.write({KEY!r}, [memoryview(b'x')])"))
        assert "unreachable" in said
        assert "Permission denied (EACCES)" in said
        assert "User 65534 must be able to read and write there" in said
        store.chmod(0o000)
        said = as_nobody(home, tell.format(f"store.holds({KEY!r})"))
        assert "Permission denied (EACCES)" in said
        store.rmdir()
        assert "Permission denied" in as_nobody(home, tell.format("store.check()"))


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


def test_full_disk_is_said_and_room_that_is_made_is_used(small_disk):
    store = ObjectDirectory(small_disk / "store")
    store.write(KEY, pieces(bytes(700_000)))
    with pytest.raises(TransferError, match="is full: No space left on device") as caught:
        store.write(OTHER, pieces(bytes(700_000)))
    assert caught.value.cause == "full"
    assert len(files_below(store.root)) == 1
    store.remove(KEY)
    store.write(OTHER, pieces(bytes(700_000)))
    assert store.holds(OTHER)


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


def test_object_that_is_read_counts_as_used_now_and_keeps_its_place_among_others(tmp_path):
    store = make(tmp_path)
    long_ago_ns = time.time_ns() // 60_000_000_000 * 60_000_000_000 - 10**12 // 60 * 60
    store.write(KEY, pieces(b"x"), used_ns=long_ago_ns + 20 * 10**9)
    store.write(OTHER, pieces(b"x"), used_ns=long_ago_ns + 19 * 10**9)
    third = KEY[:-1] + "c"
    store.write(third, pieces(b"x"), used_ns=long_ago_ns + 18 * 10**9)
    store.read(third)
    assert store.read(KEY) == b"x"
    assert time.time_ns() - used(store)[KEY] < 130 * 10**9
    assert 1.9 * 10**9 < (used(store)[KEY] - used(store)[third]) % (60 * 10**9) < 2.1 * 10**9
    assert time.time_ns() - used(store)[OTHER] > 900 * 10**9


def test_use_is_noted_only_now_and_then(tmp_path):
    store = make(tmp_path)
    store.write(KEY, pieces(b"x"))
    before = used(store)
    store.read(KEY)
    assert used(store) == before


def used(store: ObjectDirectory) -> dict[str, int]:
    return {found.key: found.used_ns for found in store.objects()}


def test_object_is_on_the_disk_before_its_name_is(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, real=real: (calls.append(name), real(*args))[1])
    make(tmp_path).write(KEY, pieces(b"x"))
    assert calls == ["replace"]
    make(tmp_path, fsync=True).write(KEY, pieces(b"x"))
    assert calls == ["replace", "fsync", "replace", "fsync"]


def test_large_object_is_written_and_read_in_as_many_turns_as_it_takes(tmp_path, monkeypatch):
    store = make(tmp_path)
    real_writev, real_readv = os.writev, os.readv
    monkeypatch.setattr(os, "writev", lambda fd, parts: real_writev(fd, [parts[0][:3]]))
    monkeypatch.setattr(os, "readv", lambda fd, parts: real_readv(fd, [parts[0][:4]]))
    store.write(KEY, pieces(b"0123456789", b"abc"))
    assert store.read(KEY) == b"0123456789abc"
