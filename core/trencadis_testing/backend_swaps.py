"""The tests of ``Backend.swap_blocks``: part of the suite of the noun ``backend``."""

from __future__ import annotations

from trencadis.errors import BackendError
from trencadis.interfaces import BlockCopies, SupportsSwapping
from trencadis_testing.backend_suite import BackendSuite
from trencadis_testing.driver import Work

__all__ = ["SwapTests"]


class SwapTests(BackendSuite):
    """Blocks come back from host memory as they were; a backend that does not swap says so."""

    def test_swapped_blocks_come_back_as_they_were(self) -> None:
        """Others write to the device blocks meanwhile, and the blocks that they come back to are others."""
        backend, prompts = self._loaded()
        if not backend.capabilities.swaps_blocks:
            self._expect_refusal()
            return
        driver = self._driver(backend)
        driver.start(1, prompts[1])
        driver.start(2, prompts[2])
        driver.step([Work(1), Work(2, 9)])
        driver.swap_out(1, 2)
        driver.start(0, prompts[0])
        driver.start(3, prompts[2])
        driver.step([Work(0), Work(3)])
        driver.swap_in(2, 1)
        self._finish(driver, prompts)

    def test_swap_is_in_order_with_batches(self) -> None:
        """The KV of the batch in flight is in what is copied out, and what comes in is there for the next batch."""
        backend, prompts = self._loaded()
        if not backend.capabilities.swaps_blocks:
            self._expect_refusal()
            return
        driver = self._driver(backend)
        for row, prompt in enumerate(prompts):
            driver.start(row, prompt)
        driver.step([Work(0), Work(1), Work(2, 20)])
        driver.submit([Work(0), Work(1), Work(2)])
        driver.swap_out(2)
        driver.start(3, prompts[2])
        driver.submit([Work(3), Work(0)])
        driver.wait()
        driver.swap_in(2)
        driver.submit([Work(2), Work(1)])
        driver.wait()
        driver.wait()
        self._finish(driver, prompts)

    def test_blocks_go_out_before_others_come_in(self) -> None:
        """One sequence comes back, in the same call, to the blocks that another one leaves."""
        backend, prompts = self._loaded()
        if not backend.capabilities.swaps_blocks:
            self._expect_refusal()
            return
        driver = self._driver(backend)
        for row, prompt in enumerate(prompts):
            driver.start(row, prompt)
        driver.step([Work(row) for row in range(3)])
        driver.swap_out(1)
        driver.step([Work(0), Work(2)])
        driver.exchange(leaves=2, comes=1)
        driver.step([Work(0), Work(1)])
        driver.swap_in(2)
        self._finish(driver, prompts)

    def test_nothing_to_swap_changes_nothing(self) -> None:
        """One of the two directions may be empty, or both."""
        backend, prompts = self._loaded()
        if not backend.capabilities.swaps_blocks:
            self._expect_refusal()
            return
        driver = self._driver(backend)
        for row, prompt in enumerate(prompts):
            driver.start(row, prompt)
        driver.step([Work(row) for row in range(3)])
        backend.swap_blocks(outs=BlockCopies.none(), ins=BlockCopies.none())
        self._finish(driver, prompts)

    def _expect_refusal(self) -> None:
        """A backend whose capabilities say that it does not swap lacks the call, or raises a BackendError."""
        backend, _ = self._loaded()
        self._driver(backend)
        if not isinstance(backend, SupportsSwapping):
            return
        try:
            backend.swap_blocks(outs=BlockCopies.none(), ins=BlockCopies.none())
        except BackendError:
            return
        raise AssertionError("the capabilities say swaps_blocks = False, but swap_blocks() returned")
