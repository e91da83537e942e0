from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from support.backends.paged_attention_scene import Sequence, Shape, attend
from trencadis.errors import BackendError, InternalError
from trencadis_torch import instruction_sets, native_build
from trencadis_torch.attention import native as native_attention
from trencadis_torch.attention.choice import choose_kernel
from trencadis_torch.attention.native import NativeAttention
from trencadis_torch.instruction_sets import texts_of
from trencadis_torch.native_build import (
    Source,
    find_compiler,
    instructions,
    limit_instructions,
    load_library,
    openmp_runtime,
    prepare,
)

TEXT = '#include <cstdint>\nextern "C" int64_t answer() { return 42; }\n'
LAYERS: tuple = ()
CPU = torch.device("cpu")

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "one.cpp"
    path.write_text(TEXT)
    return path


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "kept"


@pytest.fixture
def without_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def fresh_kernel(monkeypatch, tmp_path):
    """Nothing is compiled yet, in this process or in the cache."""
    native_attention._KERNELS.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    native_attention._KERNELS.clear()


def compiler_that(path: Path, does: str) -> str:
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return str(path)


@needs_compiler
def test_source_is_compiled_once(source, kept, monkeypatch):
    assert load_library(Source(source), directory=kept).answer() == 42
    (built,) = kept.iterdir()
    monkeypatch.setattr(native_build, "_build", lambda *_: pytest.fail("built again"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a compiler was started"))
    assert load_library(Source(source), directory=kept).answer() == 42
    assert list(kept.iterdir()) == [built]


@needs_compiler
def test_changed_source_or_header_of_a_header_is_another_library(source, kept):
    source.write_text('#include "first.h"\n' + TEXT.replace("42", "ANSWER"))
    source.with_name("first.h").write_text('#pragma once\n#include "first.h"\n#include "second.h"\n')
    for answer, of_source in ((42, ""), (43, ""), (43, " + 1")):
        source.with_name("second.h").write_text(f"#define ANSWER {answer}\n")
        source.write_text(source.read_text().replace("ANSWER", f"ANSWER{of_source}"))
        assert load_library(Source(source), directory=kept).answer() == answer + bool(of_source)
    assert len(list(kept.iterdir())) == 3


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "text"])
def test_damaged_library_is_built_again(source, kept, damage):
    load_library(Source(source), directory=kept)
    (built,) = kept.iterdir()
    content = built.read_bytes()
    middle = len(content) // 2
    broken = {
        "cut": content[:middle],
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "empty": b"",
        "text": b"no library",
    }
    # Another file in its place: what this process has mapped stays as it is.
    built.unlink()
    built.write_bytes(broken[damage])
    assert load_library(Source(source), directory=kept).answer() == 42
    assert len(built.read_bytes()) == len(content)
    assert list(kept.iterdir()) == [built]


