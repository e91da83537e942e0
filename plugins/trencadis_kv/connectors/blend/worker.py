"""Worker side of ``blend``: chunks are read on a thread and assembled between steps, on the backend's thread.

    begin ─▶ waiting ─▶ thread: get ▶ verify ─┬─▶ blend, some layers a step ─▶ loaded
                                              └─▶ failed

Only blending writes to blocks, so a cancelled assembly is released at once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator

import numpy as np

from trencadis.errors import TransferError, TrencadisError
from trencadis.interfaces import BlendChunk, BlendOrder, KVBlender, KVPool, KVWorkerSide
from trencadis.records import ConnectorReport, FailedLoad, TransferCause
from trencadis_kv.connectors.blend.chunk_saves import ChunkObjects, ChunkSaver
from trencadis_kv.connectors.blend.messages import AssembleOrder, BlendShared, ChunkPlace, decode_orders
from trencadis_kv.store.client import StoreClient
from trencadis_kv.store.threads import StoreThreads

__all__ = ["BlendWorker", "ChunkAssembler"]

_MAX_READ = 2
"""Most assemblies whose chunks are in memory: one being blended, one being read."""


class _Assembly:
    """Assembly of one prompt. A task for a thread, then for the backend's thread.

    Args:
        order: Order to carry out.
        assembler: Assembler that the assembly belongs to.
    """

    def __init__(self, order: AssembleOrder, assembler: ChunkAssembler) -> None:
        self._assembler = assembler
        self._chunks: list[BlendChunk] = []
        self._work: Iterator[None] | None = None
        self.order = order
        self.is_wanted = True
        self.is_read = False
        self.seconds = 0.0
        self.error: TransferError | None = None

    def run(self, client: StoreClient) -> None:
        """Read the chunks."""
        shared, since_s = self._assembler.shared, self._assembler.shared.clock.now_s()
        num_bytes = 0
        try:
            for place in self.order.chunks:
                if not self.is_wanted:
                    break
                num_bytes += self._read(client, place)
            shared.cost.loaded(num_bytes=num_bytes, seconds=shared.clock.now_s() - since_s)
        except TransferError as error:
            self.error = error
        except Exception as error:
            self.error = TransferError(f"{type(error).__name__}: {error}", cause=TransferCause.RAISED)
        self.is_read = True

    def advance(self, until_s: float) -> bool:
        """Blend at least one part, until the time is over; True when complete. On the backend's thread."""
        clock = self._assembler.shared.clock
        while True:
            since_s = clock.now_s()
            try:
                if self._work is None:
                    self._work = self._assembler.blender.blend(self._blend_order())
                next(self._work)
            except StopIteration:
                return True
            except Exception as error:
                self.error = TransferError(
                    f"blending raised {type(error).__name__}: {error}", cause=TransferCause.RAISED
                )
                return True
            finally:
                now_s = clock.now_s()
                self.seconds += now_s - since_s
            if now_s >= until_s:
                return False

    def _read(self, client: StoreClient, place: ChunkPlace) -> int:
        objects = self._assembler.objects
        key, data = objects.key(place.key), np.empty(objects.num_bytes(place.chunk_tokens), np.uint8)
        (size,) = client.call(lambda store: store.get([key], [data.data]))
        if size < 0:
            raise TransferError("A chunk is not there any more.", cause=TransferCause.EVICTED)
        try:
            tokens = objects.unpack(place.key, data[:size], num_tokens=place.chunk_tokens)
        except TransferError:
            client.call(lambda store: store.delete([key]))
            raise
        part = tokens[place.skip : place.skip + place.num_tokens]
        self._chunks.append(BlendChunk(position=place.position, tokens=part))
        return int(size)

    def _blend_order(self) -> BlendOrder:
        token_ids = np.frombuffer(self.order.token_ids, "<i4")
        forced = np.zeros(len(token_ids), np.bool_)
        for place in self.order.chunks:
            num_first = min(self._assembler.shared.config.num_first_tokens, place.num_tokens)
            forced[place.position : place.position + num_first] = True
        return BlendOrder(
            token_ids=token_ids,
            num_exact=self.order.num_exact,
            blocks=np.array(self.order.blocks, np.int32),
            chunks=tuple(self._chunks),
            ratio=self.order.ratio,
            forced=forced,
        )


