"""What the suites of the noun ``backend`` are made of: a loaded backend, a driver, prompts and the text that must come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from trencadis.interfaces import AllocationPlan, Backend, KVWorkerSide, Sampler
from trencadis.records import Bucket, ModelFacts, ModelSource, Shape
from trencadis_testing.driver import BackendDriver, Work
from trencadis_testing.optional_calls import FullBackend, full_backend

__all__ = ["BackendSuite"]


class BackendSuite:
    """A base for suites; attributes and methods without a body here are those of ``BackendConformance``."""

    source: ModelSource
    block_size: int
    num_tokens: int
    _facts: ModelFacts
    _merged: bool = False

    def make(self) -> Backend:
        """Return a new backend, not loaded."""
        raise NotImplementedError

    def reference(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """Return the greedy tokens that follow a prompt."""
        raise NotImplementedError

    def padding(self, shape: Shape) -> Bucket:
        """Return the bucket of a padded or unified pass."""
        raise NotImplementedError

    def _sampler(self) -> Sampler:
        raise NotImplementedError

    def _loaded(self) -> tuple[FullBackend, list[list[int]]]:
        backend = full_backend(self.make())
        self._merged = backend.capabilities.merges_prefills
        self._facts = backend.load(self.source, sampler=self._sampler())
        return backend, [_prompt(length, self._facts.vocab_size) for length in (3, 13, 30)]

    def _driver(self, backend: Backend, *, seed: int = 0, connector: KVWorkerSide | None = None) -> BackendDriver:
        plan = AllocationPlan(
            num_blocks=96,
            block_size=self.block_size,
            num_rows=4,
            max_model_len=96,
            max_num_batched_tokens=64,
            num_host_blocks=40 if backend.capabilities.swaps_blocks else 0,
            connector=connector,
            layer_wait_s=10.0,
        )
        backend.allocate(plan)
        bucket: Callable[[Shape], Bucket] | None = self.padding if backend.capabilities.layout != "ragged" else None
        return BackendDriver(backend, plan, seed=seed, bucket=bucket)

    def _finish(self, driver: BackendDriver, prompts: list[list[int]]) -> None:
        while min(len(driver.output(row)) for row in range(3)) < self.num_tokens:
            driver.step([Work(row) for row in range(3)])
        self._expect({row: driver.output(row)[: self.num_tokens] for row in range(3)}, prompts)

    def _expect(self, found: dict[int, list[int]], prompts: list[list[int]]) -> None:
        expected: dict[int, Any] = {i: self.reference(prompts[i], self.num_tokens) for i in found}
        assert found == expected


def _prompt(length: int, vocab_size: int) -> list[int]:
    return [3 + (7 * i * i + 11 * i + length) % (vocab_size - 3) for i in range(length)]
