"""How a first token is chosen, as one engine tells another: what a KV connector carries without looking into it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from trencadis.records import Request, SamplingParams

__all__ = ["SamplingFingerprint"]


class SamplingFingerprint(ABC):
    """Handed to the scheduler side of a KV connector by the engine. Engine thread; neither method waits."""

    @abstractmethod
    def pack(self, request: Request) -> bytes:
        """Return what another engine must know to choose a request's first token as this one would. Pure.

        Empty: it cannot, because what comes later depends on more than tokens and parameters, or because something of the request
        cannot be written down.
        """

    @abstractmethod
    def unpack(self, terms: bytes) -> SamplingParams | None:
        """Return the parameters of a prefill whose one token is the first token of another engine's request. Pure.

        None: these are no terms, or tokens are chosen in another way there. The prefill's token then means nothing.

        Args:
            terms: See :meth:`pack`, of any engine.
        """
