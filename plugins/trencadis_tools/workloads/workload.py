"""A workload: requests with arrival times, lengths and shared prefixes; without texts, and independent of any policy.

The simulator and real engines run the same workload. Everything is drawn when the workload is made, from its seed
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
    """One request of a workload.

    Attributes:
        request_id: Id, unique in the workload.
        arrival_s: Time of sending, seconds since the start; with ``after`` the earliest time.
        num_prompt_tokens: Prompt length, at least 1, including the tokens added by ``after``.
        num_output_tokens: True length of the answer, at least 1; hidden from policies.
        max_tokens: Maximum length of the answer that policies see; 0: the longest answer of the workload.
        tenant: Name of the tenant.
        priority: Priority; smaller is more urgent.
        session: Id of the session, whose requests belong to one user; empty: none.
        after: Id of the request whose answer must have arrived before this one is sent; empty: none.
        think_s: Time from the end of ``after`` to sending, seconds, for reading or a tool.
        block_ids: Ids of the prompt's blocks of ``Workload.block_tokens`` tokens, head first; equal ids have equal contents and
            equal predecessors. Tokens beyond the blocks are not shared. With ``after`` and without block ids, the prompt begins
            with the prompt and the answer of ``after``; with block ids, only these define what is shared, for example after an
            agent cut its context.
        ttft_target_s: Target of the time to first token, seconds; infinity: none.
        tpot_target_s: Target of the time per output token, seconds; infinity: none.
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
    """Requests in order of arrival, those of a session in order.

    Attributes:
        name: Name in tables and records.
        requests: Requests, at least one.
        block_tokens: Tokens in a block of ``WorkloadRequest.block_ids``.
        seed: Seed of all draws.

    Raises:
        ConfigValueError: There is no request, a request is out of order or before the one that it follows, an id repeats, or a prompt has no
            token beyond those that it continues.
    """

    name: str
    requests: tuple[WorkloadRequest, ...] = attrs.field(repr=lambda requests: f"<{len(requests)} requests>")
    block_tokens: int = attrs.field(default=16, validator=ge(1))
    seed: int = attrs.field(default=0, validator=ge(0))

    def __attrs_post_init__(self) -> None:
        """Check the order and relations of requests."""
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
    """Return why a request cannot follow those seen, in words; empty if it can. Pure."""
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
