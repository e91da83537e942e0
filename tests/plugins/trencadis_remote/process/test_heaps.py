from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from trencadis_remote.process.__main__ import NUM_HEAPS

_THREADS = """
import ctypes, sys, threading
if "share" in sys.argv:
    from trencadis_remote.process.__main__ import share_heaps
    print(share_heaps())
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
barrier = threading.Barrier(6)
def work():
    barrier.wait()
    libc.malloc(ctypes.c_size_t(100_000))
    barrier.wait()
threads = [threading.Thread(target=work) for _ in range(6)]
for one in threads:
    one.start()
for one in threads:
    one.join()
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="malloc is not glibc's")


def _num_heaps(*arguments: str, **environment: str) -> tuple[int, str]:
    clean = {name: value for name, value in os.environ.items() if name not in {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"}}
    printed = subprocess.run(
        [sys.executable, "-u", "-c", _THREADS, *arguments],
        env=clean | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return printed.count("<heap nr="), printed.partition("\n")[0]


def test_threads_of_the_engine_share_heaps() -> None:
    assert _num_heaps()[0] > NUM_HEAPS
    assert _num_heaps("share") == (NUM_HEAPS, "True")


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_ARENA_MAX": "4"}, {"GLIBC_TUNABLES": "glibc.malloc.arena_max=4"}],
    ids=lambda one: next(iter(one)),
)
def test_the_environment_has_the_last_word(environment: dict[str, str]) -> None:
    assert _num_heaps("share", **environment) == (4, "False")


def test_the_process_of_the_engine_shares_heaps() -> None:
    """Its first deed, before a thread is started: without a parent that speaks it ends afterwards."""
    code = """
import sys
from trencadis_remote.process import __main__ as child
child.share_heaps = lambda: print("shared", file=sys.stderr)
child.main()
"""
    told = subprocess.run(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert "shared" in told.stderr
