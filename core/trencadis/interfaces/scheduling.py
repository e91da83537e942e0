"""Contract of the noun ``scheduling``: admission, order, budgets, chunk size, preemption victim.

A policy decides; the core keeps it correct. The core checks that an order is a permutation, that budgets hold and that
blocks exist, ages starved sequences, frees what a victim held. Every method has a default, which together are
first come, first served. Methods, and columns of the view, may be added within a version; none is taken away or changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import index
from typing import NamedTuple

import attrs
import numpy as np

from trencadis.errors import ContractError
from trencadis.faults import shown
from trencadis.interfaces.laws import Law, at_least, at_most, law, one_of, permutation_of, readable, tell
from trencadis.records import FloatArray, Int32Array, Int64Array, Request

__all__ = ["INTERFACE_VERSION", "STABILITY", "SchedulerView", "SchedulingPolicy", "SupportsSteadySteps", "TokenSplit"]

INTERFACE_VERSION = 1
STABILITY = "stable"


class TokenSplit(NamedTuple):
    """The most tokens decodes and prefills may use in a step; decodes are served first, both within the step's budget.

    Attributes:
        decode: Token budget of decodes, 0 or more.
        prefill: Token budget of prefills, 0 or more.
    """

    decode: int
    prefill: int


def _within_budget(method: str, answer: TokenSplit, most: int) -> TokenSplit:
    decode, prefill = index(answer.decode), index(answer.prefill)
    if decode < 0 or prefill < 0:
        raise ContractError(f"{method}() returned {shown(answer)}: negative")
    return answer if decode <= most and prefill <= most else TokenSplit(min(decode, most), min(prefill, most))


@attrs.define(kw_only=True, slots=False)
class SchedulerView:
    """What a policy may see: columns over stable slots, and which slots wait and run. Read-only.

    A slot is the index of a live sequence in every column; it does not change while the sequence lives. The arrays are
    views of the engine's own and must not be kept beyond the call. A request's future (its true output length) is
    not here.

    Attributes:
        now_s: Engine clock at the start of this plan, seconds.
        waiting: Slots that wait, preempted ones first, else by arrival, int32 ``[num_waiting]``.
        running: Slots that hold a row and blocks, by admission, int32 ``[num_running]``.
        arrival_s: By slot, float64.
        priority: By slot, int64; smaller is more urgent.
        tenant: Number of the tenant, by slot, int64.
        num_prompt_tokens: By slot, int64.
        num_tokens: Known tokens, prompt and output and tokens in flight, by slot, int64.
        num_computed_tokens: Tokens whose KV is computed or in flight, by slot, int64.
        num_cached_tokens: Tokens that a running sequence took from the prefix cache when it was admitted, by slot, int64.
        max_total_tokens: The sequence ends at the latest with this many tokens, by slot, int64.
        num_preemptions: By slot, int64.
        num_blocks: Blocks held, by slot, int64.
        weight: Share of the tenant, as its request or its entry in the configuration says; users of one API key have parts of
            its share, which change as they come and go; by slot, float64, above 0.
        ttft_target_s: Seconds from arrival within which the first token is wanted, by slot, float64; infinity for none.
        tpot_target_s: Seconds from token to token that are wanted at most, by slot, float64; infinity for none.
        first_token_s: When the first token came, engine clock, by slot, float64; infinity before.
        waiting_since_s: When a waiting sequence began to wait, after its preemption if it had run, engine clock, by slot, float64.
        waited_s: Seconds that a sequence waited in the queue before it ran, in all, without its present wait, by slot, float64.
        prefix_tokens: Called with waiting slots, returns how many of each one's tokens the prefix cache holds now, int64. The
            first call for a sequence hashes its tokens, later ones look its hashes up: ask for those that matter.
        num_free_rows: Sequences that could be admitted now if there were blocks for them.
        num_free_blocks: Blocks that can be allocated now, evictable ones included.
        num_total_blocks: All blocks.
        block_size: Tokens per block.
        num_swapped: Waiting sequences that were preempted by swap: what they had computed is in host memory.
        num_swapped_tokens: Number of these tokens that need not be computed again, by slot, int64; 0 for all others.
        num_free_host_blocks: Blocks that a victim may have in host memory; one that holds more, or any where this is 0, is recomputed.
    """

    now_s: float
    waiting: Int32Array
    running: Int32Array
    arrival_s: FloatArray
    priority: Int64Array
    tenant: Int64Array
    num_prompt_tokens: Int64Array
    num_tokens: Int64Array
    num_computed_tokens: Int64Array
    num_cached_tokens: Int64Array
    max_total_tokens: Int64Array
    num_preemptions: Int64Array
    num_blocks: Int64Array
    weight: FloatArray
    ttft_target_s: FloatArray
    tpot_target_s: FloatArray
    first_token_s: FloatArray
    waiting_since_s: FloatArray
    waited_s: FloatArray
    prefix_tokens: Callable[[Int32Array], Int64Array]
    num_free_rows: int
    num_free_blocks: int
    num_total_blocks: int
    block_size: int
    num_swapped: int = 0
    num_swapped_tokens: Int64Array = attrs.field(factory=lambda: np.zeros(0, np.int64))
    num_free_host_blocks: int = 0


class SchedulingPolicy(ABC):  # noqa: B024 - every method has a default
    """Decides who runs. Called on the engine thread, at most once per method and step except ``chunk``, ``victim`` and ``preempt_for``.

    Methods may keep state in the policy; they must not change the view. The same calls in the same order give the same
    answers: no wall clock, no global random source.

    A call may take ``[budget] scheduling_ms``, an order of n waiting sequences n / 4096 times as long. A policy that takes longer three
    times within a minute, or once ten times as long, is replaced by its fallback.

    Attributes:
        preempts: Whether ``preempt_for`` is asked at all.
    """

    preempts: bool = False

    @law(readable())
    def admit(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        """Return why a new request is refused, at most 1,000 printable characters, or an empty string.

        Once per request, before it waits.

        Args:
            request: The request.
            num_waiting: Sequences that wait already.
            num_waiting_tokens: Their known tokens.
        """
        return ""

    @law(readable())
    def admit_tenant(self, request: Request, *, num_waiting: int, num_waiting_tokens: int) -> str:
        """Return why a new request is refused for what its tenant has waiting, or an empty string.

        Once per request, after ``admit`` let it in. The caps of ``[scheduling.tenants]`` are the core's and hold in any case.

        Args:
            request: The request.
            num_waiting: Sequences of its tenant that wait already; ``key/user`` counts for ``key``.
            num_waiting_tokens: Their tokens.
        """
        return ""

    @tell  # noqa: B027 - optional
    def on_added(self, *, slot: int, request: Request) -> None:
        """Receives which slot a new request waits in, with all that is known of it. Once per request, after ``admit``.

        A policy that takes over while requests run, as a fallback or by a change of scheduling, is told of each live one in the
        order of arrival, also of those that run already.
        """

    @law(permutation_of("view.waiting"), scales_with="view.waiting", each=4096)
    def order(self, view: SchedulerView) -> Int32Array:
        """Return ``view.waiting`` in the order in which to admit: a permutation of it.

        Called only when something could be admitted; O(n log n) in waiting sequences. With ``n`` waiting, more than 8,192, the
        order is reused for ``n // 4096`` steps, and newcomers go to the end, unless it is ``view.waiting`` itself.
        """
        return view.waiting

    @law(
        Law("two budgets from 0 on; one beyond ``token_budget`` counts as that", _within_budget, ("token_budget",)),
        opens=True,
    )
    def split(self, view: SchedulerView, *, token_budget: int) -> TokenSplit:
        """Return how many tokens decodes and prefills may use in this step.

        Their sum may exceed ``token_budget``; the core cuts prefills off first. ``TokenSplit(0, n)`` makes a
        prefill-only step.
        """
        return TokenSplit(decode=token_budget, prefill=token_budget)

    @law(at_most("num_remaining", "token_budget"))
    def chunk(self, view: SchedulerView, *, slot: int, num_remaining: int, token_budget: int) -> int:
        """Return how many tokens of a prefill to compute now, 0 .. min(num_remaining, token_budget).

        Args:
            view: The state.
            slot: Whose prefill.
            num_remaining: Tokens it still has to compute.
            token_budget: Tokens left in this step.
        """
        return min(num_remaining, token_budget)

    @law(one_of("candidates"))
    def victim(self, view: SchedulerView, *, candidates: Int32Array) -> int:
        """Return which candidate loses its blocks because a running sequence needs one; the youngest by default.

        Args:
            view: The state.
            candidates: Running slots that may be preempted, by admission, at least one.
        """
        return int(candidates[-1])

    @law(one_of("candidates", or_none=True))
    def preempt_for(self, view: SchedulerView, *, slot: int, candidates: Int32Array) -> int:
        """Return which candidate loses its blocks so that a waiting sequence can be admitted, or -1: then it waits.

        Called only if ``preempts``, for sequences at the beginning of ``order`` that lack a row or blocks, until room can be made for
        one of them: again and again until that one has all it needs. Only then are the named candidates preempted, all at once; they
        are not admitted again in the same step. The room is kept for the sequence for which it was made, even if another waited longer.

        Args:
            view: The state.
            slot: Who waits.
            candidates: Running slots that may be preempted and were not named yet, by admission, at least one.
        """
        return -1

    @tell  # noqa: B027 - optional
    def on_finished(self, *, slot: int, tenant: int, num_output_tokens: int) -> None:
        """Called when a sequence left the engine, for whatever reason; its slot may be reused."""


class SupportsSteadySteps(ABC):
    """Optional for a policy: says for how many steps decodes have room. Simulated devices look for it, and compute such steps at once.

    A policy that counts steps, or measures time between calls, leaves it out: in between it is not called.
    """

    @abstractmethod
    @law(at_least(1), otherwise=1)
    def steady_steps(self, view: SchedulerView) -> int:
        """Return for how many steps, the planned one included, ``split`` will leave room for the decodes of all that run; at least 1.

        Called after a step was planned in which every running sequence decodes and none that waits can be admitted or may make others
        give way. Whatever changes that, such as an arrival or an end, ends the stretch of steps, and so does want of blocks: so what is
        asked is whether answers depend on the number of steps or on the time alone.
        """
