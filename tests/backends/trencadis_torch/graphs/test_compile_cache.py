from __future__ import annotations

import pytest
import torch

from trencadis.errors import BackendError
from trencadis_torch.graphs import compile_cache
from trencadis_torch.graphs.compile_cache import DIRECTORY, CompileCounts, set_up
from trencadis_torch.native_build import find_compiler

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on this machine")


@needs_compiler
def test_the_setting_comes_before_the_environment_and_that_before_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    environ = {DIRECTORY: str(tmp_path / "named")}
    assert set_up(str(tmp_path / "asked"), environ) == tmp_path / "asked"
    assert environ == {DIRECTORY: str(tmp_path / "asked")}
    environ = {DIRECTORY: str(tmp_path / "named")}
    assert set_up("", environ) == tmp_path / "named"
    environ = {}
    assert set_up("", environ) == tmp_path / "home" / "trencadis" / "inductor"
    assert environ[DIRECTORY] == str(tmp_path / "home" / "trencadis" / "inductor")
    assert (tmp_path / "asked").is_dir()


@needs_compiler
def test_torch_uses_the_compiler_that_our_kernels_use_and_keeps_what_it_makes(tmp_path):
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    set_up(str(tmp_path), {})
    assert inductor.cpp.cxx == (None, find_compiler())
    assert inductor.fx_graph_cache
    assert functorch.enable_autograd_cache


def test_without_a_compiler_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "find_compiler", lambda: None)
    with pytest.raises(BackendError, match=r'compile = "buckets": .* no C\+\+ compiler') as failed:
        set_up(str(tmp_path / "never"), {})
    assert "apt install g++" in failed.value.hint
    assert 'compile = "off"' in failed.value.hint
    assert not (tmp_path / "never").exists()


def test_without_the_headers_of_python_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "find_compiler", lambda: "/usr/bin/g++")
    monkeypatch.setattr(compile_cache.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(BackendError, match=r"Python\.h is not there") as failed:
        set_up(str(tmp_path), {})
    assert "python3-dev" in failed.value.hint


@needs_compiler
def test_a_torch_that_cannot_leave_out_guards_is_refused(tmp_path, monkeypatch):
    monkeypatch.delattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe")
    with pytest.raises(BackendError, match="cannot leave out guards"):
        set_up(str(tmp_path), {})


def test_counts_are_those_since():
    assert CompileCounts(5, 3).since(CompileCounts(2, 1)) == CompileCounts(3, 2)
    before = CompileCounts.now()
    torch.compile(lambda x: x * 3, backend="eager")(torch.zeros(2))
    assert CompileCounts.now().since(before) == CompileCounts(1, 0)
