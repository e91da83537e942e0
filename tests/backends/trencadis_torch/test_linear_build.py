from __future__ import annotations

import shutil
import stat

import pytest

from trencadis_torch.linear_build import COMPILERS, SOURCE, build

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="there is no C++ compiler on this machine"
)


@pytest.fixture
def counted(tmp_path):
    """A compiler that writes a line into ``calls`` whenever it compiles."""
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit 0\necho called >> {tmp_path}/calls\n'
        'while [ "$1" != -o ]; do shift; done\nprintf library > "$2"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script, tmp_path / "calls"


def test_a_library_is_compiled_once(counted, tmp_path):
    compiler, calls = counted
    paths = [build(compiler=str(compiler), directory=tmp_path / "kept") for _ in range(3)]
    assert len(set(paths)) == 1
    assert paths[0].read_text() == "library"
    assert calls.read_text().splitlines() == ["called"]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == [paths[0].name]


def test_another_source_is_another_library(counted, tmp_path):
    changed = tmp_path / SOURCE.name
    changed.write_text(SOURCE.read_text() + "\n// changed\n")
    first = build(compiler=str(counted[0]), directory=tmp_path / "kept")
    assert build(changed, compiler=str(counted[0]), directory=tmp_path / "kept") != first


@needs_compiler
def test_source_that_does_not_compile_is_told_and_leaves_nothing(tmp_path, caplog):
    broken = tmp_path / "broken.cpp"
    broken.write_text("this is no program\n")
    assert build(broken, directory=tmp_path / "kept") is None
    assert "broken.cpp cannot be compiled" in caplog.text
    assert list((tmp_path / "kept").iterdir()) == []


def test_directory_that_cannot_be_made_is_told(tmp_path, counted, caplog):
    (tmp_path / "file").write_text("")
    assert build(compiler=str(counted[0]), directory=tmp_path / "file" / "kept") is None
    assert "cannot be compiled" in caplog.text


def test_no_compiler_is_no_error(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level("INFO", logger="trencadis.torch"):
        assert build(directory=tmp_path) is None
    assert "No C++ compiler" in caplog.text
