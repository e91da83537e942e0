"""What is asked of an engine's thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import attrs

from trencadis.client.output_stream import OutputStream
from trencadis.client.prompts import Prompt
from trencadis.records import DEFAULT_TERMS, Embedding, RequestTerms, SamplingParams

__all__ = ["Abort", "Ask", "AskMetrics", "Command", "Embed", "End", "Submission"]


@attrs.frozen(kw_only=True, eq=False)
class Submission:
    """A request on its way to the engine, and where its outputs go.

    Attributes:
        prompt: Text or token ids.
        params: How to continue it.
        request_id: Unique among live requests.
        terms: Who asks, and how urgent it is.
        streams: Deliver every change, not only the end.
        stream: Gets the outputs.
    """

    prompt: Prompt
    params: SamplingParams
    request_id: str
    terms: RequestTerms = DEFAULT_TERMS
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


@attrs.frozen(kw_only=True, eq=False)
class Ask:
    """A question of an operator, or a change that one asks for; see :class:`trencadis.engine.inspect.administration.Administration`.

    Attributes:
        question: Which.
        arguments: Plain values by name.
        future: Gets the answer, a table, or an error.
    """

    question: str
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    future: Future[dict[str, Any]] = attrs.field(factory=Future)


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


Command: TypeAlias = Submission | Embed | AskMetrics | Ask | Abort | End
