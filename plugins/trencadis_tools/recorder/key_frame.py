"""Key frames: all that an engine's next steps depend on, copied between two steps, and put into an engine that was just built.

    take ── copies of what sequences and policy have ──▶ KeyFrame ── encoded, with the trailing blocks ──▶ FlightRecord.frame ── restore ──▶ Engine

Blocks and eviction policies are not copied: :class:`~trencadis_tools.recorder.trailing_blocks.TrailingBlocks` has them as they were.
Without a KV connector, and without sequences that wait for their sampler. Tokens are not in it: of each sequence only how many are known.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from trencadis.engine.sequences import Sequence as EngineSequence
from trencadis.engine.sequences import SequenceState
from trencadis.engine.stage import EngineParts
from trencadis.engine.state import EngineState
from trencadis.engine.step import SubmittedStep
from trencadis.interfaces import PendingStep
from trencadis.interfaces.restorable import Restorable
from trencadis.records import Drafts, FinishedSequence, Plan, Request
from trencadis_tools.recorder.flight_record import RecordedRequest
from trencadis_tools.recorder.policy_memory import PolicyMemory

__all__ = ["KeyFrame", "RecordedLife", "restore_frame", "take_frame"]

_SEQUENCE_FIELDS = (
    "slot",
    "num_cached_tokens",
    "first_scheduled_s",
    "first_token_s",
    "late_token_epoch",
    "num_failures",
)
_PLAN_FIELDS = ("step", "slots", "rows", "epochs", "starts", "num_scheduled", "samples", "admitted", "preempted")


class RecordedLife:
    """One request in the engine: what its record needs, and its tokens, of which only shared beginnings are recorded.

    Attributes:
        number: Number of the request in this engine.
        sequence: The sequence while it lives; then None.
        record: The request as a record has it.
        tokens: Tokens known when it was added, int32 ``[n]``.
        block_hashes: Hashes of its full blocks; the engine extends the list.
        finished: How it ended; None while it lives.
    """

    __slots__ = ("block_hashes", "finished", "number", "record", "sequence", "tokens")

    def __init__(self, number: int, sequence: EngineSequence, record: RecordedRequest) -> None:
        self.number = number
        self.sequence: EngineSequence | None = sequence
        self.record = record
        self.tokens = sequence.tokens
        self.block_hashes = sequence.block_hashes
        self.finished: FinishedSequence | None = None


@attrs.define(kw_only=True, eq=False)
class KeyFrame:
    """Copies, made by :func:`take_frame`.

    Attributes:
        plain: Numbers, arrays, and dictionaries of them.
        scheduling: Memory of the scheduling policy.
        obstacles: Why it cannot be restored exactly.
    """

    plain: dict[str, Any]
    scheduling: PolicyMemory
    obstacles: list[str]

    def encoded(
        self,
        lives: Sequence[RecordedLife],
        numbers: Mapping[int, int],
        blocks: Sequence[Mapping[str, Any]],
        evictions: Sequence[PolicyMemory],
    ) -> tuple[dict[str, Any], list[str]]:
        """Return it as values of msgpack, and why it cannot be restored exactly.

        Hashes become numbers; of each that a recorded request has, which block of which request it is of.

        Args:
            lives: The requests of the record.
            numbers: Their numbers, by ``id``.
            blocks: State of each partition's blocks at the same moment; hashes are ``bytes``.
            evictions: Memory of the eviction policy of each partition.
        """
        hashes: dict[bytes, int] = {}

        def number_of(block_hash: bytes) -> int:
            return hashes.setdefault(block_hash, len(hashes))

        memories = [self.scheduling, *evictions]
        frame = {
            **self.plain,
            "requests": [numbers[life] for life in self.plain["requests"]],
            "blocks": [
                {
                    **part,
                    "hash_of": [[block, number_of(one)] for block, one in part["hash_of"].items()],
                    "previous": [[number_of(one), number_of(before)] for one, before in part["previous"].items()],
                }
                for part in blocks
            ],
            "scheduling": self.scheduling.encoded(number_of),
            "evictions": [one.encoded(number_of) for one in evictions],
        }
        homes: dict[int, tuple[int, int]] = {}
        for life in lives:
            for depth, block_hash in enumerate(list(life.block_hashes)):
                if block_hash in hashes:
                    homes.setdefault(hashes[block_hash], (numbers[id(life)], depth))
        frame["hashes"] = [[one, *home] for one, home in homes.items()]
        return frame, self.obstacles + [one.obstacle for one in memories if one.obstacle]


_OF_SCHEDULER = {"next_step": "next_step", "verifies": "had_drafts"}
"""Names in a frame of the scheduler's fields, which lie beside the parts there."""


def _parts_of(engine: EngineParts) -> dict[str, Restorable]:
    """Return the parts that copy and restore themselves, by name, but for the scheduler."""
    state = engine.state
    return {
        "table": state.table,
        "rows": state.rows,
        "waiting": state.waiting,
        **{name: part for name, part in engine.kept.items() if name != "scheduler"},
    }


def take_frame(engine: EngineParts, lives: Sequence[RecordedLife]) -> KeyFrame:
    """Copy the state between two steps, without that of blocks and eviction policies.

    Args:
        engine: The engine.
        lives: Requests of the engine, in order of arrival.
    """
    state, policy = engine.state, engine.policy
    obstacles = []
    if policy.num_quarantined or any(part.eviction.num_quarantined for part in state.blocks.parts):
        obstacles.append("a policy had been replaced by its fallback before the record begins")
    if state.aside:
        obstacles.append("a request waited for its sampler where the record begins")
    return KeyFrame(
        plain={
            **{_OF_SCHEDULER[name]: value for name, value in engine.kept["scheduler"].copy_state().items()},
            "now_s": state.clock.now_s(),
            "requests": [id(life) for life in lives],
            "sequences": [_sequence(state, life.sequence) for life in lives if life.sequence is not None],
            "running": state.running.copy(),
            "in_flight": [_plan(step.plan) for step in engine.in_flight],
            **{name: part.copy_state() for name, part in _parts_of(engine).items()},
        },
        scheduling=PolicyMemory(policy.strategy),
        obstacles=obstacles,
    )