@needs_compiler
def test_processes_may_build_at_the_same_time(source, kept):
    program = (
        "import sys; from pathlib import Path; from trencadis_torch.native_build import Source, load_library; "
        "print(load_library(Source(Path(sys.argv[1])), directory=Path(sys.argv[2])).answer())"
    )
    command = [sys.executable, "-c", program, str(source), str(kept)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [one.communicate()[0].strip() for one in running] == ["42", "42"]
    assert [path.suffix for path in kept.iterdir()] == [".so"]


@needs_compiler
def test_directory_that_cannot_be_made_does_not_matter(source, tmp_path):
    (tmp_path / "file").write_text("")
    assert load_library(Source(source), directory=tmp_path / "file" / "kept").answer() == 42


@needs_compiler
def test_broken_source_is_an_error_with_the_compilers_words(source, kept):
    source.write_text("no C++ at all")
    with pytest.raises(BackendError, match=r"ended with \d+:[\s\S]*error") as caught:
        load_library(Source(source), directory=kept)
    assert "apt install g++" in caught.value.hint
    assert list(kept.iterdir()) == []


def test_without_a_compiler_the_error_says_what_to_install(source, kept, without_compiler):
    assert find_compiler() is None
    with pytest.raises(BackendError, match="no C\\+\\+ compiler in PATH") as caught:
        load_library(Source(source), directory=kept)
    assert "apt install g++" in caught.value.hint


def test_named_compiler_comes_first(monkeypatch, tmp_path):
    named = compiler_that(tmp_path / "mine", "exit 0")
    monkeypatch.setenv("CXX", f"{named} -m64")
    assert find_compiler() == named


@pytest.mark.parametrize(
    ("does", "words"), [("echo out of order >&2; exit 3", r"ended with 3:\nout of order"), (None, r"no C\+\+ compiler")]
)
def test_compiler_that_fails_or_is_not_there_leaves_auto_with_gathering_and_stops_native(
    monkeypatch, tmp_path, fresh_kernel, caplog, does, words
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if does:
        monkeypatch.setenv("CXX", compiler_that(tmp_path / "broken", does))
        monkeypatch.setenv("PATH", os.defpath)
    options = {"device": CPU, "layout": "ragged", "layers": LAYERS}
    assert choose_kernel("auto", **options) is None
    assert len(re.findall(words.replace(r"\n", r"\s+"), caplog.text)) == 1
    assert "apt install g++" in caplog.text
    with pytest.raises(BackendError, match=words):
        choose_kernel("native", **options)


@needs_compiler
@pytest.mark.skipif(not openmp_runtime(), reason="torch without OpenMP")
def test_library_brings_no_second_pool_of_threads(source, kept):
    before = openmp_runtime()
    source.write_text(
        '#include <cstdint>\nextern "C" int64_t answer() {\n  int64_t n = 0;\n'
        "#pragma omp parallel for reduction(+ : n)\n  for (int i = 0; i < 1000; i++) n += 1;\n  return n;\n}\n"
    )
    library = load_library(Source(source), directory=kept)
    library.answer.restype = ctypes.c_int64
    assert library.answer() == 1000
    mapped = Path("/proc/self/maps").read_text().splitlines()
    runtimes = {os.path.realpath(line.split()[-1]) for line in mapped if native_build._RUNTIME.search(line)}
    assert runtimes == {os.path.realpath(before)}


@pytest.fixture
def no_kernels_yet(monkeypatch):
    """Nothing is loaded yet in this process, so that its instructions may be limited."""
    monkeypatch.setattr(native_build, "_LOADED", set())
    monkeypatch.setattr(native_build, "_most", "auto")


def has(name):
    one = instruction_sets.SETS[instruction_sets.NAMES.index(name)]
    return one.machine == platform.machine() and one.all_flags <= instruction_sets.cpu_flags()


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", ["sse4", "avx2"])
def test_older_instructions_give_the_same_outputs(kept, monkeypatch, no_kernels_yet, name):
    """Vectors of 4 without conversions in hardware, or of 8; -O0 because it compiles in a tenth of the time."""
    if not has(name):
        pytest.skip(f"a CPU without {name}")
    limit_instructions(name)
    monkeypatch.setattr(instruction_sets, "FLAGS", (*instruction_sets.FLAGS, "-O0"))
    kernel = NativeAttention(load_library(Source(native_attention.SOURCE), directory=kept))
    for cache_dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8):
        shape = Shape(key_dim=24, value_dim=20, window=600, cache_dtype=cache_dtype)
        sequences = [Sequence(shape, context=700, length=3, seed=1), Sequence(shape, context=0, length=70, seed=2)]
        sequences.append(Sequence(shape, context=130, length=1, seed=3))
        found, _ = attend(shape, sequences, native=kernel, softcap=2.0)
        expected, _ = attend(shape, sequences, native=True, softcap=2.0)
        # Another instruction may round a level of int8 the other way.
        torch.testing.assert_close(found, expected, atol=2e-3 if cache_dtype is torch.int8 else 1e-5, rtol=1e-5)


# ------------------------------------------------------------------------------------------ whose code is executed


def planted(source: Path, kept: Path) -> Path:
    """Return a library that lies where the cache looks for another's, whole and with its digest, and answers 13."""
    texts = texts_of(source)
    chosen = instruction_sets.narrowed(instructions(), texts)
    key = native_build._key(Source(source), texts, find_compiler(), chosen, openmp_runtime())
    kept.mkdir(mode=0o700, exist_ok=True)
    built = kept / f"one-{key}.so"
    other = source.with_name("other.cpp")
    other.write_text(TEXT.replace("42", "13"))
    elsewhere = source.with_name("elsewhere")
    load_library(Source(other), directory=elsewhere)
    (found,) = elsewhere.iterdir()
    built.write_bytes(found.read_bytes())
    built.chmod(0o700)
    return built


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Directories for temporary files of this test."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(native_build.tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def _linked(built):
    built.rename(built.parent.with_name("planted.so"))
    built.symlink_to(built.parent.with_name("planted.so"))


SPOILT = {
    "nothing": lambda built: None,
    "directory 0777": lambda built: built.parent.chmod(0o777),
    "directory 0770": lambda built: built.parent.chmod(0o770),
    "directory 1777": lambda built: built.parent.chmod(0o1777),
    "directory above": lambda built: built.parents[1].chmod(0o777),
    "file": lambda built: built.chmod(0o766),
    "link": _linked,
}


@needs_compiler
@pytest.mark.representatives(len(SPOILT))
@pytest.mark.parametrize("name", SPOILT)
def test_nothing_is_loaded_that_others_may_write_to(source, tmp_path, elsewhere, caplog, name):
    kept = tmp_path / "above" / "kept"
    kept.mkdir(parents=True, mode=0o700)
    built = planted(source, kept)
    SPOILT[name](built)
    assert load_library(Source(source), directory=kept).answer() == (13 if name == "nothing" else 42)
    assert not built.is_symlink()
    if name.startswith("directory") and name[-1] != "e":
        assert f"may be written to by others (mode {name[-4:]})" in caplog.text
        assert "XDG_CACHE_HOME" in caplog.text


@needs_compiler
def test_nothing_is_loaded_from_a_directory_or_a_file_of_another_user(source, kept, elsewhere, monkeypatch, caplog):
    built = planted(source, kept)
    real = os.fstat

    class Facts:
        st_uid, st_mode = 12345, 0o100700

    monkeypatch.setattr(native_build.os, "fstat", lambda file: Facts)
    assert native_build._load(built, "") is None
    monkeypatch.setattr(native_build.os, "fstat", real)
    monkeypatch.setattr(native_build, "_TRUSTED", frozenset({12345}))
    assert "belongs to user" in native_build.why_unsafe(kept)


@needs_compiler
def test_a_cache_that_cannot_be_written_to_serves_what_it_has_and_leaves_no_new_directory_each_time(
    source, kept, elsewhere, monkeypatch
):
    load_library(Source(source), directory=kept)
    real = os.access
    monkeypatch.setattr(
        native_build.os, "access", lambda path, mode: Path(path) != kept and real(path, mode)
    )  # as a read-only file system has it, also for root
    builds = []
    once = native_build._build
    monkeypatch.setattr(native_build, "_build", lambda *a: builds.append(a) or once(*a))
    assert load_library(Source(source), directory=kept).answer() == 42
    assert (builds, list(elsewhere.iterdir())) == ([], [])
    source.write_text(TEXT.replace("42", "43"))
    for _ in range(3):
        assert load_library(Source(source), directory=kept).answer() == 43
    assert len(builds) == 1
    assert [path.name for path in elsewhere.iterdir()] == [f"trencadis-{os.geteuid()}"]


# ---------------------------------------------------------------------------------------------------- side by side


@needs_compiler
def test_libraries_are_compiled_side_by_side_each_once(tmp_path, kept, monkeypatch):
    """Each compiler waits for the other to begin: one after the other would never end."""
    barrier = threading.Barrier(2, timeout=60)
    once, built = native_build._build, []

    def build(*arguments):
        barrier.wait()
        built.append(arguments)
        once(*arguments)

    monkeypatch.setattr(native_build, "_build", build)
    sources = []
    for number in (1, 2):
        file = tmp_path / f"number{number}.cpp"
        file.write_text(TEXT.replace("42", "NUMBER"))
        sources.append(Source(file, (f"NUMBER={number}",)))
    assert not prepare(sources, directory=kept)
    assert [load_library(source, directory=kept).answer() for source in sources] == [1, 2]
    assert len(built) == 2
    assert prepare(sources, directory=kept)


def test_a_kernel_is_compiled_for_the_caches_that_a_model_has(monkeypatch, fresh_kernel):
    asked = []
    monkeypatch.setattr(native_attention, "NativeAttention", lambda library: object())
    monkeypatch.setattr(native_attention, "load_library", lambda source: asked.append(source.defines))
    pair = native_attention.compiled_kernel(frozenset({torch.float32, torch.int8}))
    assert native_attention.compiled_kernel(frozenset({torch.int8})) is pair
    assert native_attention.compiled_kernel(frozenset({torch.bfloat16})) is not pair
    assert asked == [("TRENCADIS_FORMATS=9",), ("TRENCADIS_FORMATS=4",)]


@needs_compiler
def test_a_cache_that_a_kernel_was_not_compiled_for_is_an_error_not_other_numbers():
    shape = Shape(key_dim=24, value_dim=20, cache_dtype=torch.int8)
    kernel = NativeAttention(load_library(native_attention.source_for(frozenset({torch.float32}))))
    with pytest.raises(InternalError, match=r"was not compiled for a cache of torch\.int8"):
        attend(shape, [Sequence(shape, context=7, length=3, seed=1)], native=kernel)


# ------------------------------------------------------------------------------------- which instructions are used


@pytest.fixture
def prebuilt(source, monkeypatch, tmp_path, no_kernels_yet):
    """A folder as a wheel brings it, with a library for each set of this machine, which says how many sets are better than none."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    source.write_text(
        TEXT.replace("42", "ANSWER") + f"// {' '.join(m for one in instruction_sets.SETS for m in one.macros)}\n"
    )
    monkeypatch.setattr(native_build, "PREBUILT", folder)
    texts = texts_of(source)
    for number, one in enumerate(instruction_sets.sets_for(texts, platform.machine())):
        compiled, library = folder / "one.o", folder / instruction_sets.library_name(source, one, texts)
        compile_it = instruction_sets.compile_command(
            find_compiler(), source, compiled, options=(), defines=[f"ANSWER={number}"]
        )
        subprocess.run(compile_it, check=True)
        subprocess.run(instruction_sets.link_command(find_compiler(), compiled, library), check=True)
    return [one.name for one in instruction_sets.sets_for(texts, platform.machine())]


@needs_compiler
def test_a_library_of_the_wheel_needs_no_compiler(source, kept, prebuilt, without_compiler):
    assert prebuilt[load_library(Source(source), directory=kept).answer()] == instructions().name
    assert not kept.exists()


@needs_compiler
def test_a_library_of_the_wheel_is_not_for_another_text(source, kept, prebuilt, without_compiler):
    source.write_text(source.read_text() + "// changed\n")
    with pytest.raises(BackendError, match=r"no C\+\+ compiler"):
        load_library(Source(source), directory=kept)


@needs_compiler
def test_a_library_of_the_wheel_that_is_damaged_is_compiled(source, kept, prebuilt, caplog):
    for library in native_build.PREBUILT.glob("*.so"):
        library.write_bytes(b"no library")
    assert load_library(Source(source, ("ANSWER=42",)), directory=kept).answer() == 42
    assert "of the package cannot be loaded, and is compiled" in caplog.text


@needs_compiler
@pytest.mark.representatives(9)
@pytest.mark.parametrize("name", instruction_sets.NAMES)
def test_no_better_instructions_than_the_named_ones_are_used(source, kept, prebuilt, name):
    if not has(name):
        with pytest.raises(BackendError, match=f'instructions = "{name}": this CPU .* does not have {name}'):
            limit_instructions(name)
        return
    limit_instructions(name)
    assert prebuilt[load_library(Source(source), directory=kept).answer()] == name


@needs_compiler
def test_instructions_are_one_for_a_process(source, kept, no_kernels_yet):
    load_library(Source(source), directory=kept)
    limit_instructions("auto")
    with pytest.raises(BackendError, match='has loaded kernels with "auto" already'):
        limit_instructions("sse4")


GIVES, REFUSES = (24, 0, 0), (-1, 0, 0)
"""Calls of the system that answer 0, and that there is no such call."""


@pytest.fixture
def with_amx(monkeypatch, no_kernels_yet):
    """A CPU with AMX; returns what makes the system answer."""
    best, ask = instruction_sets.SETS[instruction_sets.NAMES.index("amx")], native_build.why_no_tiles
    monkeypatch.setattr(native_build, "_flags", lambda: best.all_flags)
    monkeypatch.setattr(platform, "machine", lambda: best.machine)
    ask.cache_clear()
    yield lambda call: monkeypatch.setattr(native_build, "_ASK_FOR_TILES", call)
    ask.cache_clear()


needs_linux = pytest.mark.skipif(
    (platform.machine(), sys.platform) != ("x86_64", "linux"), reason="numbers of calls are those of Linux on x86_64"
)


@needs_linux
def test_tiles_are_used_where_the_system_gives_them(with_amx, caplog):
    with_amx(GIVES)
    limit_instructions("amx")
    assert instructions().name == native_build.cpu_key() == "amx"
    assert not caplog.records


@needs_linux
def test_where_the_system_refuses_tiles_vectors_are_used_and_the_log_says_so(with_amx, caplog):
    with_amx(REFUSES)
    assert instructions().name == native_build.cpu_key() == "avx512_bf16"
    reason = "the system refuses the tiles of AMX to this process (Function not implemented)"
    assert [record.getMessage() for record in caplog.records] == [
        f"The CPU has AMX, but {reason}: products use vectors."
    ]
    with pytest.raises(BackendError, match=re.escape(f'instructions = "amx": {reason}.')):
        limit_instructions("amx")


@needs_linux
def test_the_system_is_asked_by_the_call_that_its_documents_name():
    """A CPU without AMX is refused; one with it may be, by a system that is older or a sandbox."""
    native_build.why_no_tiles.cache_clear()
    assert native_build.why_no_tiles() or "amx_tile" in instruction_sets.cpu_flags()


def test_nothing_is_asked_for_where_tiles_are_not_used(with_amx, monkeypatch):
    monkeypatch.setattr(native_build, "why_no_tiles", lambda: pytest.fail("asked"))
    limit_instructions("avx512_bf16")
    assert instructions().name == "avx512_bf16"
