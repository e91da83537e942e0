"""What happens to replicas while a workload runs: failures, drains, joins."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from pathlib import Path

import attrs
from attrs.validators import and_, ge, instance_of, lt

from trencadis.errors import ConfigError, ConfigValueError
from trencadis.files import read_toml

__all__ = ["EventKind", "ReplicaEvent", "check_events", "read_events"]


class EventKind(enum.Enum):
    """What happens to a replica."""

    FAIL = "fail"
    DRAIN = "drain"
    JOIN = "join"


@attrs.frozen(kw_only=True)
class ReplicaEvent:
    """Something that happens to one replica.

    ``fail``: it ends at once; its requests go on elsewhere, after the tokens that came, and what it had cached is lost. ``drain``: it gets
    nothing new, and ends what it has. ``join``: it begins to serve with an empty cache, one that drains as soon as it has nothing left.
    A replica whose first event is a join is not there before.

    Attributes:
        time_s: Since the start of the run.
        replica: Index of the replica.
        kind: Kind of event.
    """

    time_s: float = attrs.field(converter=float, validator=and_(ge(0.0), lt(math.inf)))
    replica: int = attrs.field(validator=and_(instance_of(int), ge(0)))
    kind: EventKind = attrs.field(converter=EventKind)


def read_events(file: Path) -> tuple[ReplicaEvent, ...]:
    """Return the events of a TOML file: tables ``[[event]]`` with ``time_s``, ``replica`` and ``kind``.

    Raises:
        ConfigError: It cannot be read, or an event makes no sense.
    """
    try:
        tables = read_toml(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: no events that can be read: {error}.") from error
    events = tables.pop("event", [])
    if tables or not isinstance(events, list):
        raise ConfigError(f"{file}: holds {', '.join(tables) or 'a single event'}.", hint="Write [[event]] for each.")
    made = []
    for number, event in enumerate(events, 1):
        try:
            made.append(ReplicaEvent(**event))
        except (TypeError, ValueError) as error:
            kinds = ", ".join(kind.value for kind in EventKind)
            raise ConfigError(
                f"{file}: event {number}, {event!r}, is none: {error}.",
                hint=f"Give it time_s, replica and kind, which is one of {kinds}.",
            ) from error
    return tuple(made)


def check_events(events: Sequence[ReplicaEvent], num_replicas: int) -> tuple[ReplicaEvent, ...]:
    """Return events in order of time.

    Raises:
        ConfigValueError: One names a replica that is none, or happens to one to which it cannot.
    """
    ordered = tuple(sorted(events, key=lambda event: (event.time_s, event.replica)))
    serves: dict[int, bool] = {}
    for event in ordered:
        where = f"event {event.kind.value!r} of replica {event.replica} at {event.time_s:g} s"
        if event.replica >= num_replicas:
            raise ConfigValueError(f"{where}: there are replicas 0 to {num_replicas - 1}.", hint="Raise --replicas.")
        joins = event.kind is EventKind.JOIN
        if event.replica in serves and serves[event.replica] is joins and (joins or event.kind is EventKind.DRAIN):
            state = "serves already" if joins else "has failed or drains already"
            raise ConfigValueError(f"{where}: it {state}.", hint="Leave the event out, or correct its time.")
        serves[event.replica] = joins
    return ordered
