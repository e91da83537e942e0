from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from trencadis.caches import cache_directory, keep, kept

LARGE = 2**20


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory("native") == tmp_path / "trencadis" / "native"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory("native") == tmp_path / ".cache" / "trencadis" / "native"


@pytest.mark.parametrize("content", [b"", b"\0" * 32, os.urandom(1000)], ids=["none", "zeros", "some"])
def test_what_is_kept_comes_back_and_is_this_users_alone(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "new" / "one"
    keep(file, content, max_bytes=LARGE)
    assert kept(file) == content
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("at", [0, 3, 5, -1])
def test_a_damaged_file_is_none(tmp_path: Path, at: int) -> None:
    file = tmp_path / "one"
    keep(file, b"words", max_bytes=LARGE)
    whole = bytearray(file.read_bytes())
    whole[at] ^= 1
    file.write_bytes(whole)
    assert kept(file) is None
    file.write_bytes(whole[:10])
    assert kept(file) is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_to_is_none(tmp_path: Path, mode: int) -> None:
    keep(tmp_path / "one", b"words", max_bytes=LARGE)
    (tmp_path / "one").chmod(mode)
    assert kept(tmp_path / "one") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_none(tmp_path: Path) -> None:
    keep(tmp_path / "one", b"words", max_bytes=LARGE)
    os.chown(tmp_path / "one", 12345, -1)
    assert kept(tmp_path / "one") is None


def test_links_and_pipes_are_none(tmp_path: Path) -> None:
    keep(tmp_path / "one", b"words", max_bytes=LARGE)
    (tmp_path / "link").symlink_to(tmp_path / "one")
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert kept(tmp_path / "link") is None
    assert kept(tmp_path / "pipe") is None


def test_the_files_that_nobody_has_read_for_longest_go_when_there_are_too_many(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "abcd"]
    for number, file in enumerate(files[:3]):
        keep(file, bytes(100), max_bytes=3 * 132)
        os.utime(file, (number, number))
    kept(files[0])
    keep(files[3], bytes(100), max_bytes=3 * 132)
    assert sorted(tmp_path.iterdir()) == [files[0], files[2], files[3]]


def test_the_number_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trencadis.caches._MAX_FILES", 2)
    for number, name in enumerate("abc"):
        keep(tmp_path / name, b"", max_bytes=LARGE)
        os.utime(tmp_path / name, (number, number))
    keep(tmp_path / "d", b"", max_bytes=LARGE)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["c", "d"]


def test_what_is_larger_than_the_bound_is_not_kept_and_drives_nothing_out(tmp_path: Path) -> None:
    keep(tmp_path / "one", bytes(68), max_bytes=100)
    keep(tmp_path / "two", bytes(69), max_bytes=100)
    assert [file.name for file in tmp_path.iterdir()] == ["one"]


def test_a_place_that_cannot_be_written_to_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    keep(tmp_path / "file" / "one", b"words", max_bytes=LARGE)
    (tmp_path / "folder").mkdir()
    keep(tmp_path / "folder", b"words", max_bytes=LARGE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
