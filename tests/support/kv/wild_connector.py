"""A KV connector whose every move is somebody else's choice: what arrives, what fails, what is late, what raises."""

from __future__ import annotations

import itertools

from trencadis.interfaces import (
    ConnectorPair,
    KVSchedulerSide,
    KVWorkerSide,
    Lookup,
    SupportsLayerwise,
    SupportsMetrics,
)
from trencadis.records import ConnectorReport, FailedLoad


class WildConnector:
    """Both sides over one dictionary; nothing moves until it is told to.

    Attributes:
        store: Content by block hash, as it was saved.
        unanswered_hits: Transfer ids of hits that the engine has said nothing of yet.
        unused: Transfer ids of hits that it does not load.
        num_cached_tokens: Tokens that look-ups say were cached before; None: they do not say.
        claims: Tokens that every look-up finds, whatever is stored; None: what is stored.
        loads: Blocks and hashes by transfer id, of loads that were asked for and neither ended nor cancelled.
        cancelled: The same, of those that were cancelled and not released.
        held: Transfer ids of finished sequences' blocks.
        raising: Names of scheduler-side methods that raise.
        by_layer: Loads come layer by layer, if the engine lets them.
        layered: Transfer ids of loads whose layers steps wait for.
        fate: What becomes of such loads: ``comes``; ``fails``, ``stalls`` or ``raises`` at layer ``fate_layer``. One that stalls never
            ends by itself; one that raises comes too late, and is reported as loaded.
        is_closed: Of each side.
    """

    def __init__(self, *, block_size: int = 4, timeout_s: float = float("inf"), answer: str = "compute") -> None:
        self.block_size = block_size
        self.timeout_s = timeout_s
        self.answer = answer
        self.holds = False
        self.store: dict[bytes, list] = {}
        self.unanswered_hits: set[int] = set()
        self.unused: list[int] = []
        self.num_cached_tokens: int | None = None
        self.claims: int | None = None
        self.loads: dict[int, tuple[list[int], list[bytes]]] = {}
        self.cancelled: dict[int, tuple[list[int], list[bytes]]] = {}
        self.held: set[int] = set()
        self.raising: set[str] = set()
        self.asked: list[str] = []
        self.is_closed = [False, False]
        self.next = ConnectorReport()
        self.transfer_ids = itertools.count()
        self.arrays: tuple = ()
        self._to_save: list[tuple[int, bytes]] = []
        self.by_layer = False
        self.layered: set[int] = set()
        self.fate, self.fate_layer = "comes", 0
        self.waited: list[tuple[int, int]] = []

    def pair(self) -> ConnectorPair:
        return ConnectorPair(scheduler=WildScheduler(self), worker=_Worker(self))

    # ------------------------------------------------------------------------------------ what the test chooses

    def arrive(self, transfer_id: int) -> None:
        """Let a load arrive whole."""
        blocks, hashes = self.loads.pop(transfer_id)
        self._write(blocks, hashes)
        self._report(loaded=(transfer_id,))

    def fail(self, transfer_id: int, num_valid: int = 0) -> None:
        """Let a load fail behind some blocks; the others hold garbage."""
        blocks, hashes = self.loads.pop(transfer_id)
        self._write(blocks[:num_valid], hashes[:num_valid])
        self._scribble(blocks[num_valid:])
        failed = FailedLoad(transfer_id=transfer_id, num_valid_tokens=num_valid * self.block_size, cause="evicted")
        self._report(failed=(failed,))

    def scribble(self, transfer_id: int) -> None:
        """Write garbage to the blocks of a load that has not ended, or was cancelled and not released."""
        self._scribble((self.loads.get(transfer_id) or self.cancelled[transfer_id])[0])

    def release(self, transfer_id: int) -> None:
        """Say that nobody touches the blocks of a transfer id any more."""
        self.cancelled.pop(transfer_id, None)
        self.held.discard(transfer_id)
        self._report(released=(transfer_id,))

    def repeat(self, transfer_id: int) -> None:
        """Report everything of one transfer id at once, whatever it is."""
        failed = FailedLoad(transfer_id=transfer_id, num_valid_tokens=0, cause="again")
        self._report(loaded=(transfer_id,), failed=(failed,))

    # ------------------------------------------------------------------------------------------- layer by layer

    def wait_layer(self, layer: int) -> bool:
        """Let one layer of each layered load come, or not."""
        came = True
        for transfer_id in sorted(self.layered & self.loads.keys()):
            self.waited.append((transfer_id, layer))
            if self.fate == "comes" or layer < self.fate_layer:
                blocks, hashes = self.loads[transfer_id]
                for block, block_hash in zip(blocks, hashes, strict=True):
                    self.content(block)[layer][:] = self.store[block_hash][layer]
                continue
            if self.fate == "raises":
                raise RuntimeError("wait_layer raises")
            came = False
            self.layered.discard(transfer_id)
            if self.fate == "fails":
                self.fail(transfer_id)
        return came

    def end_layers(self) -> None:
        """Report the layered loads that nobody gave up."""
        for transfer_id in sorted(self.layered & self.loads.keys()):
            self.arrive(transfer_id)
        self.layered.clear()

    # -------------------------------------------------------------------------------------------------- innards

    def called(self, name: str) -> None:
        if name in self.raising:
            raise RuntimeError(f"{name} raises")

    def save(self) -> None:
        for block, block_hash in self._to_save:
            self.store.setdefault(block_hash, [array[self._slots(block)].copy() for array in self.arrays])
        self._to_save = []

    def to_save(self, blocks, hashes) -> None:
        self._to_save += zip(blocks, hashes, strict=True)

    def content(self, block: int) -> list:
        return [array[self._slots(block)] for array in self.arrays]

    def _report(self, **news) -> None:
        self.next = ConnectorReport(
            loaded=(*self.next.loaded, *news.get("loaded", ())),
            failed=(*self.next.failed, *news.get("failed", ())),
            released=(*self.next.released, *news.get("released", ())),
        )

    def _write(self, blocks, hashes) -> None:
        for block, block_hash in zip(blocks, hashes, strict=True):
            for array, content in zip(self.content(block), self.store[block_hash], strict=True):
                array[:] = content

    def _scribble(self, blocks) -> None:
        for block in blocks:
            for array in self.content(block):
                array[:] = 0
                array[:] += array.dtype.type(5)

    def _slots(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)


