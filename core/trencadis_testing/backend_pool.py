"""The tests of ``Backend.kv_cache``: part of the suite of the noun ``backend``."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from trencadis.errors import BackendError
from trencadis.interfaces import Backend, KVPool, SupportsKVPool
from trencadis_testing.backend_suite import BackendSuite
from trencadis_testing.driver import Work

__all__ = ["PoolTests"]

T = TypeVar("T")


class PoolTests(BackendSuite):
    """A block is its bytes: their copy elsewhere is the KV. A backend that does not offer its cache says so."""

    def test_bytes_of_blocks_brought_to_others_give_the_same_tokens(self) -> None:
        """Other sequences write to the old blocks meanwhile, and go on undisturbed."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        pool = _pool(backend)
        if pool is None:
            return
        driver.start(1, prompts[1])
        driver.start(2, prompts[2])
        driver.step([Work(1), Work(2, 9)])
        for row in (1, 2):
            driver.take_out(row, pool)
        driver.start(0, prompts[0])
        driver.start(3, prompts[2])
        driver.step([Work(0), Work(3)])
        for row in (2, 1):
            driver.bring_in(row, pool)
        self._finish(driver, prompts)

    def test_pool_of_any_thread_is_one(self) -> None:
        """Transfer threads read and write while the backend's own thread does something else."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        pool = _pool(backend)
        if pool is None or not pool.any_thread:
            return
        for row, prompt in enumerate(prompts):
            driver.start(row, prompt)
        driver.step([Work(row) for row in range(3)])
        for row in range(3):
            _elsewhere(lambda row=row: driver.take_out(row, pool))  # type: ignore[misc]
            _elsewhere(lambda row=row: driver.bring_in(row, pool))  # type: ignore[misc]
        self._finish(driver, prompts)

    def test_layout_says_how_many_bytes_a_block_has(self) -> None:
        """All of them are read and none after them; the block size is the one that was asked for."""
        backend, _ = self._loaded()
        self._driver(backend)
        pool = _pool(backend)
        if pool is None:
            return
        layout = pool.layout
        assert layout.block_size == self.block_size
        assert layout.first_head < layout.last_head
        assert layout.numerics, "the layout does not say whose low bits these are"
        pages = [np.full((3, layout.block_bytes + 8), fill, np.uint8) for fill in (0, 255)]
        for page in pages:
            pool.read_blocks([0, 1], page[:2, : layout.block_bytes])
        assert (pages[0][:2, :-8] == pages[1][:2, :-8]).all(), "some bytes of a block were not read"
        for page, fill in zip(pages, (0, 255), strict=True):
            assert (page[:, -8:] == fill).all(), "bytes after a block were written to"
            assert (page[2] == fill).all(), "a block was read that nobody asked for"

    def test_views_of_blocks_are_their_bytes(self) -> None:
        """What is sent from where it lies is what a copy would have been; a pool need not have views."""
        backend, prompts = self._loaded()
        driver = self._driver(backend)
        pool = _pool(backend)
        if pool is None or pool.view_blocks([0]) is None:
            return
        for row, prompt in enumerate(prompts):
            driver.start(row, prompt)
        driver.step([Work(row) for row in range(3)])
        blocks = driver.blocks(2)
        rows, views = np.empty((len(blocks), pool.layout.block_bytes), np.uint8), pool.view_blocks(blocks)
        pool.read_blocks(blocks, rows)
        assert rows[0].any(), "nothing was written to the first block"
        assert views is not None, "of some blocks there are views, of others not"
        assert [b"".join(pieces) for pieces in views] == [row.tobytes() for row in rows]
        self._finish(driver, prompts)


def _pool(backend: Backend) -> KVPool | None:
    """Return the pool; None for a backend that shows none."""
    try:
        return backend.kv_cache() if isinstance(backend, SupportsKVPool) else None
    except BackendError:
        return None


def _elsewhere(call: Callable[[], T]) -> T:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()