def restore_frame(
    engine: EngineParts,
    frame: Mapping[str, Any],
    *,
    request_of: Callable[[int], Request],
    tokens_of: Callable[[int], Sequence[int]],
    pending: Callable[[Plan], PendingStep],
    restores_scheduling: bool = True,
    restores_eviction: bool = True,
) -> None:
    """Put an engine into a recorded state; it was just built, by the same configuration.

    Args:
        engine: The engine.
        frame: Key frame of a record.
        request_of: Returns the request of a number.
        tokens_of: Returns all its tokens, those included that are not known yet.
        pending: Returns what waits for a step that was in flight.
        restores_scheduling: The policy is the recorded one; else it is told of the live requests.
        restores_eviction: The policy is the recorded one; else it is told of the cached blocks.
    """
    frame = copy.deepcopy(frame)  # the parts change what they are given
    state, policy = engine.state, engine.policy.strategy
    state.clock.hold()
    state.table.restore_state(copy.deepcopy(frame["table"]))
    _restore_sequences(state, frame, request_of, tokens_of)
    for name, part in _parts_of(engine).items():  # the table once more: sequences that enter change columns
        part.restore_state(frame[name])
    state.running = frame["running"]
    engine.kept["scheduler"].restore_state({name: frame[key] for name, key in _OF_SCHEDULER.items()})
    hash_of = _hashes(state, frame, request_of, tokens_of)
    _restore_blocks(state, frame, hash_of, restores_eviction=restores_eviction)
    if restores_scheduling:
        PolicyMemory.restore(policy, frame["scheduling"], _hash_of_number)
    else:
        for slot in state.slot_of.values():
            policy.on_added(slot=slot, request=state.table.sequence(slot).request)
    for values in frame["in_flight"]:
        plan = _restored_plan(values)
        engine.in_flight.append(SubmittedStep(plan=plan, pending=pending(plan)))


def _restore_sequences(
    state: EngineState,
    frame: Mapping[str, Any],
    request_of: Callable[[int], Request],
    tokens_of: Callable[[int], Sequence[int]],
) -> None:
    for number, values in zip(frame["requests"], frame["sequences"], strict=True):
        request = request_of(number)
        sequence = EngineSequence(
            request,
            slot=values["slot"],
            seed=state.row_seed(request),
            stop_token_ids=() if request.params.ignore_eos else state.eos_token_ids,
        )
        sequence.tokens = np.array(tokens_of(number)[: values["num_known"]], np.int32)
        for name in _SEQUENCE_FIELDS:
            setattr(sequence, name, values[name])
        sequence.part = values["partition"]
        state.restore(
            sequence,
            is_running=values["is_running"],
            blocks=values["blocks"],
        )


def _restore_blocks(
    state: EngineState, frame: Mapping[str, Any], hash_of: Callable[[int], bytes], *, restores_eviction: bool
) -> None:
    """Hold and cache the blocks as recorded, under the hashes that the tokens of this engine have."""
    for part, values, memory in zip(state.blocks.parts, frame["blocks"], frame["evictions"], strict=True):
        part.restore_state(
            {
                **values,
                "hash_of": {block: hash_of(number) for block, number in values["hash_of"]},
                "previous": {hash_of(one): hash_of(before) for one, before in values["previous"]},
            }
        )
        if restores_eviction:
            part.eviction.restore_ids(values["id_of"])
            PolicyMemory.restore(part.eviction.strategy, memory, hash_of)
        else:
            part.eviction.inform_again()


def _sequence(state: EngineState, sequence: EngineSequence) -> dict[str, Any]:
    """Return what a sequence has beyond its columns."""
    is_running = sequence.state is SequenceState.RUNNING
    return {
        **{name: getattr(sequence, name) for name in _SEQUENCE_FIELDS},
        "partition": sequence.part,
        "num_known": len(state.known_tokens(sequence)),
        "is_running": is_running,
        "blocks": state.blocks_of(sequence).copy() if is_running else None,
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        **{name: getattr(plan, name) for name in _PLAN_FIELDS},
        "num_drafts": None if plan.drafts is None else plan.drafts.num_drafts,
    }


def _restored_plan(values: Mapping[str, Any]) -> Plan:
    counts = values["num_drafts"]
    drafts = None
    if counts is not None:
        drafts = Drafts(num_drafts=counts, token_ids=np.zeros(int(counts.sum()), np.int32))
    return Plan(**{name: values[name] for name in _PLAN_FIELDS}, drafts=drafts)


def _hashes(
    state: EngineState,
    frame: Mapping[str, Any],
    request_of: Callable[[int], Request],
    tokens_of: Callable[[int], Sequence[int]],
) -> Callable[[int], bytes]:
    """Return what gives each number of a hash the hash that the same block has here; one of no request stands for itself."""
    hashes = {}
    for one, number, depth in frame["hashes"]:
        request, chain = request_of(number), list[bytes]()
        tokens = np.array(tokens_of(number), np.int32)
        state.hasher.extend(chain, tokens, num_blocks=depth + 1, salt=request.cache_salt)
        hashes[one] = chain[depth]
    return lambda number: hashes.get(number) or _hash_of_number(number)


def _hash_of_number(number: int) -> bytes:
    return b"%032d" % number
