"""The tests of layer-wise KV: part of the suite of the noun ``backend``, for those whose capabilities say ``layerwise_kv``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from trencadis.interfaces import KVPool, KVWorkerSide
from trencadis.records import ConnectorReport
from trencadis_testing.backend_suite import BackendSuite
from trencadis_testing.driver import BackendDriver, Work

if TYPE_CHECKING:
    from numpy.typing import NDArray
from trencadis_testing.optional_calls import FullBackend

__all__ = ["LayerTests"]


class LayerTests(BackendSuite):
    """No layer is touched before its turn, and a step that read one too early says so."""

    def test_layer_is_not_read_before_it_was_waited_for(self) -> None:
        """What a sequence read comes back layer by layer, each at the last moment; who shares the batch does not notice."""
        backend, prompts = self._loaded()
        if not backend.capabilities.layerwise_kv:
            return
        worker = _Late()
        driver, pool = self._begun(backend, worker, prompts)
        assert worker.waited == [], "a step waited in which no layer was wanted"
        worker.take_away(pool, driver.blocks(2)[: len(prompts[2]) // self.block_size])
        output = driver.step([Work(row) for row in range(3)])
        assert set(worker.waited) == set(pool.layout.layers), (
            f"of layers {pool.layout.layers} it waited for {worker.waited}"
        )
        assert not output.missed_layers, "every layer was there"
        worker.wants = False
        self._finish(driver, prompts)

    def test_layer_is_not_written_before_it_was_waited_for(self) -> None:
        """Blocks that another sequence had until now may still be copied out until then."""
        backend, prompts = self._loaded()
        if not backend.capabilities.layerwise_kv:
            return
        worker = _Looking()
        driver, pool = self._begun(backend, worker, prompts)
        worker.look_at(pool, [block for row in range(3) for block in driver.blocks(row)])
        driver.step([Work(row) for row in range(3)])
        assert worker.written == [], f"layers {worker.written} were written before they were waited for"
        assert worker.changed == list(pool.layout.layers), (
            f"of layers {pool.layout.layers} only {worker.changed} changed"
        )

    def test_step_that_missed_a_layer_says_so(self) -> None:
        """It ends as ever, since the others' tokens count."""
        backend, prompts = self._loaded()
        if not backend.capabilities.layerwise_kv:
            return
        worker = _Late()
        driver, pool = self._begun(backend, worker, prompts)
        worker.take_away(pool, driver.blocks(2)[: len(prompts[2]) // self.block_size], misses=True)
        assert driver.step([Work(row) for row in range(3)]).missed_layers
        worker.wants = False
        while min(len(driver.output(row)) for row in range(2)) < self.num_tokens:
            driver.step([Work(row) for row in range(2)])
        self._expect({row: driver.output(row)[: self.num_tokens] for row in range(2)}, prompts)

    def test_layers_of_a_block_are_its_bytes(self) -> None:
        """Each of its parts once, read and written from another thread than the backend's; other layers stay as they are."""
        backend, prompts = self._loaded()
        if not backend.capabilities.layerwise_kv:
            return
        driver, pool = self._begun(backend, _Late(), prompts)
        blocks = driver.blocks(2)
        whole = np.empty((len(blocks), pool.layout.block_bytes), np.uint8)
        pool.read_blocks(blocks, whole)
        with ThreadPoolExecutor(1) as thread:
            layers = thread.submit(lambda: [_layer(pool, layer, blocks) for layer in pool.layout.layers]).result()
            assert sorted(np.concatenate(layers, axis=1)[0].tolist()) == sorted(whole[0].tolist())
            for layer, data in zip(pool.layout.layers, layers, strict=True):
                thread.submit(pool.write_layer, layer, blocks, np.zeros_like(data)).result()
                found = np.empty_like(whole)
                pool.read_blocks(blocks, found)
                assert (found != whole).sum() == np.count_nonzero(data), f"layer {layer} is not what was written to"
                thread.submit(pool.write_layer, layer, blocks, data).result()
        self._finish(driver, prompts)

    def _begun(self, backend: FullBackend, worker: _Late, prompts: list[list[int]]) -> tuple[BackendDriver, KVPool]:
        """Return a driver with three sequences in mid-answer."""
        driver = self._driver(backend, connector=worker)
        pool = backend.kv_cache()
        assert pool.layerwise, "its capabilities say layerwise_kv, and its pool does not"
        assert pool.any_thread, "layers are written while the backend's own thread waits for them"
        for row, prompt in enumerate(prompts):
            driver.start(row, prompt)
        driver.step([Work(row) for row in range(3)])
        return driver, pool


class _Late(KVWorkerSide):
    """Takes blocks away, and brings each layer when it is waited for."""

    def __init__(self) -> None:
        self.wants = False
        self.waited: list[int] = []
        self._blocks: list[int] = []
        self._pool: KVPool | None = None
        self._layers: dict[int, NDArray[np.uint8]] = {}
        self._misses = False

    def take_away(self, pool: KVPool, blocks: list[int], *, misses: bool = False) -> None:
        self._pool, self._blocks, self._misses = pool, blocks, misses
        self._layers = {layer: _layer(pool, layer, blocks) for layer in pool.layout.layers}
        pool.write_blocks(blocks, np.zeros((len(blocks), pool.layout.block_bytes), np.uint8))
        self.wants = True

    @property
    def wants_layers(self) -> bool:
        return self.wants

    def wait_layer(self, layer: int, *, budget_s: float) -> bool:
        self.waited.append(layer)
        if self._misses or self._pool is None:
            return False
        data = self._layers.pop(layer, None)  # padded layouts come here once for each pass
        if data is not None:
            self._pool.write_layer(layer, self._blocks, data)
        return True

    def register(self, kv_cache: KVPool) -> None:
        """Nothing to do: it is handed the pool when it is to act."""

    def begin_step(self, message: bytes) -> None:
        """Nothing to do."""

    def end_step(self) -> None:
        """Nothing to do."""

    def poll(self) -> ConnectorReport:
        return ConnectorReport()

    def close(self) -> None:
        """Nothing to do."""


class _Looking(_Late):
    """Compares each layer of some blocks with what it was before the step, the first time that it is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[int] = []

    def look_at(self, pool: KVPool, blocks: list[int]) -> None:
        self._pool, self._blocks, self.wants = pool, blocks, True
        self._layers = {layer: _layer(pool, layer, blocks) for layer in pool.layout.layers}

    @property
    def changed(self) -> list[int]:
        return [layer for layer in self._layers if self._is_changed(layer)]

    def wait_layer(self, layer: int, *, budget_s: float) -> bool:
        if layer not in self.waited and self._is_changed(layer):
            self.written.append(layer)
        self.waited.append(layer)
        return True

    def _is_changed(self, layer: int) -> bool:
        return self._pool is not None and bool((_layer(self._pool, layer, self._blocks) != self._layers[layer]).any())


def _layer(pool: KVPool, layer: int, blocks: list[int]) -> NDArray[np.uint8]:
    data = np.empty((len(blocks), pool.layout.layer_bytes(layer)), np.uint8)
    pool.read_layer(layer, blocks, data)
    return data
