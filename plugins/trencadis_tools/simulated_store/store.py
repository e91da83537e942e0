"""Content of a simulated store, and end times of transfers over its links.

    replica 0 ══ link ══╗
    replica 1 ══ link ══╬══ store: hash of a block ▶ since when it is there
    replica 2 ══ link ══╝

A step of a simulated engine is computed when it begins, with all its results. So the end of a transfer has to be known when the transfer
begins, regardless of later transfers of other replicas: links and stores serve transfers in the order in which they begin, and do not
share their bandwidth among transfers in flight.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import takewhile

import attrs

from trencadis.records import ConnectorReport, FailedLoad, TransferCause
from trencadis_tools.simulated_store.config import SimulatedStoreConfig

__all__ = ["KVTraffic", "Pipe", "SimulatedStore", "StoreLink", "Stores"]


@attrs.define(kw_only=True)
class KVTraffic:
    """Counters of KV transfers of a run. Tokens are those of whole blocks.

    Attributes:
        num_loads: Number of loads that ended, late ones included.
        num_late_loads: Number of these loads that reached their timeout.
        num_declined_loads: Number of hits that the KV policy did not load.
        num_tokens_loaded: Tokens loaded.
        num_tokens_saved: Tokens sent to a store.
        num_tokens_dropped: Tokens not saved, because staging memory was full or the KV policy declined.
        num_tokens_evicted: Tokens evicted from a store.
        load_s: Sum of the durations of all loads, seconds.
        link_busy_s: Sum of the busy times of all links, seconds.
    """

    num_loads: int = 0
    num_late_loads: int = 0
    num_declined_loads: int = 0
    num_tokens_loaded: int = 0
    num_tokens_saved: int = 0
    num_tokens_dropped: int = 0
    num_tokens_evicted: int = 0
    load_s: float = 0.0
    link_busy_s: float = 0.0


@attrs.define
class Pipe:
    """Channel that serves one transfer after the other.

    Attributes:
        bytes_per_s: Bandwidth, bytes/s; infinity: transfers take no time.
        free_s: Time at which all accepted transfers have been served, seconds.
        busy_s: Total busy time, seconds.
    """

    bytes_per_s: float
    free_s: float = 0.0
    busy_s: float = 0.0

    def begin_s(self, now_s: float) -> float:
        """Return the time at which a transfer added now begins. Pure."""
        return max(now_s, self.free_s)

    def take(self, num_bytes: float, *, now_s: float, until_s: float) -> None:
        """Serve a transfer, cut off at ``until_s``."""
        begin_s = self.begin_s(now_s)
        end_s = max(begin_s, min(begin_s + num_bytes / self.bytes_per_s, until_s))
        self.busy_s += end_s - begin_s
        self.free_s = end_s


class SimulatedStore:
    """Blocks by content hash, with LRU eviction; within a prefix the tail is evicted first.

    Args:
        capacity_blocks: Maximum number of blocks.
        block_size: Tokens of a block.
        bytes_per_s: Bandwidth of all links together, bytes/s; infinity: unlimited.
        traffic: Counters to update.

    Attributes:
        pipe: Channel with the store's bandwidth.
    """

    def __init__(self, capacity_blocks: int, *, block_size: int, bytes_per_s: float, traffic: KVTraffic) -> None:
        self.pipe = Pipe(bytes_per_s)
        self._capacity = capacity_blocks
        self._block_size = block_size
        self._traffic = traffic
        self._ready_s: OrderedDict[bytes, float] = OrderedDict()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._ready_s

    def __len__(self) -> int:
        return len(self._ready_s)

    def num_found(self, hashes: Sequence[bytes], *, now_s: float) -> int:
        """Return the number of leading blocks in the store; blocks in flight do not count. Pure."""
        return sum(1 for _ in takewhile(lambda one: self._ready_s.get(one, math.inf) <= now_s, hashes))

    def use(self, hashes: Sequence[bytes]) -> None:
        """Mark blocks as used now; evicted blocks are skipped."""
        for one in reversed(hashes):
            if one in self._ready_s:
                self._ready_s.move_to_end(one)

    def add(self, hashes: Sequence[bytes], *, ready_s: float) -> None:
        """Add blocks that are available from ``ready_s`` on."""
        for one in reversed(hashes):
            self._ready_s[one] = ready_s
            self._ready_s.move_to_end(one)
        while len(self._ready_s) > self._capacity:
            self._ready_s.popitem(last=False)
            self._traffic.num_tokens_evicted += self._block_size

    def lose(self, hashes: Sequence[bytes], *, ready_s: float) -> None:
        """Remove blocks of :meth:`add` that were in flight when their sender failed."""
        for one in hashes:
            if self._ready_s.get(one) == ready_s:
                del self._ready_s[one]


@attrs.frozen
class _Load:
    """A load in flight, with its end time and the blocks that arrive by then."""

    began_s: float
    end_s: float
    num_blocks: int
    num_valid_blocks: int


class StoreLink:
    """Loads and saves of one replica.

    Args:
        store: Store that the link reaches.
        config: Bandwidth, latency, and staging memory.
        block_size: Tokens of a block.
        block_bytes: Bytes of a block.
        traffic: Counters to update.

    Attributes:
        store: Store that the link reaches.
        is_closed: Whether the replica has failed, so that nothing more is sent.
    """

    def __init__(
        self,
        store: SimulatedStore,
        config: SimulatedStoreConfig,
        *,
        block_size: int,
        block_bytes: int,
        traffic: KVTraffic,
    ) -> None:
        self.store = store
        self.is_closed = False
        self._pipes = (Pipe(config.link_bytes_per_s), store.pipe)
        self._latency_s = config.latency_s
        self._staging_bytes = config.staging_bytes
        self._block_size, self._block_bytes = block_size, block_bytes
        self._traffic = traffic
        self._loads: dict[int, _Load] = {}
        self._released: list[int] = []
        self._saves: deque[tuple[float, Sequence[bytes]]] = deque()

    @property
    def next_report_s(self) -> float:
        """Time of the next report, seconds; -infinity: a report is due; infinity: nothing is in flight."""
        if self._released:
            return -math.inf
        return min([load.end_s for load in self._loads.values()], default=math.inf)

    def load(self, transfer_id: int, hashes: Sequence[bytes], *, now_s: float, wait_s: float) -> None:
        """Begin a load; it ends after at most ``wait_s`` with the blocks that have arrived."""
        until_s = now_s + wait_s
        end_s, num_valid = self._send(len(hashes), now_s=now_s, until_s=until_s)
        self.store.use(hashes)
        self._loads[transfer_id] = _Load(now_s, min(end_s, until_s), len(hashes), num_valid)

    def cancel(self, transfer_id: int) -> None:
        """Give a load up and release its blocks; the link and store still serve the transfer."""
        self._loads.pop(transfer_id, None)
        self._released.append(transfer_id)

    def staged_bytes(self, now_s: float) -> int:
        """Return the bytes of blocks in flight to the store."""
        while self._saves and self._saves[0][0] <= now_s:
            self._saves.popleft()
        return sum(len(hashes) for _, hashes in self._saves) * self._block_bytes

    def save(self, hashes: Sequence[bytes], *, now_s: float) -> None:
        """Send the blocks that the store lacks, as far as staging memory has room."""
        wanted = [one for one in hashes if one not in self.store]
        room = max(0, self._staging_bytes - self.staged_bytes(now_s)) // self._block_bytes
        sent = wanted[:room]
        self._traffic.num_tokens_dropped += (len(wanted) - len(sent)) * self._block_size
        if not sent:
            return
        end_s, _ = self._send(len(sent), now_s=now_s)
        self._saves.append((end_s, sent))
        self.store.add(sent, ready_s=end_s)
        self._traffic.num_tokens_saved += len(sent) * self._block_size

    def ended(self, now_s: float) -> tuple[ConnectorReport, list[_Load]]:
        """Return and remove loads that have ended by now, in order of end time, and released transfer ids."""
        over = sorted((load.end_s, transfer_id) for transfer_id, load in self._loads.items() if load.end_s <= now_s)
        loads = [self._loads.pop(transfer_id) for _, transfer_id in over]
        loaded, failed = [], []
        for (_, transfer_id), load in zip(over, loads, strict=True):
            traffic = self._traffic
            traffic.num_loads += 1
            traffic.load_s += load.end_s - load.began_s
            traffic.num_tokens_loaded += load.num_valid_blocks * self._block_size
            if load.num_valid_blocks == load.num_blocks:
                loaded.append(transfer_id)
                continue
            traffic.num_late_loads += 1
            num_tokens = load.num_valid_blocks * self._block_size
            failed.append(
                FailedLoad(transfer_id=transfer_id, num_valid_tokens=num_tokens, cause=TransferCause.DEADLINE)
            )
        released, self._released = self._released, []
        return ConnectorReport(loaded=tuple(loaded), failed=tuple(failed), released=tuple(released)), loads

    def fail(self, now_s: float) -> None:
        """Close the link of a failed replica; blocks in flight to the store are lost."""
        self.is_closed = True
        for end_s, hashes in self._saves:
            if end_s > now_s:
                self.store.lose(hashes, ready_s=end_s)
        self._saves.clear()

    def _send(self, num_blocks: int, *, now_s: float, until_s: float = math.inf) -> tuple[float, int]:
        """Return the end of a transfer that begins now, and the number of blocks that arrive by then, at most ``until_s``."""
        num_bytes, arrived, end_s = num_blocks * self._block_bytes, float(num_blocks), now_s
        for pipe in self._pipes:
            begin_s = pipe.begin_s(now_s)
            passed_s = begin_s + num_bytes / pipe.bytes_per_s + self._latency_s
            end_s = max(end_s, passed_s)
            if passed_s > until_s:
                left_s = max(0.0, until_s - self._latency_s - begin_s)
                arrived = min(arrived, left_s * pipe.bytes_per_s / self._block_bytes if left_s else 0.0)
        before_s = self._pipes[0].busy_s
        for pipe in self._pipes:
            pipe.take(num_bytes, now_s=now_s, until_s=until_s)
        self._traffic.link_busy_s += self._pipes[0].busy_s - before_s
        return end_s, int(arrived)


class Stores:
    """The stores of one run.

    Attributes:
        traffic: Counters of all stores.
        is_used: Whether there is a store.
    """

    def __init__(self) -> None:
        self.traffic = KVTraffic()
        self.is_used = False
        self._shared: dict[tuple[SimulatedStoreConfig, int], SimulatedStore] = {}

    def link(self, config: SimulatedStoreConfig, *, block_size: int, block_bytes: int) -> StoreLink:
        """Return a replica's link to the shared store, or to a new store.

        Args:
            config: Table of the connector.
            block_size: Tokens of a block.
            block_bytes: Bytes of a block.
        """
        self.is_used = True
        key = (config, block_bytes)
        store = self._shared.get(key)
        if store is None:
            store = SimulatedStore(
                config.capacity_bytes // block_bytes,
                block_size=block_size,
                bytes_per_s=config.store_bytes_per_s or math.inf,
                traffic=self.traffic,
            )
            if config.shared:
                self._shared[key] = store
        return StoreLink(store, config, block_size=block_size, block_bytes=block_bytes, traffic=self.traffic)
