"""A rank as its executor sees it, wherever its process is, and what travels to it at the start."""

from __future__ import annotations

import math
import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import attrs

from trencadis.interfaces import Backend, Sampler
from trencadis.link import Link
from trencadis_plugins.executor.ranks.link import Kind, send_message

__all__ = ["Rank", "RemoteError", "StartRank"]


@attrs.frozen(kw_only=True)
class StartRank:
    """What a rank's process needs to load its share of a model; every value can be pickled.

    Attributes:
        rank: Which.
        make_backend: See ``Executor.start``.
        make_sampler: See ``Executor.start``.
        is_output: Whether its output counts; the log of the others has warnings and errors only.
    """

    rank: int
    make_backend: Callable[[int], Backend]
    make_sampler: Callable[[int], Sampler]
    is_output: bool


class RemoteError(Exception):
    """What raised in another process; its text is the traceback there."""

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        """Return the traceback of an error as one that can be sent."""
        return cls("".join(traceback.format_exception(error)).rstrip())


class Rank(ABC):
    """The process of one rank. Used by one thread at a time.

    Args:
        rank: Which.
        link: To its server.

    Attributes:
        heard_s: When it connected, or the last message came, by the executor's clock.
        how_stopped: Words for the reason where :meth:`is_stopped`.
    """

    how_stopped = "was stopped by a signal"

    def __init__(self, rank: int, link: Link) -> None:
        self.rank = rank
        self.link = link
        self.heard_s = -math.inf

    def call(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        """Ask for a method; the answer comes through the link.

        Raises:
            LinkClosedError: It has ended.
        """
        send_message(self.link, Kind.CALL, number, pickle.dumps((name, arguments), protocol=5))

    @abstractmethod
    def is_stopped(self, now_s: float, *, is_starting: bool) -> bool:
        """Return whether it does nothing at all, as a process that SIGSTOP has stopped, or a machine without power.

        Args:
            now_s: Time of the executor's clock.
            is_starting: It imports, loads or compiles: no thread of it may run for long, as libraries then hold Python's lock.
        """

    @abstractmethod
    def dump_stacks(self) -> None:
        """Have it write the stacks of its threads to its standard error, if it lives."""

    @abstractmethod
    def describe_end(self) -> str:
        """Return how it ended, in words, once its link is closed."""

    @abstractmethod
    def kill(self) -> None:
        """End it and what it started, at once; may be called twice."""
