"""Main loop of the worker process: receives messages between steps, and sends the outputs of each step.

    receive ▶ add, end, embed ▶ engine.step ▶ send

Without work it sleeps in the socket.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import msgspec
import numpy as np

from trencadis.activity import ACTIVITY, EnginePhase
from trencadis.client.engine_client import StepOutputs, step_outputs
from trencadis.errors import InternalError, InvalidRequestError, RequestError, TrencadisError
from trencadis.records import EngineLoad, FinishedSequence, Int32Array, TokenDeltas, TokenLogprobs
from trencadis_remote.process.channel import Channel, WakeUpFile
from trencadis_remote.process.messages import (
    HASH_BYTES,
    AddMessage,
    AnswerMessage,
    ClientMessage,
    CloseMessage,
    ControlMessage,
    DropMessage,
    EmbedMessage,
    EndMessage,
    GetMetricsMessage,
    LoadMessage,
    MetricsMessage,
    StayedMessage,
    WithdrawMessage,
    WorkerMessage,
)
from trencadis_remote.process.wire import decode_client_message, decode_request, encode, readable

if TYPE_CHECKING:
    from trencadis.api import AnyEngine
    from trencadis.clock import Clock

__all__ = ["LOAD_S", "EngineWorker"]

LOAD_S = 0.02
"""Between two messages about the load of an engine that is busy."""

_TRANSFER_POLL_S = 0.001
_PINNED_POLL_S = 0.02
"""No request waits: blocks are only pinned for transfers, and a message ends the sleep."""
_MAX_ENTRIES = 128
"""Tokens of a prompt whose log-probabilities are one message: at 50 alternatives each, it is decoded in two milliseconds."""
_EMPTY = np.empty(0, np.int32)
_NO_DELTAS = TokenDeltas(slots=_EMPTY, num_tokens=_EMPTY, token_ids=_EMPTY)


class EngineWorker:
    """Serves one client with an engine. Used by one thread.

    Args:
        engine: Ready for requests; closed by its maker.
        channel: To the client.
        beat_s: The longest time without a sign of progress while there is nothing to do, seconds.
        load_clock: By which the client is sent the engine's load every ``LOAD_S``; None: it is not.
    """

    def __init__(
        self,
        engine: AnyEngine,
        channel: Channel,
        *,
        beat_s: float = 1.0,
        load_clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._beat_s = beat_s
        self._handle_of: dict[str, int] = {}
        self._id_of: dict[int, str] = {}
        self._handle_of_slot: Int32Array = np.full(256, -1, np.int32)
        self._ended: list[FinishedSequence] = []
        self._is_open = True
        self._load_clock = load_clock
        self._load_due_s = 0.0
        self._has_new_load = False

    @property
    def num_live(self) -> int:
        """Requests that have neither ended nor been refused."""
        return len(self._handle_of)

    def run(self) -> None:
        """Serve until the client closes.

        Raises:
            InternalError: An invariant of the engine does not hold.
        """
        wake_up = WakeUpFile()
        self._channel.watch(wake_up.fileno())
        self._engine.wake_by(wake_up.wake)
        try:
            while self.turn():
                if not self._engine.has_work:
                    if self._has_new_load:
                        self._send_load()
                    ahead_s = self._engine.work_ahead()
                    ACTIVITY.begin(EnginePhase.IDLE)
                    self._channel.wait(self._beat_s if ahead_s is None else min(ahead_s, self._beat_s))
                    wake_up.clear()
                elif self._engine.is_stalled:
                    self._channel.wait(_TRANSFER_POLL_S if self._engine.num_waiting else _PINNED_POLL_S)
                    wake_up.clear()
        finally:
            wake_up.close()

    def turn(self) -> bool:
        """Execute the received messages and take one step; does not sleep. False: the client closes."""
        ACTIVITY.begin(EnginePhase.REQUESTS)
        for data in self._channel.receive():
            self._execute(decode_client_message(data))
        if self._is_open and (self._ended or self._engine.has_work):
            self._step()
            if self._load_clock is not None:
                self._has_new_load = True
                if self._load_clock.now_s() >= self._load_due_s:
                    self._load_due_s = self._load_clock.now_s() + LOAD_S
                    self._send_load()
        return self._is_open

    def _execute(self, message: ClientMessage) -> None:
        match message:
            case AddMessage():
                self._add(message)
            case EndMessage():
                self._end(message)
            case WithdrawMessage():
                self._withdraw(message)
            case EmbedMessage():
                self._embed(message)
            case DropMessage():
                self._engine.abort(message.request_id)
            case GetMetricsMessage():
                self._send(MetricsMessage(text=readable(self._engine.metrics())))
            case ControlMessage():
                self._send_answer(self._answer(message))
            case CloseMessage():
                self._is_open = False

    def _add(self, message: AddMessage) -> None:
        try:
            slot = self._engine.add(decode_request(message.request))
        except RequestError as error:
            self._send(StepOutputs(refused=((message.request_id, error),)))
            return
        while slot >= len(self._handle_of_slot):
            self._handle_of_slot = np.concatenate([self._handle_of_slot, np.full_like(self._handle_of_slot, -1)])
        self._handle_of_slot[slot] = message.handle
        self._handle_of[message.request_id] = message.handle
        self._id_of[message.handle] = message.request_id

    def _send_load(self) -> None:
        self._has_new_load = False
        self._send(LoadMessage(load=_cut(self._engine.load())))

    def _answer(self, message: ControlMessage) -> AnswerMessage:
        try:
            return AnswerMessage(table=self._engine.answer(message.name, message.arguments))
        except TrencadisError as error:
            return AnswerMessage(table={}, error=error)

    def _send_answer(self, answer: AnswerMessage) -> None:
        """Send an answer; one that cannot be encoded becomes an error, since a control request must not end the engine."""
        try:
            self._send(answer)
        except InvalidRequestError as error:
            self._send(AnswerMessage(table={}, error=InternalError(f"the answer cannot be sent: {error}")))

    def _end(self, message: EndMessage) -> None:
        request_id = self._id_of.get(message.handle)
        if request_id is None:
            return  # it has ended; the client receives its end
        finished = self._engine.stop(request_id) if message.is_complete else self._engine.abort(request_id)
        if finished is not None:
            self._ended.append(finished)

    def _withdraw(self, message: WithdrawMessage) -> None:
        request_id = self._id_of.get(message.handle)
        if request_id is None:
            return  # it has ended; the client receives its end
        finished = self._engine.withdraw(request_id)
        if finished is None:
            self._send(StayedMessage(request_id=request_id))
        else:
            self._ended.append(finished)

    def _embed(self, message: EmbedMessage) -> None:
        try:
            self._engine.take(message.request)
        except RequestError as error:
            self._send(StepOutputs(refused=((message.request.request_id, error),)))

    def _step(self) -> None:
        deltas = self._engine.step() if self._engine.has_work else _NO_DELTAS
        if self._ended:
            deltas = attrs.evolve(deltas, finished=(*self._ended, *deltas.finished))
            self._ended = []
        outputs = step_outputs(deltas, self._handle_of_slot[deltas.slots])
        if outputs.finished or outputs.refused or outputs.prompt_logprobs or outputs.embeddings:
            for entries in self._prompt_logprobs(outputs.prompt_logprobs):
                self._send(StepOutputs(prompt_logprobs=entries))
            outputs = self._with_ends(outputs)
        elif not outputs.slots:
            return
        self._send(outputs)

    def _with_ends(self, outputs: StepOutputs) -> StepOutputs:
        """Return outputs in which something ends as they are sent: by handles, and without log-probabilities of prompts.

        A slot may have been given to another already: the handles of what has ended are found by name.
        """
        gone = [self._handle_of.pop(one.request_id) for one in outputs.finished]
        for handle in (*gone, *(self._handle_of.pop(request_id) for request_id, _ in outputs.refused)):
            del self._id_of[handle]
        return msgspec.structs.replace(
            outputs,
            finished=tuple(
                attrs.evolve(one, slot=handle, error=readable(one.error))
                for one, handle in zip(outputs.finished, gone, strict=True)
            ),
            embeddings=tuple(attrs.evolve(one, error=readable(one.error)) for one in outputs.embeddings),
            prompt_logprobs=(),
        )

    def _prompt_logprobs(self, entries: tuple[TokenLogprobs, ...]) -> Iterator[tuple[TokenLogprobs, ...]]:
        """Yield log-probabilities of prompts by handle, in parts: a client takes other messages between two of them."""
        handles = self._handle_of_slot
        for start in range(0, len(entries), _MAX_ENTRIES):
            part = entries[start : start + _MAX_ENTRIES]
            yield tuple([msgspec.structs.replace(one, index=int(handles[one.index])) for one in part])

    def _send(self, message: WorkerMessage) -> None:
        self._channel.send(encode(message), while_waiting=self._wait_for_room)

    def _wait_for_room(self, _: list[int]) -> float:
        """Record that the client does not receive, so that the stall watch does not blame the engine."""
        ACTIVITY.begin(EnginePhase.SENDING)
        return self._beat_s


def _cut(load: EngineLoad) -> EngineLoad:
    """Return a load with hashes as long as a router needs them. Pure."""
    added, removed = (tuple([one[:HASH_BYTES] for one in hashes]) for hashes in (load.added, load.removed))
    return attrs.evolve(load, added=added, removed=removed)
