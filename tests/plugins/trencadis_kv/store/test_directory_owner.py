from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trencadis.errors import TransferError
from trencadis_kv.store.directory_owner import DirectoryOwner


def make(root: Path, *, trust_others: bool = False) -> DirectoryOwner:
    return DirectoryOwner(root, trust_others=trust_others)


def test_missing_directory_is_made_for_its_user_alone(tmp_path):
    root = tmp_path / "above" / "store"
    make(root).check()
    assert root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_directory_that_everybody_may_write_to_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(TransferError, match=f"mode {mode:04o}"):
        make(tmp_path).check()
    make(tmp_path, trust_others=True).check()


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o770])
def test_directory_that_others_may_at_most_read_is_used(tmp_path, mode):
    tmp_path.chmod(mode)
    make(tmp_path).check()


def test_plain_files_of_this_user_count_and_nothing_else(tmp_path):
    owner, file = make(tmp_path), tmp_path / "file"
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
    assert not make(tmp_path).owns(file.stat())
    assert make(tmp_path, trust_others=True).owns(file.stat())


def test_directory_on_another_device_than_before_is_refused(tmp_path, monkeypatch):
    owner = make(tmp_path)
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
    error = make(tmp_path).in_words(OSError(number, os.strerror(number)))
    assert error.cause == cause
    assert words in str(error)
    assert str(tmp_path) in str(error)


def test_error_without_a_number_is_said_too(tmp_path):
    assert "odd (no number)" in str(make(tmp_path).in_words(OSError("odd")))
