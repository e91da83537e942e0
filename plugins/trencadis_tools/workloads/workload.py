"""A workload: which requests come when, how long they are, and what they share; without texts, and independent of any policy.

One workload is run by the simulator and by real engines alike. Everything that is drawn is drawn when the workload is made, from its seed
and the number of the request, never in the order in which an engine asks: so two policies see the same requests.
"""

from __future__ import annotations

import math

import attrs
from attrs.validators import ge, gt

from trencadis.errors import ConfigValueError

__all__ = ["Workload", "WorkloadRequest"]


@attrs.frozen(kw_only=True)
class WorkloadRequest:
    """One request.

    Attributes:
        request_id: Unique in the workload.
        arrival_s: When it is sent, seconds since the start; of a request with ``after`` the earliest moment.
        num_prompt_tokens: At least 1; what ``after`` adds is part of it.
        num_output_tokens: True length of the answer, at least 1; no policy sees it.
        max_tokens: Longest answer that the request allows, as a policy sees it; 0: the longest of the workload.
        tenant: Who asks.
        priority: Smaller is more urgent.
        session: Requests of one session go to one user; empty: none.
        after: The request whose answer must have come before this one is sent; empty: none.
        think_s: From the end of ``after`` until it is sent: a user reads, a tool runs.
        block_ids: Of the prompt's blocks of ``Workload.block_tokens`` tokens, head first; equal ids have equal contents and equal
            predecessors. Tokens beyond them are shared with no other request. With ``after`` and without block ids the prompt begins
            with the prompt and the answer of ``after``; with block ids these alone say what it shares, as where an agent cut its context.
        ttft_target_s: Objective for the first token; infinity for none.
        tpot_target_s: Objective from token to token; infinity for none.
    """

    request_id: str
    arrival_s: float = attrs.field(validator=ge(0))
    num_prompt_tokens: int = attrs.field(validator=ge(1))
    num_output_tokens: int = attrs.field(validator=ge(1))
    max_tokens: int = attrs.field(default=0, validator=ge(0))
    tenant: str = "default"
    priority: int = 0
    session: str = ""
    after: str = ""
    think_s: float = attrs.field(default=0.0, validator=ge(0))
    block_ids: tuple[int, ...] = ()
    ttft_target_s: float = attrs.field(default=math.inf, validator=gt(0))
    tpot_target_s: float = attrs.field(default=math.inf, validator=gt(0))

    @property
    def continues(self) -> bool:
        """Whether the prompt begins with the prompt and the answer of ``after``."""
        return bool(self.after) and not self.block_ids


@attrs.frozen(kw_only=True)
class Workload:
    """Requests by time of arrival, those of a session in order.

    Attributes:
        name: For tables and records.
        requests: At least one.
        block_tokens: Tokens in a block of ``WorkloadRequest.block_ids``.
        seed: That everything was drawn from.

    Raises:
        ConfigValueError: No request, a request before its time or before the one that it follows, an id twice, or a prompt that has no
            token after those that it continues.
    """

    name: str
    requests: tuple[WorkloadRequest, ...] = attrs.field(repr=lambda requests: f"<{len(requests)} requests>")
    block_tokens: int = attrs.field(default=16, validator=ge(1))
    seed: int = attrs.field(default=0, validator=ge(0))

    def __attrs_post_init__(self) -> None:
        """Check what single requests cannot know."""
        if not self.requests:
            raise ConfigValueError(f"workload {self.name}: holds no request.")
        seen: dict[str, WorkloadRequest] = {}
        latest_s = 0.0
        for request in self.requests:
            wrong = _contradiction(request, seen, latest_s, self.block_tokens)
            if wrong:
                raise ConfigValueError(f"workload {self.name}: request {request.request_id!r} {wrong}.")
            seen[request.request_id] = request
            latest_s = request.arrival_s


def _contradiction(
    request: WorkloadRequest, seen: dict[str, WorkloadRequest], latest_s: float, block_tokens: int
) -> str:
    """Return in words why the request cannot come after those seen; empty if it can. Pure."""
    if request.request_id in seen:
        return "comes twice"
    if request.arrival_s < latest_s:
        return f"comes at {request.arrival_s:g} s, after one of {latest_s:g} s; requests are sorted by time"
    if (len(request.block_ids) - 1) * block_tokens >= request.num_prompt_tokens:
        return f"has {request.num_prompt_tokens} prompt tokens and {len(request.block_ids)} blocks of {block_tokens}"
    if not request.after:
        return ""
    before = seen.get(request.after)
    if before is None:
        return f"follows {request.after!r}, which is not before it"
    head = before.num_prompt_tokens + before.num_output_tokens
    if request.continues and request.num_prompt_tokens <= head:
        return (
            f"has {request.num_prompt_tokens} prompt tokens, and continues {request.after!r}, whose prompt and answer have {head}; "
            "give it block_ids if its context was cut"
        )
    return ""
