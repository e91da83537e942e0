"""The blocks as they were where the flight record begins: a second set, in which each change is made again, some hundred steps later.

    BlockManager.journal ──▶ changes, in order ──a few after each step──▶ second set ──▶ key frame
                                  ▲ the record begins here

A key frame would otherwise copy every cached block, while no sequence gets a token. The second set is given the same calls, and its
eviction policy is a copy that is told and asked the same; so it becomes, block for block, what the first one was. What a step pays is
bounded by what the step itself changed.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from trencadis.engine.state import BlockManager
from trencadis.errors import ContractError, InternalError
from trencadis.faults import as_words, reraise_interrupt
from trencadis.interfaces.plain_state import has_plain_state
from trencadis_tools.recorder.policy_memory import PolicyMemory

__all__ = ["TrailingBlocks"]

_Change = tuple[str, int, Sequence[Any]]

_PACE = 2
"""Blocks changed again for each block that a step changed: more than one, so that what is behind is caught up with."""

_LEAST = 16
"""Blocks changed again after each step if it changed none itself."""

_PATIENCE_S = 10.0
"""How long a record waits for another one that is being written."""


class TrailingBlocks:
    """Trails the blocks of one engine. Its engine's thread calls all but :meth:`hold`, :meth:`state` and :meth:`release`.

    Args:
        blocks: The engine's partitions.

    Attributes:
        obstacle: Why there is no second set any more, in words; empty: there is.
        target: Number of the change up to which the second set is to follow.
        num_repeated: Blocks in the changes that were made again.
    """

    def __init__(self, blocks: Sequence[BlockManager]) -> None:
        self._blocks = blocks
        self._changes: deque[tuple[int, _Change]] = deque()
        self._replicas: list[BlockManager] = []
        self._lock = threading.Lock()
        self._num_noted = 0
        self._num_applied = 0
        self._num_owed = 0
        self.obstacle = ""
        self.target = 0
        self.num_repeated = 0
        try:
            self._replicas = [_twin(part) for part in blocks]
        except ContractError as error:
            self.give_up(str(error))
            return
        for number, part in enumerate(blocks):
            part.journal = self._noting(number)

    @property
    def position(self) -> int:
        """Number of the next change."""
        return self._num_noted

    def catch_up(self) -> None:
        """Make some changes again: of about twice as many blocks as were changed since the last call, and a few; called after each step."""
        owed, self._num_owed = self._num_owed, 0
        if self._num_applied >= self.target or not self._lock.acquire(blocking=False):
            return  # nothing is behind; or a record is being written, and this is done after it
        try:
            self._repeat(self.target, _PACE * owed + _LEAST)
        finally:
            self._lock.release()

    def hold(self, *, waits: bool) -> bool:
        """Let the second set rest until :meth:`release`; False: another record holds it.

        Args:
            waits: For the other one, up to ten seconds.
        """
        return self._lock.acquire(timeout=_PATIENCE_S) if waits else self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Let it follow again; from any thread."""
        self._lock.release()

    def state(self, target: int) -> tuple[list[dict[str, Any]], list[PolicyMemory], str]:
        """Return what blocks and eviction policies were before a change, for the holder. O(blocks).

        Args:
            target: Number of the change, at least that of the last call.

        Returns:
            Of each partition its state, and what its policy remembered; and why these are missing, else empty.
        """
        self._repeat(target)
        if self.obstacle:
            return [], [], self.obstacle
        states = [{**part.copy_state(), "id_of": part.eviction.known_ids} for part in self._replicas]
        return states, [PolicyMemory(part.eviction.strategy) for part in self._replicas], ""

    def _noting(self, number: int) -> Callable[[_Change], None]:
        append = self._changes.append

        def note(change: _Change) -> None:
            append((number, change))
            self._num_noted += 1
            self._num_owed += change[1]

        return note

    def _repeat(self, target: int, num_blocks: float = math.inf) -> None:
        """Make changes again until the target, or until they were of so many blocks."""
        last = self.num_repeated + num_blocks
        try:
            while self._changes and self._num_applied < target and self.num_repeated < last:
                number, change = self._changes.popleft()
                self._num_applied += 1
                _make_again(self._replicas[number], change)
                self.num_repeated += max(1, change[1])
        except BaseException as error:
            reraise_interrupt(error)
            self.give_up(f"a copy of the eviction policy did not do what the policy did: {as_words(error)}")

    def give_up(self, why: str) -> None:
        """Follow no longer."""
        self.obstacle = self.obstacle or why
        for part in self._blocks:
            part.journal = None
        self._replicas = []
        self._changes.clear()


def _make_again(blocks: BlockManager, change: _Change) -> None:
    """Make a change that another manager's ``journal`` was told of.

    Raises:
        InternalError: This one evicts other blocks, or cannot make it.
    """
    name, _, arguments = change
    if name == "allocate":
        num_blocks, *taken = arguments
        found = blocks.allocate(num_blocks).tolist()
        if taken and taken[0] != found:
            raise InternalError(f"blocks {found} were taken, not {taken[0]}")
    elif name == "acquire":
        blocks.acquire(arguments[0], now_s=arguments[1], salt=arguments[2])
    elif name == "release":
        blocks.release(arguments[0], now_s=arguments[1])
    else:
        getattr(blocks, name)(*arguments)


def _twin(part: BlockManager) -> BlockManager:
    """Return blocks that are in the same state; O(blocks), of an engine that was just built.

    Raises:
        ContractError: The eviction policy cannot be copied.
    """
    strategy = part.eviction.strategy
    if not has_plain_state(type(strategy)):
        raise ContractError(f"{type(strategy).__name__} does not declare what it remembers (see plain_state)")
    made = BlockManager(num_blocks=part.num_blocks, first=part.first, eviction=part.eviction.twin())
    made.restore_state(part.copy_state())
    return made
