"""Contract of the sampling fingerprint: tells a prefill engine how to choose the first token of another engine's request.

A KV connector carries it as opaque bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from trencadis.records import Request, SamplingParams

__all__ = ["SamplingFingerprint"]


class SamplingFingerprint(ABC):
    """Describes how this engine samples; handed to the scheduler side of a KV connector. Engine thread; neither method waits."""

    @abstractmethod
    def pack(self, request: Request) -> bytes:
        """Return the data with which another engine chooses a request's first token as this one would. Pure.

        Empty if there is none: later tokens depend on more than tokens and parameters, or the request cannot be serialised.
        """

    @abstractmethod
    def unpack(self, packed: bytes) -> SamplingParams | None:
        """Return the parameters of a prefill whose one token is the first token of another engine's request. Pure.

        None: the bytes are not valid, or the other engine samples differently. The prefill's token is then not used.

        Args:
            packed: See :meth:`pack`, of any engine.
        """
