"""Look-ups of prompts in the store, on a thread; equal look-ups of several requests are made once.

request ─▶ task ─▶ thread: contains ─▶ answer, kept for the request
              └ lookup_timeout_s ─▶ a miss; the call is interrupted
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trencadis.errors import TransferError
from trencadis.records import TransferCause
from trencadis_kv.store.bounded import BoundedDict
from trencadis_kv.store.canary import Canary
from trencadis_kv.store.client import StoreClient
from trencadis_kv.store.objects import StoredBlocks
from trencadis_kv.store.parts import StoreParts
from trencadis_kv.store.threads import StoreThreads

__all__ = ["LookupTask", "Lookups"]

_MAX_KEYS = 512
"""Maximum number of keys per call."""
_MAX_REQUESTS = 8192
_KEPT = 4
"""Time-outs for which an answer is kept, for a request that is looked up again because the engine was full."""


class LookupTask:
    """Look-up of the number of leading blocks of a chain that the store has. A task for a thread.

    Args:
        parts: Shared state of the connector.
        objects: Objects of the connector, which know their keys.
        hashes: Hashes of the chain's blocks from ``first`` on.
        first: Number of leading blocks, which the engine has.

    Attributes:
        first: Number of leading blocks, which the engine has.
        num_found: Number of leading ``hashes`` in the store; None while unknown.
        is_wanted: False once the look-up was given up.
    """

    def __init__(self, parts: StoreParts, objects: StoredBlocks, hashes: Sequence[bytes], *, first: int) -> None:
        self._parts = parts
        self._objects = objects
        self._hashes = hashes
        self._since_s = parts.clock.now_s()
        self.first = first
        self.num_found: int | None = None
        self.is_wanted = True

    @property
    def key(self) -> tuple[bytes, int]:
        """Identity of the look-up."""
        return self._hashes[-1], self.first

    def run(self, client: StoreClient) -> None:
        """Look up in the store."""
        num_found = 0
        try:
            num_found = self._ask(client)
            self._parts.counters.answered(self._parts.clock.now_s() - self._since_s)
            self._parts.recent.discard(self._hashes[num_found:])
        except TransferError as error:
            if self.is_wanted:
                self._parts.failed(error, "look-up")
        self.num_found = num_found

    def give_up(self) -> None:
        """Stop waiting; the answer is that the store has no blocks."""
        self.is_wanted = False
        self.num_found = 0

    def _ask(self, client: StoreClient) -> int:
        found = 0
        keys = self._objects.keys(self._hashes)
        while found < len(keys) and self.is_wanted:
            if not self._parts.breaker.allows:
                raise TransferError("The store is left alone.", cause=TransferCause.CANCELLED)
            some = keys[found : found + _MAX_KEYS]
            number = client.call(lambda store, some=some: store.contains(some))  # type: ignore[misc]
            if not 0 <= number <= len(some):
                raise TransferError(
                    f"The KV store of {self._parts.name} has {number} of {len(some)} keys.", cause=TransferCause.RAISED
                )
            found += number
            if number < len(some):
                break
        return found // len(self._objects.shards)


@attrs.define
class _Asked:
    task: LookupTask
    since_s: float


class Lookups:
    """Look-ups in flight and recent answers. Engine thread.

    Args:
        parts: Shared state of the connector.
        objects: Objects of the connector, which know their keys.
    """

    def __init__(self, parts: StoreParts, objects: StoredBlocks) -> None:
        self._parts = parts
        self._objects = objects
        self._open: dict[tuple[bytes, int], LookupTask] = {}
        self._asked: BoundedDict[str, _Asked] = BoundedDict(_MAX_REQUESTS)
        self._threads: StoreThreads[LookupTask | Canary] = StoreThreads(
            "trencadis-kv-lookup", 1, make_client=parts.client, activity=parts.activity
        )

    @property
    def num_lookups(self) -> int:
        """Requests with a look-up in flight or an answer."""
        return len(self._asked)

    def find(self, request_id: str, hashes: Sequence[bytes], *, first: int) -> int | None:
        """Return how many leading blocks the store has; None while it is unknown.

        Args:
            request_id: Id of the request.
            hashes: Hashes of its full blocks; at least ``first + 1``.
            first: Number of leading blocks that the engine has itself.

        Raises:
            TransferError: ``deadline``: the store took too long to answer.
        """
        now_s, timeout_s = self._parts.clock.now_s(), self._parts.settings.lookup_timeout_s
        self._sweep(now_s, timeout_s)
        asked = self._asked.get(request_id)
        if asked is None or asked.task.key[0] != hashes[-1] or asked.task.first > first:
            since_s = asked.since_s if asked is not None and asked.task.num_found is None else now_s
            asked = self._asked[request_id] = _Asked(self._post(hashes, first), since_s)
        task = asked.task
        if task.num_found is None and now_s - asked.since_s >= timeout_s:
            task.give_up()
            self._threads.interrupt_unwanted()
            raise TransferError(
                f"The KV store of {self._parts.name} did not answer a look-up within {timeout_s:g} s.",
                cause=TransferCause.DEADLINE,
            )
        if task.num_found is None:
            return None
        self._open.pop(task.key, None)
        return task.first + task.num_found

    def forget(self, request_id: str) -> None:
        """Remove a request that has ended, or whose load was started."""
        self._asked.pop(request_id, None)

    def probe(self) -> Canary:
        """Queue a probe of the store after the earlier look-ups."""
        canary = Canary(self._parts, self._objects)
        self._threads.put(canary)
        return canary

    def interrupt_unwanted(self) -> None:
        """Interrupt look-ups that no request waits for."""
        self._threads.interrupt_unwanted()

    def close(self) -> None:
        """End the thread."""
        self._threads.close(self._parts.settings.close_timeout_s)

    def _post(self, hashes: Sequence[bytes], first: int) -> LookupTask:
        task = LookupTask(self._parts, self._objects, hashes[first:], first=first)
        open_one = self._open.get(task.key)
        if open_one is not None and open_one.num_found is None:
            return open_one
        self._open[task.key] = task
        if not self._threads.put(task):
            task.give_up()
        return task

    def _sweep(self, now_s: float, timeout_s: float) -> None:
        """Remove requests that were not looked up for long: they ended while they waited."""
        while self._asked:
            request_id, oldest = next(iter(self._asked.items()))
            if now_s - oldest.since_s <= _KEPT * timeout_s:
                return
            del self._asked[request_id]
            self._open.pop(oldest.task.key, None)
