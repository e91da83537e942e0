"""Calls of a worker side on state of the scheduler side, recorded in the process of a rank and repeated in the engine's.

    rank      counters, breaker, cost, recent, index ─ journal ─▶ ConnectorReport.messages
    engine    on_worker_message ─▶ the same calls, on the state itself

The worker side only writes to that state, and does not wait for an answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from trencadis.errors import TransferError
from trencadis.interfaces.block_store import BlockStore
from trencadis.records import TransferCause

__all__ = ["IndexStore", "Journal", "KeyIndex", "repeat"]

_REPEATED: Final[Mapping[str, frozenset[str]]] = {
    "counters": frozenset({"failed", "moved", "ended", "dropped"}),
    "breaker": frozenset({"failed"}),
    "cost": frozenset({"loaded", "gave_up"}),
    "recent": frozenset({"discard"}),
    "index": frozenset({"add", "remove", "clear"}),
}
_MOST_CALLS: Final = 8192
"""Maximum number of calls in one message."""
_Call: TypeAlias = tuple[str, str, Sequence[Any], dict[str, Any]]
"""Name of the state, method, and arguments."""


class Journal:
    """Calls to be repeated. From any thread."""

    def __init__(self) -> None:
        self._calls: deque[_Call] = deque()

    def of(self, name: str) -> Any:
        """Return a recorder of calls on the named state, one that :func:`repeat` knows."""
        return _Recorder(name, self._calls)

    def take(self) -> tuple[bytes, ...]:
        """Return and forget the calls so far, as messages."""
        calls: list[_Call] = []
        while self._calls and len(calls) < _MOST_CALLS:
            calls.append(self._calls.popleft())
        return (msgspec.msgpack.encode(calls),) if calls else ()


class _Recorder:
    """Records calls; as a breaker it always allows, since the scheduler side has the breaker and orders all work."""

    allows = True

    def __init__(self, name: str, calls: deque[_Call]) -> None:
        self._name = name
        self._calls = calls

    def __getattr__(self, method: str) -> Callable[..., None]:
        if method not in _REPEATED[self._name]:
            raise AttributeError(f"{self._name}.{method} is not known in the process of a rank")
        return lambda *args, **kwargs: self._calls.append((self._name, method, args, kwargs))


def repeat(message: bytes, state: Mapping[str, Any], *, is_first: bool) -> None:
    """Make the calls of a message.

    Args:
        message: Message from :meth:`Journal.take`.
        state: State of the scheduler side, by name.
        is_first: Whether it is the first rank's message; tokens and durations, which each rank reports, are counted
            only for it.

    Raises:
        TransferError: The message cannot be decoded, or contains an unknown call.
    """
    try:
        calls = msgspec.msgpack.decode(message, type=list[_Call])
    except msgspec.MsgspecError as error:
        raise TransferError(f"A rank's message cannot be read: {error}.", cause=TransferCause.CORRUPT) from error
    for name, method, args, kwargs in calls:
        if method not in _REPEATED.get(name, ()):
            raise TransferError(f"A rank's message calls {name}.{method}.", cause=TransferCause.CORRUPT)
        if not is_first and method == "ended":
            continue
        if not is_first and method == "moved":
            kwargs["num_tokens"] = 0
        getattr(state[name], method)(*args, **kwargs)


class KeyIndex:
    """Known keys of the objects that ranks hold, each in its own memory. Engine and look-up thread."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._keys

    def add(self, key: str) -> None:
        """Add a key."""
        self._keys[key] = None

    def remove(self, key: str) -> None:
        """Remove a key, if it is there."""
        self._keys.pop(key, None)

    def clear(self, prefix: str) -> None:
        """Remove all keys that begin with a prefix."""
        for key in [key for key in self._keys if key.startswith(prefix)]:
            del self._keys[key]


class IndexStore(BlockStore):
    """Store for look-ups of the scheduler side if each rank has its own store: it knows keys, and holds no objects.

    Args:
        index: Keys of all ranks.
    """

    def __init__(self, index: KeyIndex) -> None:
        self._index = index

    def contains(self, keys: Sequence[str]) -> int:
        """Return how many leading keys are there."""
        return next((i for i, key in enumerate(keys) if key not in self._index), len(keys))

    def get(self, keys: Sequence[str], targets: Sequence[memoryview]) -> Sequence[int]:
        """Return no object."""
        return [-1] * len(keys)

    def put(self, keys: Sequence[str], objects: Sequence[Sequence[memoryview]]) -> int:
        """Keep nothing."""
        return 0

    def delete(self, keys: Sequence[str]) -> None:
        """Do nothing."""

    def interrupt(self) -> None:
        """Do nothing: no call blocks."""

    def close(self) -> None:
        """Do nothing."""
