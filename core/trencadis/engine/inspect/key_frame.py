"""Key frames: all that an engine's next steps depend on, copied between two steps, and put into an engine that was just built.

    take ── copies of arrays and dictionaries, some milliseconds ──▶ KeyFrame ── encoded ──▶ FlightRecord.frame ── restore ──▶ Engine

Without a KV connector, and without sequences that wait for their sampler. Tokens are not in it: of each sequence only how many are known.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from trencadis.engine.cache.block_manager import BlockManager
from trencadis.engine.cache.partitions import PartitionedBlocks
from trencadis.engine.inspect.accounting import SubmittedStep
from trencadis.engine.inspect.policy_memory import PolicyMemory
from trencadis.engine.sequences import Sequence as EngineSequence
from trencadis.engine.sequences import SequenceState
from trencadis.engine.state import EngineState
from trencadis.interfaces import PendingStep
from trencadis.records import Drafts, Plan, Request

if TYPE_CHECKING:
    from trencadis.engine.engine import Engine
    from trencadis.engine.inspect.flight_recorder import RecordedLife

__all__ = ["KeyFrame", "restore_key_frame", "take_key_frame"]

_SEQUENCE_FIELDS = (
    "slot",
    "partition",
    "num_cached_tokens",
    "first_scheduled_s",
    "first_token_s",
    "late_token_epoch",
    "num_failures",
    "looked_up",
    "host_blocks",
)
_PLAN_FIELDS = ("step", "slots", "rows", "epochs", "starts", "num_scheduled", "samples", "admitted", "preempted")
_ORDER_FIELDS = ("_order", "_known", "_num_appended", "_num_removed", "_steps_left")
_ADAPTER_FIELDS = ("_numbers", "_num_users", "_reserved_for", "_closed")
_ACCOUNT_FIELDS = ("_numbers", "_waiting", "num_waiting_tokens")
_SWAP_FIELDS = ("num_free", "num_swapped", "_num_free", "_num_fallbacks")
_RECOVERY_FIELDS = ("suspects", "_num_others", "_num_losses")
_TABLE_FIELDS = ("_free", "_next_epoch", "was_preempted", "num_prompt_logprobs")


@attrs.define(kw_only=True, eq=False)
class KeyFrame:
    """Copies, made by :func:`take_key_frame`.

    Attributes:
        plain: Numbers, arrays, and dictionaries of them.
        blocks: The same of each partition's blocks; hashes are ``bytes``.
        scheduling: What the scheduling policy remembers.
        evictions: What the eviction policy of each partition remembers.
        obstacles: Why it cannot be restored exactly.
    """

    plain: dict[str, Any]
    blocks: list[dict[str, Any]]
    scheduling: PolicyMemory
    evictions: list[PolicyMemory]
    obstacles: list[str]

    def encoded(self, lives: Sequence[RecordedLife], numbers: Mapping[int, int]) -> tuple[dict[str, Any], list[str]]:
        """Return it as values of msgpack, and why it cannot be restored exactly.

        Hashes become numbers; of each that a recorded request has, which block of which request it is of.

        Args:
            lives: The requests of the record.
            numbers: Their numbers, by ``id``.
        """
        hashes: dict[bytes, int] = {}

        def number_of(block_hash: bytes) -> int:
            return hashes.setdefault(block_hash, len(hashes))

        memories = [self.scheduling, *self.evictions]
        frame = {
            **self.plain,
            "requests": [numbers[life] for life in self.plain["requests"]],
            "blocks": [
                {
                    **part,
                    "hash_of": [[block, number_of(one)] for block, one in part["hash_of"].items()],
                    "previous": [[number_of(one), number_of(before)] for one, before in part["previous"].items()],
                }
                for part in self.blocks
            ],
            "scheduling": self.scheduling.encoded(number_of),
            "evictions": [one.encoded(number_of) for one in self.evictions],
        }
        homes: dict[int, tuple[int, int]] = {}
        for life in lives:
            for depth, block_hash in enumerate(list(life.block_hashes)):
                if block_hash in hashes:
                    homes.setdefault(hashes[block_hash], (numbers[id(life)], depth))
        frame["hashes"] = [[one, *home] for one, home in homes.items()]
        return frame, self.obstacles + [one.obstacle for one in memories if one.obstacle]


def take_key_frame(engine: Engine, lives: Sequence[RecordedLife]) -> KeyFrame:
    """Copy the state of an engine between two steps.

    Args:
        engine: Not changed.
        lives: Its requests, in order of arrival.
    """
    state, scheduler = engine._state, engine._scheduler
    policy, swapping, parts = engine._policy, state.swapping, _parts(state)
    obstacles = []
    if policy.num_quarantined or any(part._eviction.num_quarantined for part in parts):
        obstacles.append("a policy had been replaced by its fallback before the record begins")
    if state.compiling:
        obstacles.append("a request waited for its sampler where the record begins")
    return KeyFrame(
        plain={
            "next_step": scheduler.next_step,
            "had_drafts": scheduler.had_drafts,
            "num_idle_steps": engine._num_idle_steps,
            "now_s": state.clock.now_s(),
            "requests": [id(life) for life in lives],
            "sequences": [_sequence(state, life.sequence) for life in lives if life.sequence is not None],
            "columns": {name: getattr(state.table, name).copy() for name in state.table.columns},
            "table": _copies(state.table, _TABLE_FIELDS),
            "free_rows": [list(rows) for rows in state.rows._free],
            "waiting": _copies(state.waiting, ("slots", "num_front", "num_appended", "num_removed")),
            "running": state.running.copy(),
            "accounts": _copies(state.tenants, _ACCOUNT_FIELDS),
            "costs": [dict(one._costs) for one in (state.tenants.failed_steps, state.tenants.preparations)],
            "adapters": _copies(state.adapters, _ADAPTER_FIELDS),
            "swapping": {**_copies(swapping, _SWAP_FIELDS), "stacks": [one.copy() for one in swapping._stacks]},
            "order": _copies(scheduler.admission._order, _ORDER_FIELDS),
            "recovery": _copies(engine._recovery, _RECOVERY_FIELDS),
            "in_flight": [_plan(step.plan) for step in engine._in_flight],
        },
        blocks=[_blocks(part) for part in parts],
        scheduling=PolicyMemory(policy.strategy),
        evictions=[PolicyMemory(part._eviction.strategy) for part in parts],
        obstacles=obstacles,
    )


def _copies(owner: object, names: Sequence[str]) -> dict[str, Any]:
    values = {name: getattr(owner, name) for name in names}
    return {name: value.copy() if hasattr(value, "copy") else value for name, value in values.items()}


def _parts(state: EngineState) -> Sequence[BlockManager]:
    return state.blocks.parts if isinstance(state.blocks, PartitionedBlocks) else (state.blocks,)


def _sequence(state: EngineState, sequence: EngineSequence) -> dict[str, Any]:
    """Return what a sequence has beyond its columns."""
    is_running = sequence.state is SequenceState.RUNNING
    return {
        **{name: getattr(sequence, name) for name in _SEQUENCE_FIELDS},
        "is_running": is_running,
        "blocks": state.blocks_of(sequence).copy() if is_running else None,
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        **{name: getattr(plan, name) for name in _PLAN_FIELDS},
        "num_drafts": None if plan.drafts is None else plan.drafts.num_drafts,
    }


def _blocks(part: BlockManager) -> dict[str, Any]:
    return {
        "free": part._stack[: part.num_free].copy(),
        "num_available": part.num_available,
        "ref_counts": part.ref_counts[part.first : part.first + part.num_blocks].copy(),
        "hash_of": part._hash_of.copy(),
        "depth_of": part._depth_of.copy(),
        "previous": part._previous.copy(),
        "id_of": dict(part._eviction._id_of),
    }


# ------------------------------------------------------------------------------------------------------- restore


def restore_key_frame(
    engine: Engine,
    frame: Mapping[str, Any],
    *,
    request_of: Callable[[int], Request],
    tokens_of: Callable[[int], Sequence[int]],
    pending: Callable[[Plan], PendingStep],
    restores_scheduling: bool = True,
    restores_eviction: bool = True,
) -> None:
    """Put an engine that was just built, by the same configuration, into a recorded state.

    Args:
        engine: It has had no request.
        frame: Of a record.
        request_of: Returns the request of a number.
        tokens_of: Returns all its tokens, those included that are not known yet.
        pending: Returns what waits for a step that was in flight.
        restores_scheduling: The policy is the recorded one; else it is told of the live requests.
        restores_eviction: The policy is the recorded one; else it is told of the cached blocks.
    """
    frame = copy.deepcopy(frame)  # the engine changes what it is given
    state, scheduler = engine._state, engine._scheduler
    table, swapping = state.table, state.swapping
    state.clock.hold()
    _restore_sequences(state, frame, request_of, tokens_of)
    scheduler.next_step, scheduler.had_drafts = frame["next_step"], frame["had_drafts"]
    engine._num_idle_steps = frame["num_idle_steps"]
    state.running = frame["running"]
    for slot in frame["waiting"]["slots"].tolist():
        state.waiting.append(slot)
    _put(state.waiting, {name: value for name, value in frame["waiting"].items() if name != "slots"})
    _put(state.tenants, frame["accounts"])
    for one, costs in zip((state.tenants.failed_steps, state.tenants.preparations), frame["costs"], strict=True):
        one._costs = {key: tuple(entry) for key, entry in costs.items()}
    _put(state.adapters, frame["adapters"])
    _put(swapping, {name: frame["swapping"][name] for name in _SWAP_FIELDS})
    swapping._stacks = list(frame["swapping"]["stacks"])
    _put(scheduler.admission._order, frame["order"])
    scheduler.admission._order._sorted_by = engine._policy.strategy
    _put(engine._recovery, frame["recovery"])
    _put(table, frame["table"])
    _restore_blocks(state, frame, request_of, tokens_of, restores_eviction=restores_eviction)
    if restores_scheduling:
        PolicyMemory.restore(engine._policy.strategy, frame["scheduling"], lambda number: b"%032d" % number)
    else:
        engine._policy._introduce(engine._policy.strategy)
    for values in frame["in_flight"]:
        drafts = values["num_drafts"]
        plan = Plan(
            **{name: values[name] for name in _PLAN_FIELDS},
            drafts=None if drafts is None else Drafts(num_drafts=drafts, token_ids=np.zeros(int(drafts.sum()), np.int32)),
        )
        engine._in_flight.append(SubmittedStep(plan=plan, pending=pending(plan)))


def _put(owner: object, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(owner, name, value)


def _restore_sequences(
    state: EngineState,
    frame: Mapping[str, Any],
    request_of: Callable[[int], Request],
    tokens_of: Callable[[int], Sequence[int]],
) -> None:
    """Add the requests as they came, and give those that run their rows."""
    table, columns = state.table, frame["columns"]
    while table.capacity < len(columns["row"]):
        table._grow(table.capacity * 2)
    for number, values in zip(frame["requests"], frame["sequences"], strict=True):
        slot, original = values["slot"], request_of(number)
        request = state.tenants.complete(original)
        sequence = EngineSequence(
            request,
            original_request=original,
            slot=slot,
            seed=state._row_seed(request),
            stop_token_ids=() if request.params.ignore_eos else state.eos_token_ids,
        )
        table.sequences[slot] = sequence
        state.slot_of[request.request_id] = slot
        state.tenants.enter(slot, request, has_own_weight=original.weight is not None)
        if not values["is_running"]:
            state.tenants.waits(slot)
        known = int(columns["num_known_tokens"][slot])
        sequence.tokens = np.array(tokens_of(number)[:known], np.int32)
        _put(sequence, {name: values[name] for name in _SEQUENCE_FIELDS})
        if values["is_running"]:
            sequence.state = SequenceState.RUNNING
            row = int(columns["row"][slot])
            state.rows.tokens[row, :known] = sequence.tokens
            state.rows.block_tables[row, : len(values["blocks"])] = values["blocks"]
    for name, column in columns.items():
        getattr(table, name)[: len(column)] = column
    state.rows._free = frame["free_rows"]
    state.rows.num_free = sum(map(len, frame["free_rows"]))


def _restore_blocks(
    state: EngineState,
    frame: Mapping[str, Any],
    request_of: Callable[[int], Request],
    tokens_of: Callable[[int], Sequence[int]],
    *,
    restores_eviction: bool,
) -> None:
    """Hold and cache the blocks as recorded, under the hashes that the tokens of this engine have."""
    hashes = {}
    for one, number, depth in frame["hashes"]:
        request, chain = request_of(number), list[bytes]()
        tokens = np.array(tokens_of(number), np.int32)
        state.hasher.extend(
            chain, tokens, num_blocks=depth + 1, salt=request.cache_salt, adapter=request.adapter
        )
        hashes[one] = chain[depth]

    def hash_of(number: int) -> bytes:
        return hashes.get(number) or b"%032d" % number

    for part, values, memory in zip(_parts(state), frame["blocks"], frame["evictions"], strict=True):
        part.num_free, part.num_available = len(values["free"]), values["num_available"]
        part._stack[: part.num_free] = values["free"]
        part.ref_counts[part.first : part.first + part.num_blocks] = values["ref_counts"]
        part._hash_of = {block: hash_of(number) for block, number in values["hash_of"]}
        part._block_of = {block_hash: block for block, block_hash in part._hash_of.items()}
        part._depth_of = dict(values["depth_of"])
        part._previous = {hash_of(one): hash_of(before) for one, before in values["previous"]}
        for one, before in part._previous.items():
            part._successors.setdefault(before, {})[one] = None
        part._cached = {block for block in part._hash_of if not part.ref_counts[block]}
        eviction = part._eviction
        if restores_eviction:
            eviction._id_of = dict(values["id_of"])
            eviction._block_of = {known: block for block, known in eviction._id_of.items()}
            PolicyMemory.restore(eviction.strategy, memory, hash_of)
        else:
            eviction._stale = True
