from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

_PROGRAM = """
import ctypes, sys
from trencadis_server.commands.serve import give_back_large_blocks
if sys.argv[1] == "on":
    assert give_back_large_blocks()
libc = ctypes.CDLL("libc.so.6")
class Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]
libc.mallinfo.restype = Counts
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.free(libc.malloc(20 << 20))
before = libc.mallinfo().hblks
libc.malloc(10 << 20)
print(libc.mallinfo().hblks - before)
"""


def has_mallopt() -> bool:
    try:
        return hasattr(ctypes.CDLL("libc.so.6"), "mallopt")
    except OSError:
        return False


@pytest.mark.skipif(not has_mallopt(), reason="the C library is not glibc")
@pytest.mark.parametrize(("switch", "num_mapped"), [("off", 0), ("on", 1)])
def test_a_large_block_is_mapped_by_itself_after_a_larger_one_was_freed(switch: str, num_mapped: int) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, switch], capture_output=True, text=True, check=True)
    assert int(done.stdout) == num_mapped
