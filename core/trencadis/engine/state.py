"""All state of the engine that changes from step to step, and the moves between states.

Only this module moves a sequence between waiting, aside, running and finished; scheduler, committer and stages decide when.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from trencadis.clock import HeldClock
from trencadis.engine.cache.block_manager import BlockManager
from trencadis.engine.cache.hashing import BlockHasher
from trencadis.engine.sequences import Claim, Leaving, Rows, Sequence, SequenceState, SequenceTable, SlotQueue
from trencadis.errors import InternalError, RequestError
from trencadis.records import FinishedSequence, FinishReason, Int32Array, Request, RowStart, read_only

__all__ = ["Aside", "BlockManager", "EngineState"]


@attrs.frozen
class Aside:
    """Why a sequence stands aside.

    Attributes:
        reason: Such as ``loading``.
        is_queued: It counts as waiting all the same.
        num_holds: Stages that hold it back, and have to resume it.
    """

    reason: str
    is_queued: bool
    num_holds: int = 1


class EngineState:
    """Sequences, rows, blocks and queues of one engine.

    Args:
        clock: Source of time; the engine holds it at each request, plan and commit.
        blocks: The KV blocks; rows are divided as they are.
        hasher: Hashes the contents of blocks.
        num_rows: ``max_num_seqs``.
        max_model_len: Tokens.
        block_size: Tokens per block.
        eos_token_ids: The model's.
        seed: The engine's.
        prefix_caching: Whether blocks are kept for reuse.
        plan_hash: Hash of the plugins, versions and options in force; a stage that puts others in their place changes it.

    Attributes:
        aside: Slots that stand aside, the first first: a stage says when they can run.
        num_queued_aside: Those of them that count as waiting.
        leaving: Called, in order, with each sequence that is preempted or ends; see ``Stage.leaving``.
        facts: Why the newest plan, or attempt to plan, came to be so; empty unless a stage has called :meth:`keep_facts`, which see.
        on_filled: Called with the ids of a sequence's blocks that became full of committed tokens, and their hashes.
        num_waiting_tokens: Known tokens of all sequences that wait, as many of each as there were when it began to wait.
        on_waiting: Called with the slot of each sequence that waits from now on, and the number of its tokens; with the same number below 0
            if it waits no more.
        waiting_of: Returns how many sequences wait already of whom a new request is from, and their tokens; a stage may count them.
        num_kept_blocks: Blocks that stages hold for no sequence, and give back by themselves.
        shown: Further fields of the views that policies are given, from stages.
        gauges: Further fields of ``StepStats`` and ``EngineGauges``, from stages.
    """

    def __init__(
        self,
        *,
        clock: HeldClock,
        blocks: BlockManager,
        hasher: BlockHasher,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        eos_token_ids: tuple[int, ...],
        seed: int,
        prefix_caching: bool,
        plan_hash: str = "",
    ) -> None:
        self.clock = clock
        self.blocks = blocks
        self.hasher = hasher
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.eos_token_ids = eos_token_ids
        self.prefix_caching = prefix_caching
        self.plan_hash = plan_hash
        self.table = SequenceTable()
        self.rows = Rows(
            num_rows=num_rows, max_model_len=max_model_len, block_size=block_size, num_parts=len(blocks.parts)
        )
        self.waiting = SlotQueue()
        self.running: Int32Array = np.empty(0, np.int32)
        self.aside: dict[int, Aside] = {}
        self.num_queued_aside = 0
        self.leaving: tuple[Callable[[Sequence, Leaving], Claim | None], ...] = ()
        self.facts: deque[tuple[Any, ...]] = deque(maxlen=0)
        self.on_filled: list[Callable[[list[int], list[bytes]], None]] = []
        self.num_waiting_tokens = 0
        self.on_waiting: list[Callable[[int, int], None]] = []
        self.waiting_of: Callable[[Request], tuple[int, int]] = lambda _: (0, 0)
        self.num_kept_blocks = 0
        self.shown: dict[str, int] = {}
        self.gauges: dict[str, Any] = {}
        self.slot_of: dict[str, int] = {}
        self.row_starts: list[RowStart] = []
        self._seed = seed
        self._counted: dict[int, int] = {}  # tokens that a waiting slot was counted with

    # ------------------------------------------------------------------------------------------ enter and leave

    def add(self, request: Request, *, original_request: Request | None = None) -> Sequence:
        """Make a sequence of a request that was checked and completed; :meth:`enqueue` or :meth:`set_aside` comes next.

        Args:
            request: The request to serve.
            original_request: The same as it came, before stages completed it; None: it came like that.
        """
        table = self.table
        slot = table.take_slot()
        params = request.params
        own_ends = () if params.ignore_eos else request.end_token_ids
        eos = () if params.ignore_eos else self.eos_token_ids
        sequence = Sequence(
            request,
            original_request=original_request,
            slot=slot,
            seed=self.row_seed(request),
            stop_token_ids=tuple({*eos, *own_ends, *params.stop_token_ids}),
        )
        table.sequences[slot] = sequence
        length = len(request.prompt_token_ids)
        most = self.max_model_len if params.max_tokens is None else min(self.max_model_len, length + params.max_tokens)
        table.arrival_s[slot] = table.waiting_since_s[slot] = self.clock.now_s()
        table.priority[slot] = request.priority
        table.ttft_target_s[slot] = request.ttft_target_s
        table.tpot_target_s[slot] = request.tpot_target_s
        table.num_prompt_tokens[slot] = length
        table.num_tokens[slot] = table.num_known_tokens[slot] = len(sequence.tokens)
        table.max_total_tokens[slot] = most
        table.min_total_tokens[slot] = length + params.min_tokens
        table.checks_eos[slot] = not params.ignore_eos
        table.checks_own_stops[slot] = bool(params.stop_token_ids or own_ends)
        table.num_prompt_logprobs += params.prompt_logprobs is not None
        self.slot_of[request.request_id] = slot
        return sequence

    def enqueue(self, sequence: Sequence) -> None:
        """Let a new sequence wait at the end of the queue."""
        self._wait(sequence, front=False)

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        error: str = "",
        stop_token_id: int | None = None,
        refusal: RequestError | None = None,
        cost_s: float = 0.0,
    ) -> FinishedSequence:
        """Take a sequence out of the engine, from whatever state, and free what it held; ``cost_s`` see ``Leaving``."""
        slot, table = sequence.slot, self.table
        tokens = self.known_tokens(sequence)
        now_s = self.clock.now_s()
        # What was given up or has failed may hold anything, and will not be asked for.
        is_complete = reason in (FinishReason.STOP, FinishReason.LENGTH) and not sequence.is_approximate
        leaving = Leaving(reason=reason, is_complete=is_complete, cost_s=cost_s)
        if sequence.state is SequenceState.RUNNING:
            self._leave_row(
                sequence, leaving, num_tokens=int(table.num_known_tokens[slot])
            )  # blocks of tokens to verify hold no text
        else:
            self._told(sequence, leaving)
            self.drop_claim(sequence)
            if sequence.state is SequenceState.ASIDE:
                self._end_aside(slot)
            else:
                self._leave_queue(sequence)
        num_prompt = int(table.num_prompt_tokens[slot])
        finished = FinishedSequence(
            request_id=sequence.request.request_id,
            slot=slot,
            token_ids=read_only(tokens[num_prompt:].copy()),
            finish_reason=reason,
            num_prompt_tokens=num_prompt,
            num_cached_tokens=_num_cached(sequence),
            num_preemptions=int(table.num_preemptions[slot]),
            arrival_s=float(table.arrival_s[slot]),
            first_scheduled_s=sequence.first_scheduled_s,
            first_token_s=sequence.first_token_s,
            finish_s=now_s,
            error=error,
            stop_token_id=stop_token_id,
            transfer_params=leaving.transfer_params,
            num_approximate_tokens=sequence.num_approximate_tokens,
            refusal=refusal,
        )
        table.num_prompt_logprobs -= sequence.request.params.prompt_logprobs is not None
        del self.slot_of[sequence.request.request_id]
        table.give_back_slot(slot)
        return finished

    def restore(self, sequence: Sequence, *, is_running: bool, blocks: Int32Array | None) -> None:
        """Put a sequence where it was in another engine whose columns this one has taken.

        Args:
            sequence: With all its known tokens.
            is_running: It has its row; else it waits, as the queue says.
            blocks: That it holds, if it runs.
        """
        slot = sequence.slot
        self.table.sequences[slot] = sequence
        self.slot_of[sequence.request.request_id] = slot
        if not is_running or blocks is None:
            self._count_waiting(slot)
            return
        sequence.state = SequenceState.RUNNING
        row = int(self.table.row[slot])
        self.rows.tokens[row, : len(sequence.tokens)] = sequence.tokens
        self.rows.block_tables[row, : len(blocks)] = blocks

    # ------------------------------------------------------------------------------------------- running or not

    def admit(self, sequence: Sequence, *, blocks: Int32Array, num_computed: int, num_cached: int) -> None:
        """Give a waiting sequence a row and blocks.

        Args:
            sequence: It waits.
            blocks: For all its known tokens, of its part.
            num_computed: First tokens whose KV is in them, or comes there before the next step reads it.
            num_cached: Those of them that a cache had.
        """
        table, slot = self.table, sequence.slot
        self._leave_queue(sequence)
        sequence.claim = None
        row = self.rows.take(sequence.part)
        tokens = sequence.tokens
        self.rows.tokens[row, : len(tokens)] = tokens
        columns = np.arange(len(blocks), dtype=np.int32)
        self.rows.write_blocks(np.full(len(blocks), row, np.int32), columns, blocks)
        table.row[slot] = row
        table.waited_s[slot] += self.clock.now_s() - table.waiting_since_s[slot]
        table.num_blocks[slot] = len(blocks)
        table.num_computed_tokens[slot], table.num_cached_tokens[slot] = num_computed, num_cached
        table.num_hashed_blocks[slot] = num_cached // self.block_size
        sequence.state = SequenceState.RUNNING
        if sequence.first_scheduled_s is None:
            sequence.first_scheduled_s = self.clock.now_s()
        self.running = np.append(self.running, np.int32(slot))
        self.row_starts.append(
            RowStart(
                row=row,
                token_ids=tokens,
                num_prompt_tokens=int(table.num_prompt_tokens[slot]),
                params=sequence.request.params,
                seed=sequence.seed,
                eos_token_ids=sequence.stop_token_ids,
            )
        )

    def preempt(self, sequence: Sequence, *, kv_valid: bool = True) -> None:
        """Take row and blocks of a running sequence; it waits at the front, to be recomputed where no stage keeps what it had.

        Args:
            sequence: It runs.
            kv_valid: The blocks hold what they should; after a failed step they may not, and nothing of them is kept. Nor is what is
                still in flight.
        """
        table, slot = self.table, sequence.slot
        kv_valid &= not sequence.is_provisional  # it read what may not have come
        if not kv_valid:
            table.num_tokens[slot] = table.num_known_tokens[slot]
        sequence.tokens = self.known_tokens(sequence).copy()
        if table.num_tokens[slot] > table.num_known_tokens[slot]:
            sequence.late_token_epoch = int(table.epoch[slot])
        table.was_preempted = True
        table.high_water[slot] = max(table.high_water[slot], table.num_computed_tokens[slot])
        claim = self._leave_row(sequence, Leaving(), num_tokens=int(table.num_computed_tokens[slot]) if kv_valid else 0)
        sequence.claim = claim
        sequence.is_approximate &= claim is not None  # what is computed anew is exact
        table.new_epoch(slot)
        table.num_preemptions[slot] += 1
        table.waiting_since_s[slot] = self.clock.now_s()
        table.num_computed_tokens[slot] = table.num_blocks[slot] = table.num_hashed_blocks[slot] = 0
        self._wait(sequence, front=True)

    def set_aside(self, sequence: Sequence, reason: str, *, is_queued: bool, num_holds: int = 1) -> None:
        """Let a new sequence, or one that waits, stand aside until :meth:`resume`.

        Args:
            sequence: It holds no row.
            reason: Why, such as ``loading``.
            is_queued: It counts as waiting all the same.
            num_holds: Stages that hold it back: it is resumed by the last of them.
        """
        slot = sequence.slot
        if sequence.state is SequenceState.WAITING and self.waiting.remove(slot):
            self._count_waiting(slot, waits=False)
        sequence.state = SequenceState.ASIDE
        self.aside[slot] = Aside(reason, is_queued, num_holds)
        if is_queued:
            self.num_queued_aside += 1
            self._count_waiting(slot)

    def resume(self, sequence: Sequence, *, front: bool) -> None:
        """Let a sequence that stood aside wait, at the front of the queue or at its end, unless another stage still holds it back."""
        slot = sequence.slot
        if self.aside[slot].num_holds > 1:
            self.aside[slot] = attrs.evolve(self.aside[slot], num_holds=self.aside[slot].num_holds - 1)
            return
        aside = self._end_aside(slot)
        if aside.is_queued:
            self.table.waiting_since_s[slot] = self.clock.now_s()
        self._wait(sequence, front=front)

    def drop_claim(self, sequence: Sequence) -> None:
        """Give up what is kept for a sequence that waits or stands aside: its tokens will be computed."""
        claim, sequence.claim = sequence.claim, None
        if claim is not None:
            claim.drop(sequence)
            if claim.blocks is not None:
                self.blocks.release(claim.blocks, now_s=self.clock.now_s())
            sequence.is_approximate, sequence.num_approximate_tokens = False, 0

    def keep_facts(self) -> None:
        """Keep :attr:`facts` from now on, for stages that read them in ``after_plan``. Each is a tuple of a word and values.

        * ``begin``: number of the plan, sequences that waited, and blocks that could be had; once, first.
        * ``alone``: the slot of a suspect of a failed step, which runs alone.
        * ``split``: the policy's ``TokenSplit``, the running slots with a token to compute, and those of them that decode.
        * ``left``: tokens for admission.
        * ``order``: the waiting slots in the order of admission.
        * ``skip``: a waiting slot that was passed over, and why in words.
        * ``held back``: waiting slots that a stage held back in an earlier plan, and was not asked about in this one.
        * ``stop``: what admission ran out of (``blocks``, ``rows`` or ``tokens``), the first slot that lacked it, blocks that it takes, and
          blocks that there were; the last three may be left out.
        * ``preempt``: the victim, the waiting slot that was let in, or -1: decodes needed blocks; how many, and how many there were.
        """
        self.facts = deque()

    # ----------------------------------------------------------------------------------------------- questions

    def backlog(self) -> int:
        """Return how many tokens wait to be computed, those in flight left out. Pure."""
        table, running = self.table, self.running
        left = table.num_tokens[running] - table.num_computed_tokens[running]
        return self.num_waiting_tokens + int(left.sum())

    @property
    def num_queued(self) -> int:
        """Sequences that wait for a step, or stand aside and count as waiting."""
        return len(self.waiting) + self.num_queued_aside

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no row."""
        return len(self.waiting) + len(self.aside)

    def is_waiting(self, slot: int) -> bool:
        """Return whether the slot's sequence waits; False for a slot that is not in use."""
        sequence = self.table.sequences[slot]
        return sequence is not None and sequence.state is SequenceState.WAITING

    def local_hit(self, sequence: Sequence, blocks: BlockManager | None = None) -> list[int]:
        """Return cached blocks that hold the start of a waiting sequence; at least one token is left to compute.

        Hashes of its blocks are kept with it: the first call costs its length, the next ones the length of the hit.

        Args:
            sequence: It waits.
            blocks: Those that are looked at: of a part; None: all.
        """
        if sequence.request.params.prompt_logprobs is not None:
            return []  # every prompt token needs its logits
        if not self.prefix_caching and not self.on_filled:
            return []
        hashes, most = sequence.block_hashes, (len(sequence.tokens) - 1) // self.block_size
        if len(hashes) < most:
            request = sequence.request
            self.hasher.extend(hashes, sequence.tokens, num_blocks=most, salt=request.cache_salt)
        if not self.prefix_caching:
            return []
        return (blocks or self.blocks).longest_hit(hashes if len(hashes) == most else hashes[:most])

    def known_tokens(self, sequence: Sequence) -> Int32Array:
        """Return a view of all tokens whose ids the host has."""
        if sequence.state is not SequenceState.RUNNING:
            return sequence.tokens
        row = self.table.row[sequence.slot]
        return self.rows.tokens[row, : self.table.num_known_tokens[sequence.slot]]

    def blocks_of(self, sequence: Sequence) -> Int32Array:
        """Return a view of a running sequence's block ids, in order."""
        row = self.table.row[sequence.slot]
        return self.rows.block_tables[row, : self.table.num_blocks[sequence.slot]]

    def _told(self, sequence: Sequence, leaving: Leaving) -> Claim | None:
        """Tell the stages that a sequence leaves; returns what one of them keeps."""
        claims = [act(sequence, leaving) for act in self.leaving]
        return next((claim for claim in claims if claim is not None), None)

    def _leave_row(self, sequence: Sequence, leaving: Leaving, *, num_tokens: int) -> Claim | None:
        """Free row and blocks; ``num_tokens`` first tokens have valid KV, which stages may keep."""
        slot = sequence.slot
        blocks = self.blocks_of(sequence).copy()
        if sequence.is_provisional:
            leaving.is_complete, num_tokens = False, 0
        leaving.blocks = blocks[: -(-num_tokens // self.block_size)]
        claim = self._told(sequence, leaving)
        sequence.is_provisional = False
        self.blocks.release(blocks[leaving.num_kept_blocks :], now_s=self.clock.now_s())
        self.rows.give_back(int(self.table.row[slot]))
        self.table.row[slot] = -1
        self.running = self.running[self.running != slot]
        return claim

    def _wait(self, sequence: Sequence, *, front: bool) -> None:
        sequence.state = SequenceState.WAITING
        (self.waiting.push_front if front else self.waiting.append)(sequence.slot)
        self._count_waiting(sequence.slot)

    def _leave_queue(self, sequence: Sequence) -> None:
        if not self.waiting.remove(sequence.slot):
            raise InternalError(f"slot {sequence.slot} is {sequence.state.name}, not waiting")
        self._count_waiting(sequence.slot, waits=False)

    def _count_waiting(self, slot: int, *, waits: bool = True) -> None:
        if waits:
            change = self._counted[slot] = int(self.table.num_tokens[slot])
        else:
            change = -self._counted.pop(slot)
        self.num_waiting_tokens += change
        for act in self.on_waiting:
            act(slot, change)

    def _end_aside(self, slot: int) -> Aside:
        aside = self.aside.pop(slot)
        if aside.is_queued:
            self.num_queued_aside -= 1
            self._count_waiting(slot, waits=False)
        return aside

    def row_seed(self, request: Request) -> int:
        """Return the key of a request's random numbers. Pure."""
        seed = request.params.seed
        text = f"request {seed}" if seed is not None else f"engine {self._seed} {request.request_id}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _num_cached(sequence: Sequence) -> int:
    """Return how many prompt tokens were cached before a sequence came. Pure."""
    is_without_run = sequence.num_cached_tokens < 0 and sequence.first_scheduled_s is not None
    # Its first token, chosen where the prompt was computed, was its last.
    return max(sequence.max_cached_tokens if is_without_run else sequence.num_cached_tokens, 0)