class ChunkAssembler:
    """All assemblies of one rank. Methods run on the backend's thread.

    Args:
        shared: State shared by both sides of the connector.
        blender: Assembles chunks.
        objects: Unpacks chunks.

    Attributes:
        shared: State shared by both sides of the connector.
        blender: Assembles chunks.
        objects: Unpacks chunks.
    """

    def __init__(self, shared: BlendShared, blender: KVBlender, objects: ChunkObjects) -> None:
        self.shared = shared
        self.blender = blender
        self.objects = objects
        self._waiting: deque[AssembleOrder] = deque()
        self._live: dict[int, _Assembly] = {}
        self._ended: list[_Assembly] = []
        self._released: list[int] = []
        self._threads: StoreThreads[_Assembly] = StoreThreads(
            "trencadis-blend-load", 1, make_client=shared.client, activity=shared.activity
        )

    def begin(self, order: AssembleOrder) -> None:
        """Queue an order."""
        self._waiting.append(order)

    def cancel(self, transfer_id: int) -> None:
        """Cancel an assembly; its transfer id is released with the next report."""
        self._waiting = deque(order for order in self._waiting if order.transfer_id != transfer_id)
        self._ended = [assembly for assembly in self._ended if assembly.order.transfer_id != transfer_id]
        assembly = self._live.pop(transfer_id, None)
        if assembly is not None:
            assembly.is_wanted = False
            if not self._threads.take_back(assembly):
                self._threads.interrupt_unwanted()
        self._released.append(transfer_id)

    def advance(self) -> None:
        """Blend chunks that were read, the oldest first, within a step's time budget; start queued reads."""
        until_s = self.shared.clock.now_s() + self.shared.config.step_budget_s
        for assembly in list(self._live.values()):
            if not assembly.is_read:
                continue
            if assembly.error is None and not assembly.advance(until_s):
                break
            del self._live[assembly.order.transfer_id]
            self._ended.append(assembly)
            if self.shared.clock.now_s() >= until_s:
                break
        for _ in range(min(len(self._waiting), _MAX_READ - len(self._live))):
            assembly = _Assembly(self._waiting.popleft(), self)
            self._live[assembly.order.transfer_id] = assembly
            if not self._threads.put(assembly):
                assembly.error = TransferError("The connector is closed.", cause=TransferCause.CANCELLED)
                assembly.is_read = True

    def poll(self) -> ConnectorReport:
        """Return the assemblies that ended."""
        ended, self._ended = self._ended, []
        released, self._released = self._released, []
        for assembly in ended:
            self._count(assembly)
        return ConnectorReport(
            loaded=tuple(assembly.order.transfer_id for assembly in ended if assembly.error is None),
            failed=tuple(
                FailedLoad(transfer_id=assembly.order.transfer_id, num_valid_tokens=0, cause=str(assembly.error.cause))
                for assembly in ended
                if assembly.error is not None
            ),
            released=tuple(released),
        )

    def close(self, timeout_s: float) -> None:
        """Cancel all, and stop the thread; no block is touched afterwards."""
        for transfer_id in [order.transfer_id for order in self._waiting] + list(self._live):
            self.cancel(transfer_id)
        self._threads.close(timeout_s)

    def _count(self, assembly: _Assembly) -> None:
        if assembly.error is not None:
            self.shared.failed(assembly.error, "load")
            return
        chunks = assembly.order.chunks
        num_bytes = sum(self.objects.num_bytes(place.chunk_tokens) for place in chunks)
        self.shared.counters.moved("load", num_tokens=sum(place.num_tokens for place in chunks), num_bytes=num_bytes)
        self.shared.counters.ended(assembly.seconds)
        self.shared.blended.append((assembly.order.transfer_id, assembly.seconds))


logger = logging.getLogger("trencadis.kv")


class BlendWorker(KVWorkerSide):
    """Copies chunks out, reads them, and has the backend blend them.

    Args:
        shared: State shared by both sides of the connector.
    """

    def __init__(self, shared: BlendShared) -> None:
        self._shared = shared
        self._keeper: ChunkSaver | None = None
        self._assembler: ChunkAssembler | None = None

    def register(self, kv_cache: KVPool) -> None:
        """Receive the KV pool; a backend that cannot blend is logged once, and the connector does nothing."""
        try:
            blender = kv_cache.blender()
            reason = "this backend cannot blend"
        except TrencadisError as error:
            blender, reason = None, str(error)
        if blender is None:
            logger.warning(
                "The KV connector blend has nothing to do: %s. Every request is computed.", reason.rstrip(".")
            )
            return
        objects = ChunkObjects(kv_cache.layout, identity=self._shared.identity, token_bytes=blender.token_bytes)
        self._keeper = ChunkSaver(self._shared, kv_cache, blender, objects)
        self._assembler = ChunkAssembler(self._shared, blender, objects)
        self._shared.token_bytes = blender.token_bytes

    def begin_step(self, message: bytes) -> None:
        """Copy out blocks to be saved, then cancel, begin and continue assemblies."""
        if self._keeper is None or self._assembler is None:
            return
        orders = decode_orders(message)
        for save in orders.saves:
            self._keeper.save(save)
        for transfer_id in orders.cancels:
            self._assembler.cancel(transfer_id)
        for assembly in orders.assemblies:
            self._assembler.begin(assembly)
        self._assembler.advance()

    def end_step(self) -> None:
        """Do nothing."""

    def poll(self) -> ConnectorReport:
        """Return the assemblies that ended."""
        return ConnectorReport() if self._assembler is None else self._assembler.poll()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until the threads are idle; False on timeout.

        Args:
            timeout_s: Seconds of real time.
        """
        return self._shared.activity.wait_idle(timeout_s)

    def close(self) -> None:
        """Stop the threads, and release the model."""
        timeout_s = self._shared.config.close_timeout_s
        keeper, self._keeper = self._keeper, None
        assembler, self._assembler = self._assembler, None
        if assembler is not None:
            assembler.close(timeout_s)
        if keeper is not None:
            keeper.close(timeout_s)
