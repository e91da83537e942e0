"""What is asked of an engine's thread."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TypeAlias

import attrs

from trencadis.front.output_stream import OutputStream
from trencadis.front.prompts import Prompt
from trencadis.records import Embedding, SamplingParams

__all__ = ["Abort", "AskMetrics", "Command", "Embed", "End", "Submission"]


@attrs.frozen(kw_only=True, eq=False)
class Submission:
    """A request on its way to the engine, and where its outputs go.

    Attributes:
        prompt: Text or token ids.
        params: How to continue it.
        request_id: Unique among live requests.
        priority: Smaller is more urgent.
        tenant: Who asks.
        cache_salt: Prefix-cache blocks are shared only between requests of equal salt; None: the tenant.
        streams: Deliver every change, not only the end.
        stream: Gets the outputs.
    """

    prompt: Prompt
    params: SamplingParams
    request_id: str
    priority: int = 0
    tenant: str = ""
    cache_salt: str | None = None
    streams: bool
    stream: OutputStream


@attrs.frozen(kw_only=True, eq=False)
class Embed:
    """Texts on their way to the engine.

    Attributes:
        prompts: Text or token ids, each.
        request_id: Unique among all.
        future: Gets one vector for each, or an error.
    """

    prompts: Sequence[Prompt]
    request_id: str
    future: Future[list[Embedding]] = attrs.field(factory=Future)


@attrs.frozen(kw_only=True, eq=False)
class AskMetrics:
    """A question for what the observers measured.

    Attributes:
        future: Gets it, in Prometheus' text format.
    """

    future: Future[str] = attrs.field(factory=Future)


@attrs.frozen(kw_only=True)
class Abort:
    """End a request.

    Attributes:
        request_id: The client's.
        only: Leave the request alone if its outputs go elsewhere.
    """

    request_id: str
    only: OutputStream | None = None


@attrs.frozen
class End:
    """End the engine."""


Command: TypeAlias = Submission | Embed | AskMetrics | Abort | End