class WildScheduler(KVSchedulerSide, SupportsLayerwise, SupportsMetrics):
    """The scheduler side of a :class:`WildConnector`."""

    def __init__(self, wild: WildConnector) -> None:
        self._wild = wild

    def lookup(self, request, *, block_hashes, num_local_tokens):
        wild = self._wild
        wild.asked.append(request.request_id)
        wild.called("lookup")
        num_blocks = sum(1 for _ in itertools.takewhile(wild.store.__contains__, block_hashes))
        num_tokens = num_blocks * wild.block_size if wild.claims is None else wild.claims
        if wild.claims is None and num_tokens <= num_local_tokens:
            return Lookup()
        transfer_id = next(wild.transfer_ids)
        wild.unanswered_hits.add(transfer_id)
        return Lookup(
            num_tokens=num_tokens,
            transfer_id=transfer_id,
            timeout_s=wild.timeout_s,
            layerwise=wild.by_layer,
            num_cached_tokens=wild.num_cached_tokens,
        )

    def on_unused(self, transfer_id):
        self._wild.unanswered_hits.remove(transfer_id)
        self._wild.unused.append(transfer_id)

    def on_layerwise(self, transfer_id):
        self._wild.called("on_layerwise")
        self._wild.layered.add(transfer_id)

    def on_allocated(self, transfer_id, *, blocks, block_hashes):
        self._wild.unanswered_hits.remove(transfer_id)
        self._wild.loads[transfer_id] = (list(blocks), list(block_hashes))
        self._wild.called("on_allocated")

    def on_computed(self, *, blocks, block_hashes):
        self._wild.called("on_computed")
        self._wild.to_save(blocks, block_hashes)

    def on_finished(self, request, *, blocks):
        self._wild.called("on_finished")
        if not self._wild.holds:
            return None
        transfer_id = next(self._wild.transfer_ids)
        self._wild.held.add(transfer_id)
        return transfer_id

    def on_cancelled(self, transfer_id):
        # A report that this load ended may be on its way.
        self._wild.cancelled[transfer_id] = self._wild.loads.pop(transfer_id, ([], []))
        self._wild.called("on_cancelled")

    def on_failed(self, request, failed):
        self._wild.called("on_failed")
        return self._wild.answer

    def take_message(self):
        return b""

    def on_report(self, report):
        self._wild.called("on_report")

    def metrics(self):
        return "wild 1\n"

    def close(self):
        self._wild.is_closed[0] = True


class _Worker(KVWorkerSide):
    def __init__(self, wild: WildConnector) -> None:
        self._wild = wild

    def register(self, kv_cache):
        self._wild.arrays = tuple(kv_cache)

    def begin_step(self, message):
        self._wild.save()

    @property
    def wants_layers(self):
        return bool(self._wild.layered & self._wild.loads.keys())

    def wait_layer(self, layer, *, budget_s):
        assert budget_s <= 0.2, "no more than the setting"
        return self._wild.wait_layer(layer)

    def end_step(self):
        pass

    def poll(self):
        self._wild.end_layers()
        report, self._wild.next = self._wild.next, ConnectorReport()
        return report

    def close(self):
        self._wild.is_closed[1] = True
