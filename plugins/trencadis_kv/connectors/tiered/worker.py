"""Worker side of the tiered connector: splits the message among the children, and merges their reports.

Each child numbers its transfers by itself. With ``n`` children, transfer id ``t`` of child ``i`` is ``t * (n + 1) + i``
for the engine, so that no table is needed; ids with remainder ``n`` name blocks that several children hold.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from trencadis.faults import FaultLog, as_words, reraise_interrupt
from trencadis.interfaces import KVPool, KVWorkerSide, SupportsRemoteScheduler
from trencadis.records import ConnectorReport, FailedLoad, KVLayout
from trencadis_kv.connectors.tiered.child import CLOSED

__all__ = ["Hold", "Orders", "TieredWorker", "TransferIds"]


class Hold(msgspec.Struct, array_like=True, frozen=True):
    """Blocks pinned by several children: free when the last one releases them.

    Attributes:
        transfer_id: Transfer id of the engine.
        members: Transfer ids of the children, translated to those of the engine.
    """

    transfer_id: int
    members: list[int]


class Orders(msgspec.Struct, array_like=True, frozen=True):
    """One step's message.

    Attributes:
        before: Message for each child that is processed first: blocks are saved before any child loads into them.
        after: Message for each child that is processed second: loads.
        loads: Transfer ids of loads that begin.
        releases: Transfer ids whose blocks are held until they are released: of cancelled loads and finished sequences.
        holds: Blocks that several children hold.
        overdue: Ids of ``releases`` whose blocks were held for too long; the children that hold them are closed.
        close: Indexes of children to close.
    """

    before: list[bytes]
    after: list[bytes]
    loads: list[int] = []
    releases: list[int] = []
    holds: list[Hold] = []
    overdue: list[int] = []
    close: list[int] = []


class TransferIds:
    """Translates between the children's transfer ids and the engine's. Pure.

    Args:
        num_children: Number of children.
    """

    def __init__(self, num_children: int) -> None:
        self._num_classes = num_children + 1

    def outside(self, child: int, transfer_id: int) -> int:
        """Return the engine's id for a child's transfer id."""
        return transfer_id * self._num_classes + child

    def shared(self, number: int) -> int:
        """Return the id of blocks that several children pin."""
        return number * self._num_classes + self._num_classes - 1

    def inside(self, transfer_id: int) -> tuple[int, int]:
        """Return the child and its transfer id; for shared blocks the number of children."""
        number, child = divmod(transfer_id, self._num_classes)
        return child, number


logger = logging.getLogger("trencadis.kv")

_MAX_ERRORS = 3
"""Consecutive exceptions after which a child is closed."""


class _Part:
    """One child's worker side, guarded.

    Args:
        name: Name of the child's component.
        label: Name of the component and its distribution, for messages.
        side: Worker side of the child.

    Attributes:
        name: Name of the child's component.
        is_closed: True once it is permanently closed; it touches no block any more.
        loads: Transfer ids of loads under way, translated to those of the engine.
        releases: Transfer ids of blocks that it holds, translated to those of the engine.
    """

    def __init__(self, name: str, label: str, side: KVWorkerSide) -> None:
        self.is_closed = False
        self.loads: set[int] = set()
        self.releases: set[int] = set()
        self.name = name
        self._label = label if label != name else f"the KV connector {name}"
        self._side = side
        self._num_in_a_row = 0
        self._faults = FaultLog(logger)

    def call(self, name: str, call: Callable[[KVWorkerSide], ConnectorReport | None]) -> ConnectorReport | None:
        if self.is_closed:
            return None
        try:
            result = call(self._side)
        except BaseException as error:
            reraise_interrupt(error)
            self._num_in_a_row += 1
            said = f"{self._label} raised {as_words(error)} in {name}() of its worker side; the others go on."
            self._faults.say(name, said, error=error)
            if self._num_in_a_row >= _MAX_ERRORS:
                logger.error("%s raised %d times in a row and is closed.", self._label, _MAX_ERRORS)
                self.close()
            return None
        if name == "poll":
            self._num_in_a_row = 0
        return result

    def join(self, layouts: Sequence[KVLayout], rank: int) -> None:
        side = self._side
        told = False
        if isinstance(side, SupportsRemoteScheduler):

            def tell(_: KVWorkerSide) -> None:
                nonlocal told
                side.on_ranks(layouts, rank=rank)
                told = True

            self.call("on_ranks", tell)
        if not told and not self.is_closed:
            logger.error("%s does not work in a process of a rank and is closed.", self._label)
            self.close()

    def wait_idle(self, timeout_s: float) -> bool:
        wait = getattr(self._side, "wait_idle", None)
        return True if self.is_closed or wait is None else bool(wait(timeout_s))

    def close(self) -> None:
        self.is_closed = True
        try:
            self._side.close()
        except BaseException as error:
            reraise_interrupt(error)
            said = f"{self._label} raised {as_words(error)} in close() of its worker side."
            self._faults.say("close", said, error=error)


class TieredWorker(KVWorkerSide, SupportsRemoteScheduler):
    """Forwards calls. Transfer ids of a closed child fail and are released: nothing can touch their blocks any more.

    Args:
        names: Names of the children, the nearest first.
        sides: Worker sides of the children.
        labels: Names of the components and their distributions, for messages; empty: ``names``.
    """

    def __init__(self, names: Sequence[str], sides: Sequence[KVWorkerSide], *, labels: Sequence[str] = ()) -> None:
        self._parts = [_Part(*one) for one in zip(names, labels or names, sides, strict=True)]
        self._transfer_ids = TransferIds(len(sides))
        self._shared: dict[int, int] = {}
        self._holders: dict[int, set[int]] = {}

    def register(self, kv_cache: KVPool) -> None:
        """Pass the KV pool to all; a child that cannot use it is closed."""
        for part in self._parts:
            registered = False

            def show(side: KVWorkerSide) -> None:
                nonlocal registered
                side.register(kv_cache)
                registered = True

            part.call("register", show)
            if not registered and not part.is_closed:
                part.close()

    def on_ranks(self, layouts: Sequence[KVLayout], *, rank: int) -> None:
        """Pass the layouts to all children; one that needs its scheduler side in the same process is closed."""
        for part in self._parts:
            part.join(layouts, rank)

    def begin_step(self, message: bytes) -> None:
        """Run all saves, then all loads: a load may overwrite blocks that another child saves."""
        if not message:
            for part in self._parts:
                part.call("begin_step", _begin(b""))
            return
        orders = msgspec.msgpack.decode(message, type=Orders)
        self._watch(orders)
        for part, before in zip(self._parts, orders.before, strict=True):
            part.call("begin_step", _begin(before))
        if any(orders.after):
            self.end_step()
            for part, after in zip(self._parts, orders.after, strict=True):
                part.call("begin_step", _begin(after))

    def end_step(self) -> None:
        """Forward the end of the step."""
        for part in self._parts:
            part.call("end_step", _end)

    def poll(self) -> ConnectorReport:
        """Return the merged report."""
        loaded: list[int] = []
        failed: list[FailedLoad] = []
        released: list[int] = []
        messages: list[bytes] = []
        for i, part in enumerate(self._parts):
            report = part.call("poll", _poll)
            if report is not None:
                messages += [msgspec.msgpack.encode((i, message)) for message in report.messages]
                loaded += [self._transfer_ids.outside(i, transfer_id) for transfer_id in report.loaded]
                failed += [
                    FailedLoad(
                        transfer_id=self._transfer_ids.outside(i, one.transfer_id),
                        num_valid_tokens=one.num_valid_tokens,
                        cause=one.cause,
                    )
                    for one in report.failed
                ]
                released += [self._transfer_ids.outside(i, transfer_id) for transfer_id in report.released]
            part.loads.difference_update(loaded, (one.transfer_id for one in failed))
            part.releases.difference_update(released)
            if part.is_closed:
                failed += [
                    FailedLoad(transfer_id=transfer_id, num_valid_tokens=0, cause=CLOSED)
                    for transfer_id in sorted(part.loads)
                ]
                released += sorted(part.releases)
                part.loads.clear()
                part.releases.clear()
        return ConnectorReport(
            loaded=tuple(loaded), failed=tuple(failed), released=self._released(released), messages=tuple(messages)
        )

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no child transfers anything, as far as known; True if so. For tests and tools, from any thread."""
        end_s = time.monotonic() + timeout_s
        return all(part.wait_idle(max(0.0, end_s - time.monotonic())) for part in self._parts)

    def close(self) -> None:
        """Close all children; may be called twice."""
        for part in self._parts:
            part.close()

    # ------------------------------------------------------------------------------------------------- innards

    def _watch(self, orders: Orders) -> None:
        for i in orders.close:
            if not self._parts[i].is_closed:
                self._parts[i].close()
        for transfer_id in orders.loads:
            self._part_of(transfer_id).loads.add(transfer_id)
        for transfer_id in orders.releases:
            self._part_of(transfer_id).loads.discard(transfer_id)
            self._part_of(transfer_id).releases.add(transfer_id)
        for hold in orders.holds:
            self._shared |= dict.fromkeys(hold.members, hold.transfer_id)
            self._holders[hold.transfer_id] = set(hold.members)
        for transfer_id in orders.overdue:
            for member in self._holders.get(transfer_id, ()):
                logger.error("The KV connector %s holds blocks for too long and is closed.", self._part_of(member).name)
                self._part_of(member).close()

    def _part_of(self, transfer_id: int) -> _Part:
        return self._parts[self._transfer_ids.inside(transfer_id)[0]]

    def _released(self, transfer_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the engine's released transfer ids: shared blocks are free with the last child."""
        found = []
        for member in transfer_ids:
            shared = self._shared.pop(member, None)
            if shared is None:
                found.append(member)
                continue
            self._holders[shared].discard(member)
            if not self._holders[shared]:
                del self._holders[shared]
                found.append(shared)
        return tuple(found)


def _begin(message: bytes) -> Callable[[KVWorkerSide], None]:
    return lambda side: side.begin_step(message)


def _end(side: KVWorkerSide) -> None:
    side.end_step()


def _poll(side: KVWorkerSide) -> ConnectorReport:
    return side.poll()
