"""Compiles what the operator launches for GPUs that are not there; prints the shared memory and the number of variants of each."""

from __future__ import annotations

import functools
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget

from trencadis_torch.attention import triton as triton_attention
from trencadis_torch.attention import triton_kernels

KINDS = {
    "half": (torch.float16, torch.float16, 8, 4, 128, 0),
    "int8": (torch.bfloat16, torch.int8, 2, 3, 64, 7),
    "float": (torch.float32, torch.float32, 2, 1, 32, 0),
}


class Driver:
    """Says which GPU there is."""

    def __init__(self, capability):
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, _):
        return 0

    def get_current_target(self):
        return self._target


class Kernel:
    """Compiles instead of launching."""

    def __init__(self, kernel):
        self._kernel = kernel
        self.compiled = set()

    def __getitem__(self, grid):
        return functools.partial(self._compile, grid)

    def _compile(self, grid, *args, **options):
        assert all(0 < size < 2**16 for size in grid[1:])
        found = self._kernel.warmup(*args, grid=grid, **options)
        self.compiled.add((found.hash, found.metadata.shared, "cubin" in found.asm))


def main(capability, *names):
    triton.runtime.driver.set_active(Driver(int(capability)))
    for name in names:
        dtype, cache_dtype, kv_heads, groups, dim, window = KINDS[name]
        kernels = {
            "attend_kernel": Kernel(triton_kernels.attend_kernel),
            "merge_kernel": Kernel(triton_kernels.merge_kernel),
        }
        triton_attention.triton_kernels = type("Kernels", (), kernels)
        held = dim + 4 * (cache_dtype is torch.int8)
        cache = torch.zeros(9, 16, kv_heads, held, dtype=cache_dtype)
        tables = torch.zeros(64, 8, dtype=torch.int32)
        for batch_size in (1, 2, 16, 64):
            for most in (1, 2, 16, 17, 500):
                query = torch.zeros(batch_size * most, kv_heads * groups, dim, dtype=dtype)
                sequences = torch.zeros(batch_size, 4, dtype=torch.int32)
                triton_attention.launch(
                    query, cache, cache, tables, sequences, torch.empty_like(query), most, window, 108, [0.1, 0.0], None
                )
        for kernel in kernels.values():
            assert all(is_binary for _, _, is_binary in kernel.compiled)
        counts = [len(kernel.compiled) for kernel in kernels.values()]
        shared = max(size for kernel in kernels.values() for _, size, _ in kernel.compiled)
        sys.stdout.write(f"{name} {counts[0]} {counts[1]} {shared}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
